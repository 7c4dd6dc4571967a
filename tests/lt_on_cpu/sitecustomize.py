"""Lets the cuBLASLt backend run on CPU memory in every process of test_lt_flow.py.

The stand-ins for the libraries are preloaded; only what needs a GPU's Python is replaced here.
"""

from fake_lt import OnCpu

from gemmtune.backends.cublaslt import CublasLt

CublasLt.device = "cpu"
CublasLt.dev_cap = lambda _: 900  # type: ignore[method-assign]
CublasLt._stream = OnCpu._stream  # type: ignore[method-assign]
CublasLt.time_us = OnCpu.time_us  # type: ignore[method-assign]


def _workspace(self: CublasLt, size: int):  # type: ignore[no-untyped-def]
    """As a GPU's memory is aligned."""
    import torch

    space = torch.empty(size + 256, dtype=torch.uint8)
    return space[-space.data_ptr() % 256 :]


CublasLt._workspace = _workspace  # type: ignore[method-assign]
