"""A stand-in for Transformer Engine's extension, by the fake cuBLASLt on CPU memory.

The function's arguments, and that it is looked up in its module at each call, are those of
transformer_engine/pytorch/cpp_extensions/gemm.py.
"""

from __future__ import annotations

import os
import sys
from ctypes import byref
from pathlib import Path
from typing import Any

import torch
from fake_calls import library, spec

_job = library(Path(os.environ["GEMMTUNE_TEST_FAKES"]))
_TYPES = {torch.float32: 0, torch.bfloat16: 14}
stream = 0  # what calls go to


def generic_gemm(a: Any, trans_a: bool, b: Any, trans_b: bool, d: Any = None, *rest: Any) -> Any:
    """Row-major: b @ a, either transposed (A and B of the column-major call). Without epilogues."""
    (rows_a, lda), (rows_b, ldb) = a.shape, b.shape
    m, k = (rows_a, lda) if trans_a else (lda, rows_a)
    n = ldb if trans_b else rows_b
    out = torch.empty(n, m, dtype=a.dtype)
    kinds = dict.fromkeys(("type_a", "type_b", "type_d"), _TYPES[a.dtype])
    ops = {"trans_a": int(trans_a), "trans_b": int(trans_b), "lda": lda, "ldb": ldb}
    made = spec(m, n, k, **kinds, **ops, stream=stream)
    pointers = (t.data_ptr() for t in (a, b, out))
    if status := _job.job_gemm_on(byref(made), *pointers):
        raise RuntimeError(f"status {status}")
    return out, None


def product(*operands: Any) -> Any:
    """By the module's function at this moment, with the arguments of a GEMM without epilogue."""
    rest = (None, None, None, None, None, False, None, False, None, 4096, False, False)
    return sys.modules[__name__].generic_gemm(*operands, *rest)[0]
