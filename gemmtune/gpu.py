"""What the driver says of one GPU at this moment, whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmtune import amd_smi, nvml
from gemmtune.nvml import Reading


def read(uuid: str) -> Reading:
    """The GPU of that uuid (machine.Gpu.uuid). Never raises."""
    found = nvml.read(uuid)
    return amd_smi.read(uuid) if found == Reading() else found


@contextmanager
def meter(uuid: str) -> Iterator[Callable[[], Reading] | None]:
    """See nvml.meter."""
    with nvml.meter(uuid) as reader:
        if reader is not None:
            yield reader
            return
    with amd_smi.meter(uuid) as reader:
        yield reader
