"""hipBLASLt's words for a GEMM: those of hipblaslt-bench, its logs and its tuning files. Pure.

Three spellings share them: the command lines that HIPBLASLT_LOG_MASK=32 prints, the YAML of masks
64 and 128, and the columns of tuning files. Each is read into a mapping of the option's long name
to its text, and `gemm` makes a Gemm of that. Sources: tensile_host.cpp (logBenchFromTensileDataGemm
and logProfileFromTensileDataGemm) and hipblaslt_arguments.hpp of ROCm/hipBLASLt and
ROCm/rocm-libraries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gemmtune.gemm import UNBIASED, Gemm
from gemmtune.table import LARGEST

# hipblaslt_datatype2string.hpp and auxiliary.hpp; FNUZ types are FP8 as gfx942 has it.
TYPES = {
    "f32_r": "float32",
    "f64_r": "float64",
    "f16_r": "float16",
    "bf16_r": "bfloat16",
    "f8_r": "float8e4m3",
    "bf8_r": "float8e5m2",
    "f8_fnuz_r": "float8e4m3",
    "bf8_fnuz_r": "float8e5m2",
    "s": "float32",
    "d": "float64",
    "h": "float16",
}
_COMPUTE = {"f32_r": "f32", "c_f32_r": "f32", "s": "f32", "f64_r": "f64", "d": "f64"}
# --scaleA: s/v once, numbers since; as Gemm.scale_mode (0: a scale per tensor or none, 2: of 32
# elements, 3: a scale per row).
SCALES = {"": 0, "0": 0, "none": 0, "1": 0, "s": 0, "f32_r": 0, "2": 3, "v": 3, "3": 2}
GPUS = {904: "gfx942", 905: "gfx950"}  # dev_cap of those that the ROCm fork of TE is built for
SHORT = {"sizem": "m", "sizen": "n", "sizek": "k", "r": "precision", "M": "m", "N": "n", "K": "k"}
SHORT |= {"swizzle_a": "swizzleA", "swizzle_b": "swizzleB", "soulution_index": "solution_index"}
_PER_GROUP = re.compile(r"m|n|k|ld[a-e]|stride_[a-e]")
# What every logged line says; one that does not was cut.
_LOGGED: tuple[str, ...] = (
    *("m", "n", "k", "lda", "ldb", "ldd", "stride_a", "stride_b", "stride_d", "beta"),
    *("transA", "transB", "batch_count", "a_type", "b_type", "d_type", "compute_type"),
)
_OPTION = re.compile(r"--?[A-Za-z]")


def dev_cap(arch: str) -> int | None:
    """TE's number of an architecture: gfx942:sramecc+:xnack- (major, minor, stepping) is 904."""
    known = re.fullmatch(r"gfx([0-9]{1,2})([0-9a-f])[0-9a-f](:.*)?", arch.strip().lower())
    return int(known[1]) * 100 + int(known[2], 16) if known else None


def revision(version: str) -> str:
    """The git revision in a version such as 1.0.1-abcdef12 or 100001-abcdef12; "" without one."""
    return version.partition("-")[2]


