"""What a GEMM is and what launches one: Gemm, Algo, type names, FLOPs and bytes. Pure.

A Gemm is spelled in column-major BLAS terms, D[m,n] = op(A)[m,k] · op(B)[k,n] (+ C), exactly as the
library is called. For y = x·Wᵀ (torch's row-major linear) that makes A the weight:

    fprop  m=out n=tokens k=in      (T,N)
    dgrad  m=in  n=tokens k=out     (N,N)
    wgrad  m=in  n=out    k=tokens  (N,T)
"""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

TYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8e4m3": 1,
    "float8e5m2": 1,
}
FP8_TYPES = ("float8e4m3", "float8e5m2")
EPILOGUES = ("-", "bias", "geluaux", "geluauxbias", "dgelu", "dgelubgrad", "bgradb")
UNBIASED = ("-", "geluaux", "dgelu")  # epilogues with neither a bias nor a bias gradient
COMPUTE_TYPES = ("f32", "f64")
SINGLE_APIS = ("sgemm", "sgemmstridedbatched")  # of float32 alone
LIBRARY_APIS = ("lt", "gemmex", "gemmstridedbatchedex", *SINGLE_APIS)
BATCHED_APIS = ("bmm", "baddbmm", "gemmstridedbatchedex", "sgemmstridedbatched")
PASSES = ("fprop", "dgrad", "wgrad", "other")
LAYOUT_PASSES = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}  # of a linear layer, before FP8


class Gemm(NamedTuple):
    """One GEMM configuration; two calls that could have different winners have different Gemms.

    The field names are the tables' column names (Transformer Engine's where it has one).
    Leading dimensions and strides are in elements; `align` and `ws_bytes` are in bytes, and 0
    where the library knows neither (CPU). `beta` is 1 for any non-zero beta. `scale_mode` is the
    Lt API's integer (0: one scale per tensor, or none). `bias_type` is "-" without a bias.
    `api` is the call it came through: an ATen operator on a CPU (mm, addmm, bmm, baddbmm,
    scaled_mm, grouped_mm), else lt, gemmex, ….
    """

    m: int
    n: int
    k: int
    trans_a: str
    trans_b: str
    type_a: str
    type_b: str
    type_d: str
    bias_type: str
    lda: int
    ldb: int
    ldd: int
    epi: str = "-"
    comp: str = "f32"
    scale: str = "float32"
    beta: int = 0
    batch: int = 1
    stride_a: int = 0
    stride_b: int = 0
    stride_d: int = 0
    fast_accum: int = 0
    scale_mode: int = 0
    ws_bytes: int = 0
    align: int = 0
    api: str = "mm"

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two, over the whole batch."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes(self) -> int:
        """Least memory traffic: each operand read once, D written once (beta: and read)."""
        d = self.m * self.n * TYPE_BYTES[self.type_d] * (2 if self.beta else 1)
        a = self.m * self.k * TYPE_BYTES[self.type_a]
        b = self.k * self.n * TYPE_BYTES[self.type_b]
        return self.batch * (a + b + d)

    @property
    def batched(self) -> bool:
        """Whether its operands have a batch dimension, if only of one."""
        return self.batch != 1 or self.api in BATCHED_APIS

    @property
    def seen(self) -> bool:
        """Whether it is the GPU library's own call, workspace and alignment with it."""
        return self.api in LIBRARY_APIS

    @property
    def fp8(self) -> bool:
        return self.type_a in FP8_TYPES or self.type_b in FP8_TYPES

    def __str__(self) -> str:
        types = "/".join(dict.fromkeys((self.type_a, self.type_b, self.type_d)))
        extra = "".join(
            (
                f" x{self.batch}" if self.batch != 1 else "",
                f" {self.epi}" if self.epi != "-" else "",
                " +C" if self.beta else "",
            )
        )
        return f"{self.m}x{self.n}x{self.k} {self.trans_a}{self.trans_b} {types}{extra}"


def epilogue(bias: bool, gelu: bool, grad: bool) -> str:
    """The epilogue of a call by what Transformer Engine says of it."""
    return {
        (False, False): "-",
        (True, False): "bgradb" if grad else "bias",
        (False, True): "dgelu" if grad else "geluaux",
        (True, True): "dgelubgrad" if grad else "geluauxbias",
    }[bias, gelu]


KEY = Gemm._fields
INT_FIELDS = frozenset(name for name, kind in get_type_hints(Gemm).items() if kind is int)


class Algo(NamedTuple):
    """What a backend can launch a Gemm with; opaque to everything but its backend.

    `algo_id` and `aidx` are Transformer Engine's columns; `config` is the backend's full spelling.
    """

    algo_id: int
    aidx: int
    config: str
