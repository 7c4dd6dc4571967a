"""numpy's OpenBLAS: found in this process, its threads set; tensors as numpy sees them.

Reads /proc/self/maps; writes nothing. Runs inside a job too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class OpenBlas:
    """The OpenBLAS that numpy brought into this process, to make its threads follow torch's."""

    def __init__(self, path: str) -> None:
        library: Any = ctypes.CDLL(path)
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", "", "_"):
                if hasattr(library, f"{prefix}_set_num_threads{suffix}"):
                    self._set = getattr(library, f"{prefix}_set_num_threads{suffix}")
                    self._get = getattr(library, f"{prefix}_get_num_threads{suffix}")
                    config = getattr(library, f"{prefix}_get_config{suffix}")
                    config.restype = ctypes.c_char_p
                    self.config = " ".join(config().decode().split()[:2])
                    return
        raise OSError(f"{path} has no openblas_set_num_threads")

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Meanwhile have `count` threads; afterwards as many as the job's own numpy calls had."""
        before = self._get()
        if before == count:
            yield
            return
        self._set(count)
        try:
            yield
        finally:
            self._set(before)


@functools.lru_cache(maxsize=1)
def find() -> OpenBlas | None:
    """Found among the libraries that the process has mapped (Linux); None where there is none."""
    import numpy  # noqa: F401  (maps its BLAS)

    try:
        with open("/proc/self/maps") as f:
            paths = {line.split(maxsplit=5)[-1].strip() for line in f if "openblas" in line}
        return OpenBlas(sorted(paths)[0]) if paths else None
    except OSError:
        return None


class _Memory:
    """A tensor's memory for numpy (the array interface, version 3).

    Tensor.numpy() would mark the storage as one that cannot be resized, which FSDP does to it at
    every step.
    """

    def __init__(self, t: Tensor) -> None:
        size = t.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (t.data_ptr(), False),
            "typestr": f"<f{size}",
            "shape": tuple(t.shape),
            "strides": tuple(stride * size for stride in t.stride()),
        }


def array(t: Tensor) -> Any:
    """A numpy view of a tensor, valid while the tensor is."""
    import numpy

    if not t.numel():
        return numpy.empty(t.shape, f"<f{t.element_size()}")
    return numpy.asarray(_Memory(t))