def time_of(text: str, unit_us: float = 1.0) -> float:
    """Microseconds of a time in `unit_us`; 0 where it is none (inf, nan, nothing)."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", text.strip()):
        return 0.0
    time_us = float(text) * unit_us
    return time_us if time_us < LARGEST else 0.0


def command(text: str) -> list[dict[str, str]]:
    """The options of a hipblaslt-bench command line, one mapping for each group of a grouped call.

    `text` is what follows the program's name. Raises ValueError with what is wrong.
    """
    fields: dict[str, str] = {}
    by_group: dict[str, list[str]] = {}
    words = re.split(r"\s(?:[|;&#]|\d?>)", text + " ")[0].split()
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not re.fullmatch("--?[A-Za-z][A-Za-z0-9_]*", word):
            raise ValueError(f"{word!r} is no option")
        name, value = _name(word.lstrip("-")), "1"
        if at < len(words) and not _OPTION.match(words[at]):
            value, at = words[at], at + 1
        if "grouped_gemm" in fields and _PER_GROUP.fullmatch(name):
            by_group.setdefault(name, []).append(value)
        elif name in fields:
            raise ValueError(f"--{name} stands twice: two lines in one?")
        else:
            fields[name] = value
    if "precision" in fields:
        fields = {f"{x}_type": fields["precision"] for x in "abcd"} | fields
    wanted = _LOGGED[: None if "api_method" in fields else 0]  # then the library wrote it
    if by_group:
        wanted = tuple(name for name in wanted if not name.startswith("stride"))
    if missing := [name for name in wanted if name not in fields and name not in by_group]:
        raise ValueError(f"no --{missing[0]}: the line is cut")
    if not by_group:
        return [fields]
    if len(set(map(len, by_group.values()))) > 1:
        raise ValueError("not as many of each size in the groups: the line is cut")
    groups = zip(*by_group.values(), strict=True)
    return [fields | dict(zip(by_group, group, strict=True)) for group in groups]


def profile(text: str) -> dict[str, str]:
    """The fields of a line of masks 64 and 128, `- { function: matmul, M: 64, … }`.

    Raises ValueError with what is wrong.
    """
    inner = re.fullmatch(r"\s*-?\s*\{(.*)\}\s*", text)
    if not inner:
        raise ValueError("no closing brace: the line is cut")
    fields: dict[str, str] = {}
    for part in inner[1].split(","):
        key, colon, value = part.partition(":")
        name = _name(key.strip())
        if not colon or name in fields:
            raise ValueError(f"{part.strip()[:40]!r} is no field, or stands twice")
        fields[name] = value.strip().strip("\"'")
    if fields.get("function") != "matmul":
        raise ValueError(f"function {fields.get('function')!r}, not matmul")
    return fields


def _name(name: str) -> str:
    return SHORT.get(name, name)


def gemm(fields: Mapping[str, str], api: str = "lt") -> Gemm:
    """The Gemm of the fields. Raises ValueError with what is missing, odd or not in a Gemm."""
    m, n, k = number(fields, "m"), number(fields, "n"), number(fields, "k")
    trans_a, trans_b = (_trans(fields.get(f"trans{x}", "N")) for x in "AB")
    a, b, d = (_type(f"{x}_type", fields.get(f"{x}_type", "")) for x in "abd")
    comp = _COMPUTE.get(fields.get("compute_type", ""))
    if comp is None:
        raise ValueError(f"compute_type {fields.get('compute_type', '')!r}: known are f32_r, f64_r")
    scale = _type("scale_type", fields.get("scale_type", "f64_r" if comp == "f64" else "f32_r"))
    batch = number(fields, "batch_count", 1)
    (rows_a, columns_a), (rows_b, columns_b) = stored(m, n, k, trans_a, trans_b)
    lda, ldb, ldd = (
        number(fields, "lda", rows_a),
        number(fields, "ldb", rows_b),
        number(fields, "ldd", m),
    )

    def stride(name: str, dense: int) -> int:
        return number(fields, name, dense) if batch > 1 else 0

    epi = _epilogue(fields)
    biased = epi not in UNBIASED
    return sound(
        Gemm(
            m=m,
            n=n,
            k=k,
            trans_a=trans_a,
            trans_b=trans_b,
            type_a=a,
            type_b=b,
            type_d=d,
            bias_type=_type("bias_type", fields.get("bias_type", "")) if biased else "-",
            lda=lda,
            ldb=ldb,
            ldd=ldd,
            epi=epi,
            comp=comp,
            scale=scale,
            beta=int(_float("beta", fields.get("beta", "0")) != 0),
            batch=batch,
            stride_a=stride("stride_a", lda * columns_a),
            stride_b=stride("stride_b", ldb * columns_b),
            stride_d=stride("stride_d", ldd * n),
            scale_mode=_scale_mode(fields, "float8" in a + b),
            api=api,
        )
    )


def number(fields: Mapping[str, str], name: str, unset: int | None = None) -> int:
    """A field that is a whole number; `unset` where it may be left out. Raises ValueError."""
    text = fields.get(name)
    if text is None and unset is not None:
        return unset
    if text is None or not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{name} is {text!r}" if text else f"no {name}")
    return int(text)


def stored(m: int, n: int, k: int, trans_a: str, trans_b: str) -> tuple[tuple[int, int], ...]:
    """Rows and columns of A and of B as they lie in memory."""
    return (m, k) if trans_a == "N" else (k, m), (k, n) if trans_b == "N" else (n, k)


def sound(g: Gemm) -> Gemm:
    """The Gemm itself. Raises ValueError where no library would launch it."""
    if min(g.m, g.n, g.k, g.batch) < 1:
        raise ValueError("a size of 0: never launched")
    a, b = stored(g.m, g.n, g.k, g.trans_a, g.trans_b)
    for name, size in (("lda", a[0]), ("ldb", b[0]), ("ldd", g.m)):
        if getattr(g, name) < size:
            raise ValueError(f"{name} {getattr(g, name)} is smaller than the matrix ({size})")
    return g


def _trans(text: str) -> str:
    if text not in ("N", "T", "C"):
        raise ValueError(f"a transpose of {text!r}")
    return "N" if text == "N" else "T"  # real numbers have no conjugate


def _type(name: str, text: str) -> str:
    if text not in TYPES:
        raise ValueError(f"{name} {text!r} is no type of a table" if text else f"no {name}")
    return TYPES[text]


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}") from None


def _on(fields: Mapping[str, str], name: str) -> bool:
    text = fields.get(name, "0").lower()
    if text not in ("0", "1", "true", "false"):
        raise ValueError(f"{name} is {text!r}")
    return text in ("1", "true")


def _epilogue(fields: Mapping[str, str]) -> str:
    """TE's name of the epilogue. Gradients and the GELU's input are extra tensors (use_e)."""
    for name in ("swizzleA", "swizzleB", "scaleAlpha_vector"):
        if _on(fields, name):
            raise ValueError(f"--{name}: not in a table")
    activation = fields.get("activation_type", "none").lower()
    bias, extra, gradient = (_on(fields, n) for n in ("bias_vector", "use_e", "gradient"))
    if activation == "none" and not extra:
        if gradient:
            if not bias or fields.get("bias_source") != "b":
                raise ValueError("a gradient other than of B's bias")
            return "bgradb"
        return "bias" if bias else "-"
    if activation == "gelu" and extra:
        if gradient:
            return "dgelubgrad" if bias else "dgelu"
        return "geluauxbias" if bias else "geluaux"
    raise ValueError(f"activation {activation}{' with' if extra else ' without'} its input kept")


def _scale_mode(fields: Mapping[str, str], fp8: bool) -> int:
    modes = []
    for name in ("scaleA", "scaleB"):
        text = fields.get(name, "")
        if text not in SCALES:
            raise ValueError(f"{name} is {text!r}")
        modes.append(SCALES[text])
    if modes[0] != modes[1] or (modes[0] and not fp8):
        raise ValueError(f"scale modes {modes[0]} and {modes[1]}: not in a table")
    return modes[0]
