"""Lines that Transformer Engine for ROCm prints under NVTE_LOG_GEMM_CONFIG=1. Pure.

`m=… k=… n=… transa=T transb=N A_type=7 B_type=7 D_type=6 … accumulate=0` for each GEMM. Types are
names in some builds, in others numbers of TE's enumeration, which TE 2 counts otherwise than TE 1
(an INT16 came in): where a line leaves both readings open, another line of the file decides.
Leading dimensions are not printed: TE's matrices are dense. (Sources: rocm_gemm.cu of
ROCm/TransformerEngine in several versions, transformer_engine.h.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gemmtune.dialects import hipblaslt
from gemmtune.gemm import FP8_TYPES, Gemm, epilogue

_LINE = re.compile(r"\bm=\d+ +k=\d+ +n=\d+ +transa=")
_FIELD = re.compile(r"(\w+)=(\S*)")
_NAMES = ("float32", "float16", "bfloat16", "float8e4m3", "float8e5m2")
NUMBERINGS: dict[str, dict[str, str]] = {
    "TE 1": {str(i): name for i, name in enumerate(_NAMES, 3)},
    "TE 2": {str(i): name for i, name in enumerate(_NAMES, 4)},
}
_WORDS = {name: name for name in _NAMES} | {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8e4m3": "float8e4m3",
    "fp8e5m2": "float8e5m2",
}
_SCALE_MODES = {"tensor": 0, "mxfp8": 2}


def is_line(line: str) -> bool:
    return _LINE.search(line) is not None


def fields(line: str) -> dict[str, str]:
    """Raises ValueError where a field stands twice."""
    found: dict[str, str] = {}
    first = _LINE.search(line)
    for name, value in _FIELD.findall(line[first.start() :] if first else line):
        if name in found:
            raise ValueError(f"{name} stands twice: two lines in one?")
        found[name] = value
    if "accumulate" not in found or not {"A_type", "B_type", "D_type"} <= found.keys():
        raise ValueError("the line is cut")
    return found


def numberings(line: Mapping[str, str]) -> list[str]:
    """Which numberings of types a line may be in; all where it has none."""
    if "scale_mode" in line:  # printed since TE 2
        return ["TE 2"]
    return [name for name in NUMBERINGS if _plausible(line, name)]


def _plausible(line: Mapping[str, str], numbering: str) -> bool:
    try:
        a, b, d = _types(line, numbering)
    except ValueError:
        return False
    fp8 = [kind in FP8_TYPES for kind in (a, b)]
    said = line.get("use_fp8")
    if said in ("0", "1") and any(fp8) != (said == "1"):
        return False
    if any(fp8):
        return all(fp8) and (a, b) != ("float8e5m2", "float8e5m2") and d not in FP8_TYPES
    return a == b and d in (a, "float32")


def _types(line: Mapping[str, str], numbering: str) -> list[str]:
    kinds = []
    for name in ("A_type", "B_type", "D_type"):
        text = line[name].lower()
        kind = _WORDS.get(text) or NUMBERINGS[numbering].get(text)
        if kind is None:
            raise ValueError(f"{name} {line[name]!r} is no type of a table")
        kinds.append(kind)
    return kinds


def gemm(line: Mapping[str, str], possible: Sequence[str]) -> Gemm:
    """The Gemm of a line. Raises ValueError, also where its types can be read in several ways."""
    if not possible:
        _types(line, "TE 2")
        raise ValueError("types that TE multiplies in no version")
    readings = {tuple(_types(line, numbering)) for numbering in possible}
    if len(readings) > 1:
        raise ValueError("its types' numbers mean others in TE 1 and 2, and no line tells which")
    a, b, d = readings.pop()
    m, n, k = (hipblaslt.number(line, name) for name in "mnk")
    trans_a, trans_b = line.get("transa", ""), line.get("transb", "")
    if not {trans_a, trans_b} <= {"N", "T"}:
        raise ValueError(f"transposes of {trans_a!r} and {trans_b!r}")
    rows = hipblaslt.stored(m, n, k, trans_a, trans_b)
    bias, gelu, grad = (_flag(line, name, 0) for name in ("bias", "gelu", "grad"))
    mode = line.get("scale_mode", "tensor")
    if mode not in _SCALE_MODES:
        raise ValueError(f"scale_mode {mode!r}")
    return hipblaslt.sound(
        Gemm(
            m=m,
            n=n,
            k=k,
            trans_a=trans_a,
            trans_b=trans_b,
            type_a=a,
            type_b=b,
            type_d=d,
            bias_type=_bias_type(line, d, possible[0]) if bias else "-",
            lda=rows[0][0],
            ldb=rows[1][0],
            ldd=m,
            epi=epilogue(bool(bias), bool(gelu), bool(grad)),
            beta=_flag(line, "accumulate"),
            scale_mode=_SCALE_MODES[mode] if a in FP8_TYPES else 0,
            api="lt",
        )
    )


def _bias_type(line: Mapping[str, str], d: str, numbering: str) -> str:
    text = line.get("bias_type")
    if text is None:
        return d
    kind = _WORDS.get(text.lower()) or NUMBERINGS[numbering].get(text)
    if kind is None:
        raise ValueError(f"bias_type {text!r} is no type of a table")
    return kind


def _flag(line: Mapping[str, str], name: str, unset: int | None = None) -> int:
    value = hipblaslt.number(line, name, unset)
    if line.get(name) not in (None, "0", "1"):
        raise ValueError(f"{name} is {line[name]!r}")
    return value
