"""Calls of the fake libraries as a job makes them, by interposer_job.c; knows no gemmtune."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int32, c_long, c_uint64, c_void_p
from pathlib import Path

VENDOR = os.environ.get("GEMMTUNE_TEST_VENDOR", "cublaslt")
HIP = VENDOR == "hipblaslt"
# By attributes' numbers; of hipBLASLt the solution's index.
SETTINGS = (1000 if HIP else 20, 15, 1, 0, 0, 0, 0, 0, 0)
N, T = (111, 112) if HIP else (0, 1)
CAPTURING = 1  # the stream that captures where one does


class Spec(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("m", "n", "k", "trans_a", "trans_b")),
        *((name, c_int32) for name in ("type_a", "type_b", "type_d", "epi", "bias_type")),
        *((name, c_int32) for name in ("fast", "batch", "lda", "ldb", "ldd", "offset")),
        ("batch_mode", c_int32),
        ("beta", c_float),
        ("ws_bytes", c_uint64),
        ("settings", c_int32 * 9),
        ("api", c_int32),
        ("stream", c_void_p),
    )


def spec(m: int = 8, n: int = 16, k: int = 32, **more: object) -> Spec:
    own = {
        "trans_a": T,
        "trans_b": N,
        "epi": 1,
        "bias_type": -1,
        "batch": 1,
        "ws_bytes": 4096,
        **more,
    }
    own = {"lda": m if own["trans_a"] == N else k, "ldb": k, "ldd": m, **own}
    settings = own.pop("settings", SETTINGS)
    return Spec(m=m, n=n, k=k, settings=(c_int32 * 9)(*settings), **own)  # type: ignore[arg-type]


def library(folder: Path) -> ctypes.CDLL:
    """The job's own library: job_gemm on ones, job_gemm_on given memory."""
    found = ctypes.CDLL(str(folder / "libjob.so"))
    found.job_gemm.argtypes = (c_void_p, c_long, c_void_p)
    found.job_gemm_on.argtypes = (c_void_p,) * 4
    return found
