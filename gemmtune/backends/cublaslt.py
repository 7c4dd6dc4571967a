"""cuBLASLt: NVIDIA's names, numbers and sizes for the Lt API.

Numbers are those of cublasLt.h, cublas_api.h and library_types.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p

from gemmtune.backends import blas
from gemmtune.backends.base import Launch
from gemmtune.backends.lt import Lt
from gemmtune.backends.lt_api import Attribute, Vendor
from gemmtune.gemm import Algo, Gemm

CUBLASLT = Vendor(
    title="cuBLASLt",
    prefix="cublasLt",
    libraries=("libcublasLt.so.13", "libcublasLt.so.12"),
    missing="install a torch for CUDA 12 or later, as in: pip install torch",
    capability=r"sm_([0-9]+)([0-9])",
    algo_words=8,
    statuses={
        1: "CUBLAS_STATUS_NOT_INITIALIZED",
        3: "CUBLAS_STATUS_ALLOC_FAILED",
        7: "CUBLAS_STATUS_INVALID_VALUE",
        8: "CUBLAS_STATUS_ARCH_MISMATCH",
        11: "CUBLAS_STATUS_MAPPING_ERROR",
        13: "CUBLAS_STATUS_EXECUTION_FAILED",
        14: "CUBLAS_STATUS_INTERNAL_ERROR",
        15: "CUBLAS_STATUS_NOT_SUPPORTED",
        16: "CUBLAS_STATUS_LICENSE_ERROR",
    },
    ops={"N": 0, "T": 1},
    types={
        "float32": 0,
        "float16": 2,
        "bfloat16": 14,
        "float8e4m3": 28,
        "float8e5m2": 29,
    },
    compute={"f32": 68},  # CUBLAS_COMPUTE_32F: no tf32 inside
    epilogues={
        "-": 1,
        "bias": 4,
        "geluaux": 32 | 128,
        "geluauxbias": 32 | 128 | 4,
        "dgelu": 64 | 128,
        "dgelubgrad": 64 | 128 | 16,
        "bgradb": 512,
    },
    layout={
        "batch": Attribute(5, c_int32),
        "stride": Attribute(6, c_int64),
    },
    desc={
        "trans_a": Attribute(3, c_int32),
        "trans_b": Attribute(4, c_int32),
        "epilogue": Attribute(7, c_uint32),
        "bias": Attribute(8, c_void_p),
        "gelu_in": Attribute(11, c_void_p),  # the auxiliary buffer
        "gelu_ld": Attribute(12, c_int64),
        "a_scale": Attribute(17, c_void_p),
        "b_scale": Attribute(18, c_void_p),
        "fast_accum": Attribute(25, c_int8),
        "bias_type": Attribute(26, c_int32),
    },
    preference={
        "workspace": Attribute(1, c_uint64),
        "align_a": Attribute(5, c_uint32),
        "align_b": Attribute(6, c_uint32),
        "align_c": Attribute(7, c_uint32),
        "align_d": Attribute(8, c_uint32),
    },
    workspace_bytes=32 << 20,  # what torch and Transformer Engine give a call on Hopper
    heuristics=200,
    config={
        "id": Attribute(0, c_int32),
        "tile": Attribute(1, c_uint32),
        "stages": Attribute(6, c_uint32),
        "splitk": Attribute(2, c_int32),
        "reduction": Attribute(3, c_uint32),
        "swizzle": Attribute(4, c_uint32),
        "custom": Attribute(5, c_uint32),
        "inner": Attribute(7, c_uint16),
        "cluster": Attribute(8, c_uint16),
    },
    caps={
        "splitk": Attribute(0, c_int32),
        "reductions": Attribute(1, c_uint32),
        "swizzle": Attribute(2, c_uint32),
        "batch": Attribute(3, c_int32),
        "tiles": Attribute(6, c_uint32),
        "custom": Attribute(7, c_int32),
        "stages": Attribute(13, c_uint32),
        "align_a": Attribute(16, c_uint32),
        "align_b": Attribute(17, c_uint32),
        "align_c": Attribute(18, c_uint32),
        "align_d": Attribute(19, c_uint32),
    },
    clusters=(0, *range(2, 11)),  # the library's choice; 1x1x1 to 4x4x1
)


class CublasLt(Lt):
    """cuBLASLt on this process's first GPU."""

    name = "cublaslt"
    vendor = CUBLASLT

    def algos(self, gemm: Gemm) -> Sequence[Algo]:
        found = super().algos(gemm)
        return [blas.PLAIN, *found] if blas.default_of(gemm) else found

    def workspace_bytes(self, gemm: Gemm, algo: Algo) -> int:
        return 0 if algo == blas.PLAIN else super().workspace_bytes(gemm, algo)

    def launcher(self, gemm: Gemm, algo: Algo) -> Launch:
        if algo != blas.PLAIN:
            return super().launcher(gemm, algo)
        self._wake()
        space = self._workspace(gemm.ws_bytes)
        return blas.Blas(self.vendor, self._open_blas(), self._stream()).prepare(gemm, space)

    def _open_blas(self) -> ctypes.CDLL:
        return blas.find()

    def _version(self, loaded: ctypes.CDLL) -> str:
        loaded.cublasLtGetVersion.restype = c_size_t
        number = int(loaded.cublasLtGetVersion())
        return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
