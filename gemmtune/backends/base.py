"""The backend protocol: what sweep and replay ask of a GEMM library, and the lookup by name or GPU.

A backend knows one library: which algorithms it has for a Gemm and how to launch and time one.
It knows no tables and keeps no statistics.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gemmtune import machine
from gemmtune.errors import UsageError
from gemmtune.gemm import Algo, Gemm

if TYPE_CHECKING:
    import torch

BACKENDS = {
    "cpu": "gemmtune.backends.cpu:Cpu",
    "cublaslt": "gemmtune.backends.cublaslt:CublasLt",
    "hipblaslt": "gemmtune.backends.hipblaslt:HipblasLt",
    "te": "gemmtune.backends.te:Te",
}
# Backends of a vendor's GPUs, the preferred one first.
PREFERRED = {"NVIDIA": ("cublaslt",), "AMD": ("te", "hipblaslt")}
NEEDS = {"te": "transformer_engine"}  # the distribution without which a backend is passed over

# What makes the library to be preloaded into jobs, for backends whose calls are caught by one.
PRELOADS = {
    "cublaslt": "gemmtune.interposer.build:library",
    "hipblaslt": "gemmtune.interposer.build:hip_library",
}


class Operands(NamedTuple):
    """One set of operands, as torch tensors in torch's row-major view of a Gemm.

    x: (n, k), the library's B;  w: (k, m), the library's A;  c and d: (n, m);  bias: (m,).
    A batched Gemm has a leading batch dimension on x, w, c and d. `c` is None without beta, `bias`
    without the epilogue; scales are 0-d float32 tensors, None unless FP8. Strides are the Gemm's.
    gelu_in: (n, m), what went into the GELU: written by its epilogues, read by its gradient's.
    bgrad: the bias gradient that is written, (m,), or (n,) by bgradb.
    """

    x: torch.Tensor
    w: torch.Tensor
    d: torch.Tensor
    c: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    gelu_in: torch.Tensor | None = None
    bgrad: torch.Tensor | None = None


Launch = Callable[[Operands], None]


class Backend(Protocol):
    """One GEMM library on one device.

    It takes hold of the device when a Gemm is first launched or its algorithms are asked for: until
    then it can be pickled, and so be handed to a worker process.
    """

    name: str
    device: str  # torch's name of the device that operands live on
    # "type": only algorithms that keep within the rounding of the GEMM's own type; "any": all.
    numerics: str

    def dev_cap(self) -> int:
        """TE's device number: major*100+minor of the GPU; 0 for a CPU."""

    def library(self) -> str:
        """The library's build. Algorithm numbers hold for one build only."""

    def unsupported(self, gemm: Gemm) -> str | None:
        """Why this backend cannot run the Gemm; None where it can."""

    def algos(self, gemm: Gemm) -> Sequence[Algo]:
        """The algorithms for a Gemm, the default first. Some may still fail to launch."""

    def workspace_bytes(self, gemm: Gemm, algo: Algo) -> int:
        """The workspace that an algorithm needs."""

    def launcher(self, gemm: Gemm, algo: Algo) -> Launch:
        """A prepared launch that writes operands.d. Raises BackendError where it cannot be done."""

    def time_us(self, launch: Launch, operands: Sequence[Operands], launches: int) -> float:
        """Mean microseconds per launch over back-to-back launches, operands in rotation."""


def get(name: str) -> Backend:
    """The backend of that name. Raises UsageError (unknown), BackendError (cannot load)."""
    check_name(name)
    module, cls = BACKENDS[name].split(":")
    backend: Backend = getattr(importlib.import_module(module), cls)()
    return backend


def check_name(name: str) -> None:
    """Raises UsageError where no backend has that name."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")


def applying(provenance: Mapping[str, Any], named: str | None) -> str:
    """The backend that applies a table: the one named, else the table's, else this machine's."""
    return named or provenance.get("backend") or detect()


def preload(name: str) -> Path | None:
    """The library that a job of this backend is to start with, if any. Raises BackendError."""
    if name not in PRELOADS:
        return None
    module, function = PRELOADS[name].split(":")
    path: Path = getattr(importlib.import_module(module), function)()
    return path


def detect(found: Sequence[machine.Gpu] | None = None) -> str:
    """Name of the backend for this machine: its GPU's, or cpu where there is no GPU.

    Raises UsageError on a machine whose GPU has no backend here: its CPU is not tuned unasked.
    """
    found = machine.gpus() if found is None else found
    if not found:
        return "cpu"
    gpu = found[0]
    for name in PREFERRED[gpu.vendor]:
        if name in BACKENDS and (name not in NEEDS or machine.version_of(NEEDS[name])):
            return name
    raise UsageError(
        f"this machine has a GPU ({gpu.name}), and this version of gemmtune has no backend for "
        f"{gpu.vendor} GPUs yet: add --backend cpu to tune its CPU instead"
    )
