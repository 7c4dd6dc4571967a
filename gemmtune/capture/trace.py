"""Trace lines of cuBLASLt and hipBLASLt: the GEMM of each launch. Pure.

CUBLASLT_LOG_LEVEL=2 (or 5, or mask 2) and HIPBLASLT_LOG_MASK=2 write one such line for each launch,
`[Trace][cublasLtMatmul] A=0X… Adesc=[type=R_16BF rows=… cols=… ld=…] … beta=0 … stream=0X0`. What
has its default is left out of it (transa, epilogue, batchCount), beta=? stands for any but 0, and
some tools wrap the lines. What cublasGemmEx launches inside has other function names,
cublasLtTSTMatmul, cublasLtSSSMatmul and so on. (Seen in logs of cuBLASLt 11 to 13.1 and of ROCm 6.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gemmtune.dialects import hipblaslt
from gemmtune.gemm import COMPUTE_TYPES, FP8_TYPES, UNBIASED, Gemm

_START = re.compile(r"\[Trace\]\s*\[(cublasLt[A-Z]*Matmul|rocblaslt_matmul)\]\s*(.*)", re.DOTALL)
_FIELD = re.compile(r"\s*(\w+)=(\[[^][]*\]|[^\s=]*)(?=\s|$)")
_TYPES = {
    "R_64F": "float64",
    "R_32F": "float32",
    "R_16F": "float16",
    "R_16BF": "bfloat16",
    "R_8F_E4M3": "float8e4m3",
    "R_8F_E5M2": "float8e5m2",
    "R_8F_E4M3_FNUZ": "float8e4m3",
    "R_8F_E5M2_FNUZ": "float8e5m2",
}
_COMPUTE = {"COMPUTE_32F": COMPUTE_TYPES[0], "COMPUTE_64F": COMPUTE_TYPES[1]}
_EPILOGUES = {
    "DEFAULT": "-",
    "BIAS": "bias",
    "GELU_AUX": "geluaux",
    "GELU_AUX_BIAS": "geluauxbias",
    "DGELU": "dgelu",
    "DGELU_BGRAD": "dgelubgrad",
    "BGRADB": "bgradb",
}
_SCALE_MODES = {"SCALAR_32F": 0, "VEC16_UE4M3": 1, "VEC32_UE8M0": 2, "OUTER_VEC_32F": 3}
_SCALE_MODES |= {"VEC128_32F": 4, "BLK128x128_32F": 5}
MOST_ALIGN = 16  # bytes: no algorithm asks for more of an operand


def start(line: str) -> tuple[str, str] | None:
    """The function and the fields of a line that begins a launch; None for any other."""
    found = _START.search(line)
    return (found[1], found[2]) if found else None


def whole(text: str) -> bool:
    """Whether the fields of a launch are all there: the stream is the last."""
    return re.search(r"\bstream=\w+\s*$", text) is not None


def gemm(function: str, lines: list[str]) -> Gemm:
    """The Gemm of a launch whose fields stand on one line or several.

    Raises ValueError with what is missing, odd or not in a Gemm.
    """
    try:
        return _gemm(function, _fields(" ".join(lines)))
    except ValueError:
        if len(lines) == 1:
            raise
        return _gemm(function, _fields("".join(lines)))  # wrapped inside a word


def _fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    at = 0
    while text[at:].strip():
        found = _FIELD.match(text, at)
        if not found:
            raise ValueError(f"{text[at : at + 40].strip()!r} is no field")
        name = found[1].replace("transA", "transa").replace("transB", "transb")
        if name in fields:
            raise ValueError(f"{name} stands twice: two lines in one?")
        fields[name], at = found[2], found.end()
    return fields


class _Matrix:
    """A matrix as its layout has it."""

    def __init__(self, fields: Mapping[str, str], name: str) -> None:
        text = fields.get(f"{name}desc", "")
        if not text.startswith("["):
            raise ValueError(f"no {name}desc")
        inner = _fields(text[1:-1])
        self.kind = _known(inner, "type", _TYPES)
        self.rows, self.columns, self.ld = (
            hipblaslt.number(inner, x) for x in ("rows", "cols", "ld")
        )
        self.batch = hipblaslt.number(inner, "batchCount", 1)
        self.stride = hipblaslt.number(inner, "stridedBatchOffset", 0) if self.batch > 1 else 0
        order = inner.get("order", "ORDER_COL").removeprefix("ORDER_")
        if order not in ("COL", "ROW"):
            raise ValueError(f"{name} is stored by ORDER_{order}")
        self.by_rows = order == "ROW"
        if self.by_rows:  # by columns it is its transpose
            self.rows, self.columns = self.columns, self.rows


def _gemm(function: str, fields: Mapping[str, str]) -> Gemm:
    a, b, d = (_Matrix(fields, x) for x in "ABD")
    c = _Matrix(fields, "C") if "Cdesc" in fields else d
    text = fields.get("computeDesc", "")
    if not text.startswith("["):
        raise ValueError("no computeDesc")
    desc = _fields(text[1:-1])
    ops = {"OP_N": "N", "OP_T": "T", "OP_C": "T"}
    trans_a, trans_b = (_known(desc, f"trans{x}", ops, "OP_N") for x in "ab")
    prefixed = {f"EPILOGUE_{name}": epi for name, epi in _EPILOGUES.items()}
    epi = _known(desc, "epilogue", prefixed, "EPILOGUE_DEFAULT")
    if a.by_rows or b.by_rows or d.by_rows:
        if not (a.by_rows and b.by_rows and d.by_rows) or epi != "-":
            raise ValueError("ORDER_ROW of some matrices only, or with an epilogue")
        a, b, trans_a, trans_b = b, a, trans_b, trans_a  # D by columns is op(B)T · op(A)T
    k = a.columns if trans_a == "N" else a.rows
    stored = hipblaslt.stored(d.rows, d.columns, k, trans_a, trans_b)
    if ((a.rows, a.columns), (b.rows, b.columns)) != stored or (c.rows, c.columns) != (
        d.rows,
        d.columns,
    ):
        raise ValueError("the sizes of the matrices do not fit together")
    if len({x.batch for x in (a, b, d)}) > 1:
        raise ValueError("batches of several sizes")
    fp8 = a.kind in FP8_TYPES or b.kind in FP8_TYPES
    # cublasLt.h: unset it is the type of D, or of C where D is FP8.
    unset = c.kind if d.kind in FP8_TYPES else d.kind
    biased = epi not in UNBIASED
    modes = {_scale_mode(desc.get(f"{x}ScaleMode", "SCALAR_32F")) for x in "ab"} if fp8 else {0}
    if len(modes) > 1:
        raise ValueError("other scale modes for A and B")
    api = "lt" if function in ("cublasLtMatmul", "rocblaslt_matmul") else "gemmex"
    if api == "gemmex" and d.batch > 1:
        api = "gemmstridedbatchedex"
    beta = _beta(fields)
    given = [fields.get(x, "") for x in ("A", "B", "C" if beta else "D", "D")]
    return hipblaslt.sound(
        Gemm(
            m=d.rows,
            n=d.columns,
            k=k,
            trans_a=trans_a,
            trans_b=trans_b,
            type_a=a.kind,
            type_b=b.kind,
            type_d=d.kind,
            bias_type=_bias_type(desc, unset) if biased else "-",
            lda=a.ld,
            ldb=b.ld,
            ldd=d.ld,
            epi=epi,
            comp=_known(desc, "computeType", _COMPUTE),
            scale=_known(desc, "scaleType", _TYPES),
            beta=beta,
            batch=d.batch,
            stride_a=a.stride,
            stride_b=b.stride,
            stride_d=d.stride,
            fast_accum=hipblaslt.number(desc, "fastAccumulationFlag", 0) if fp8 else 0,
            scale_mode=modes.pop(),
            ws_bytes=hipblaslt.number(fields, "workSpaceSizeInBytes")
            if _pointer(fields.get("workSpace", ""))
            else 0,
            align=_alignment([_pointer(x) for x in given]),
            api=api,
        )
    )


def _known(fields: Mapping[str, str], name: str, names: Mapping[str, str], unset: str = "") -> str:
    text = fields.get(name, unset)
    if text not in names:
        raise ValueError(f"{name} {text}: not in a table" if text else f"no {name}")
    return names[text]


def _beta(fields: Mapping[str, str]) -> int:
    """1 for beta=?: the library prints a number for 0 alone."""
    text = fields.get("beta", "")
    if text == "?":
        return 1
    try:
        return int(float(text) != 0)
    except ValueError:
        raise ValueError(f"beta is {text!r}" if text else "no beta") from None


def _bias_type(desc: Mapping[str, str], unset: str) -> str:
    name = next((n for n in ("biasDataType", "biasType") if n in desc), None)
    return _known(desc, name, _TYPES) if name else unset


def _scale_mode(text: str) -> int:
    mode = _SCALE_MODES.get(text.removeprefix("MATMUL_MATRIX_SCALE_"))
    if mode is None:
        raise ValueError(f"scale mode {text}: not in a table")
    return mode


def _pointer(text: str) -> int:
    if not re.fullmatch("(0[xX])?[0-9a-fA-F]{1,16}", text):
        raise ValueError(f"{text!r} is no address" if text else "an address is missing")
    return int(text, 16)


def _alignment(addresses: list[int]) -> int:
    bits = MOST_ALIGN
    for address in addresses:
        bits |= address
    return bits & -bits
