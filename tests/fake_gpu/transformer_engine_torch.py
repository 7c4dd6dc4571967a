"""A stand-in for Transformer Engine's extension and a layer over it, by the fake cuBLASLt on CPU
memory. The function's arguments, and that it is looked up in its module at each call, are those of
transformer_engine/pytorch/cpp_extensions/gemm.py."""

from __future__ import annotations

import os
import sys
from ctypes import byref
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fake_calls import library, spec

_job = library(Path(os.environ["GEMMTUNE_TEST_FAKES"]))
_TYPES = {torch.float32: 0, torch.bfloat16: 14}
stream = 0  # what calls go to
_SELF = sys.modules[__name__]
# Where Transformer Engine's Python looks it up.
entries = ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")
entries.tex = _SELF  # type: ignore[attr-defined]
sys.modules[entries.__name__] = entries


def generic_gemm(a: Any, trans_a: bool, b: Any, trans_b: bool, *_: Any, **more: Any) -> Any:
    """Row-major: b @ a, either transposed (A and B of the column-major call)."""
    (rows_a, lda), (rows_b, ldb) = a.shape, b.shape
    m, k = (rows_a, lda) if trans_a else (lda, rows_a)
    n = ldb if trans_b else rows_b
    out = torch.empty(n, m, dtype=a.dtype)
    kinds = dict.fromkeys(("type_a", "type_b", "type_d"), _TYPES[a.dtype])
    ops = {"trans_a": int(trans_a), "trans_b": int(trans_b), "lda": lda, "ldb": ldb}
    made = spec(m, n, k, **kinds, **ops, stream=stream, **more)
    pointers = (t.data_ptr() for t in (a, b, out))
    if status := _job.job_gemm_on(byref(made), *pointers):
        raise RuntimeError(f"status {status}")
    return out, None


def _gemm(*args: Any) -> Any:
    rest = (*(None,) * 5, False, None, False, None, 0, False, True)
    return _SELF.generic_gemm(*args, *rest)[0]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return _gemm(w, True, x, False)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        return _gemm(w, False, dy, False), _gemm(x, False, dy, True)


class Linear(torch.nn.Module):
    def __init__(self, inner: int, out: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(out, inner).to(dtype) / inner**0.5)

    def forward(self, x: Any) -> Any:
        return Product.apply(x, self.weight)
