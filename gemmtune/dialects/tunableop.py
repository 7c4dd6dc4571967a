"""PyTorch's TunableOp files: results and untuned lists, read; results, written. Pure.

PYTORCH_TUNABLEOP_FILENAME names one. `Validator,NAME,VALUE` lines must be exactly those that this
PyTorch writes on this machine, or it ignores the file. Then a line for each GEMM:
`GemmTunableOp_BFloat16_TN,tn_M_N_K_ld_A_B_C,Gemm_Hipblaslt_ID,MILLISECONDS` (older files have no
_ld_, or Gemm_Hipblaslt_TN_ID; untuned lists end after the second cell; a time may be inf). PyTorch
reads past the end of a blank line, so none is written. (Sources: Tunable.cpp, GemmCommon.h,
GemmHipblaslt.h and TunableGemm.h in aten/src/ATen/cuda/tunable of pytorch/pytorch.)

TunableOp's key has no beta, no strides, and one type for A, B and D except where it scales (FP8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gemmtune.dialects import hipblaslt
from gemmtune.dialects.override import ANY_RANK
from gemmtune.errors import Incompatible, UsageError
from gemmtune.gemm import Algo, Gemm
from gemmtune.table import WS_MAX, Tuned, split_lines

TYPES = {
    "float": "float32",
    "double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",  # at::toString's name, of a bias
    "Float8_e4m3fn": "float8e4m3",
    "Float8_e5m2": "float8e5m2",
    "Float8_e4m3fnuz": "float8e4m3",
    "Float8_e5m2fnuz": "float8e5m2",
}
_TYPE = "(" + "|".join(sorted(TYPES, key=len, reverse=True)) + ")"
_PLAIN = re.compile(rf"Gemm(AndBias|StridedBatched|)TunableOp_{_TYPE}_([NT])([NT])")
_SCALED = re.compile(rf"ScaledGemmTunableOp_{_TYPE}_{_TYPE}_{_TYPE}_([NT])([NT])")
_NUMBER = "_([0-9]{1,18})"
_SIZES = re.compile(
    rf"([nNtT])([nNtT]){_NUMBER * 3}(?:_B{_NUMBER})?(?:_ld{_NUMBER * 3})?"
    rf"(?:_rw_([01])_bias_(None|{_TYPE[1:-1]}))?"
)
_HIPBLASLT = re.compile(r"Gemm_Hipblaslt_(?:([NT][NT])_)?(-?[0-9]{1,18})")
_ROCM = ("PT_VERSION", "ROCM_VERSION", "GCN_ARCH_NAME", "HIPBLASLT_VERSION")
MAKE_ONE = (
    "let PyTorch tune one GEMM there: PYTORCH_TUNABLEOP_ENABLED=1 PYTORCH_TUNABLEOP_TUNING=1"
    " PYTORCH_TUNABLEOP_FILENAME=like.csv python -c 'import torch;"
    ' a = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16); a @ a\''
    " (it writes like0.csv: the GPU's number goes into the name)"
)


def is_line(line: str) -> bool:
    """Whether a line is a result, an untuned GEMM or a validator."""
    first = line.split(",", 1)[0].strip()
    return first == "Validator" or "TunableOp_" in first


def detect(text: str) -> bool:
    return is_line(text.lstrip("\ufeff \n\r\t").split("\n", 1)[0])


def validators(text: str) -> dict[str, str]:
    """The validators of a file by name."""
    rows = (line.strip().split(",") for line in split_lines(text))
    return {row[1]: row[2] for row in rows if row[0] == "Validator" and len(row) >= 3}


def gemm(line: str) -> Gemm:
    """The Gemm of a line, its strides dense. Raises ValueError with what is wrong."""
    cells = line.strip().split(",")
    sizes = _SIZES.fullmatch(cells[1]) if len(cells) > 1 else None
    if sizes is None:
        raise ValueError("no sizes such as tn_M_N_K_ld_A_B_C")
    if sizes[7] is None and len(cells) < 3:  # results of old versions have none, untuned lists do
        raise ValueError("no leading dimensions: the line is cut")
    plain, scaled = _PLAIN.fullmatch(cells[0]), _SCALED.fullmatch(cells[0])
    if plain:
        *kinds, trans_a, trans_b = [*[plain[2]] * 3, *plain.group(3, 4)]
    elif scaled:
        *kinds, trans_a, trans_b = scaled.groups()
    else:
        raise ValueError(f"{cells[0]!r}: no operation and types of a table")
    if (sizes[1] + sizes[2]).upper() != trans_a + trans_b:
        raise ValueError(f"{cells[0]} and {cells[1]} disagree")
    m, n, k = (int(x) for x in sizes.group(3, 4, 5))
    a, b = hipblaslt.stored(m, n, k, trans_a, trans_b)
    batch = int(sizes[6] or 1)
    lda, ldb, ldd = (
        int(x) if x else least
        for x, least in zip(sizes.group(7, 8, 9), (a[0], b[0], m), strict=True)
    )
    if (batch > 1 or sizes[6] is not None) != bool(plain and plain[1] == "StridedBatched"):
        raise ValueError(f"{cells[0]} and {cells[1]} disagree")
    bias = sizes[11] if scaled and sizes[11] != "None" else None
    if plain and plain[1] == "AndBias":
        bias = kinds[0]
    types = [TYPES[kind] for kind in kinds]
    double = types[0] == "float64"
    return hipblaslt.sound(
        Gemm(
            m=m,
            n=n,
            k=k,
            trans_a=trans_a,
            trans_b=trans_b,
            type_a=types[0],
            type_b=types[1],
            type_d=types[2],
            bias_type=TYPES[bias] if bias else "-",
            lda=lda,
            ldb=ldb,
            ldd=ldd,
            epi="bias" if bias else "-",
            comp="f64" if double else "f32",
            scale="float64" if double else "float32",
            batch=batch,
            stride_a=lda * a[1] if batch > 1 else 0,
            stride_b=ldb * b[1] if batch > 1 else 0,
            stride_d=ldd * n if batch > 1 else 0,
            scale_mode=3 if scaled and sizes[10] == "1" else 0,
            api="lt",
        )
    )


def read(text: str, gpu: int | None = None) -> Iterator[tuple[int, Tuned | str]]:
    """The rows with their line numbers, or why one is none of ours. `gpu`: dev_cap where no
    validator names the architecture."""
    cap = hipblaslt.dev_cap(validators(text).get("GCN_ARCH_NAME", "")) or gpu
    for number, line in enumerate(split_lines(text), 1):
        if line.strip() and not line.startswith("Validator,"):
            try:
                yield number, _tuned(line, cap)
            except ValueError as e:
                yield number, str(e)


def _tuned(line: str, cap: int | None) -> Tuned:
    found = gemm(line)
    cells = line.strip().split(",")
    name = cells[2] if len(cells) > 2 else ""
    if not (algorithm := _HIPBLASLT.fullmatch(name)):
        raise ValueError(f"{name or 'untuned'}: no algorithm of hipBLASLt")
    if len(cells) < 4:
        raise ValueError("no time: the line is cut")
    if int(algorithm[2]) < 0:
        raise ValueError(f"{name}: a negative index is no algorithm")
    if cap is None:
        raise ValueError("no GCN_ARCH_NAME among the validators: name the GPU, --gpu gfx942")
    algo = Algo(int(algorithm[2]), ANY_RANK, algorithm[2])
    return Tuned(cap, found, 0, WS_MAX, algo, hipblaslt.time_of(cells[3], 1e3))


def head(like: str, revision: str, caps: set[int]) -> str:
    """The validator lines of a user's own file, which say what PyTorch will accept.

    `revision` and `caps` are what the rows were made with: "" and empty where they do not say.
    Raises UsageError where the file has none, Incompatible where it is of another build or GPU.
    """
    found = validators(like)
    if missing := [name for name in _ROCM if name not in found]:
        raise UsageError(
            f"--like: no Validator line {missing[0]}: give a result file that PyTorch wrote on the"
            f" machine of the job; {MAKE_ONE}"
        )
    theirs = hipblaslt.revision(found["HIPBLASLT_VERSION"])
    if revision and theirs and revision != theirs:
        raise Incompatible(
            f"the table is of hipBLASLt {revision} and the Validator lines of --like are of"
            f" {theirs}: algorithm numbers hold for one build. Sweep with the job's library"
        )
    cap = hipblaslt.dev_cap(found["GCN_ARCH_NAME"])
    if caps - {cap}:
        raise Incompatible(
            f"the table is of GPU {min(c for c in caps if c != cap)}, the Validator lines of --like"
            f" are of {found['GCN_ARCH_NAME']}: sweep on the job's GPU"
        )
    return "".join(
        line.rstrip("\r\n") + "\n" for line in split_lines(like) if line.startswith("Validator,")
    )


def named_by_layout(like: str) -> bool:
    """Whether the PyTorch that wrote a file puts the layout into the names of algorithms."""
    cells = (line.split(",")[2:3] for line in split_lines(like))
    names = (_HIPBLASLT.fullmatch(cell[0].strip()) for cell in cells if cell)
    return next((name[1] is not None for name in names if name), False)


def key(row: Tuned) -> tuple[object, ...]:
    """What TunableOp looks a row up by."""
    g = row.gemm._replace(beta=0, stride_a=0, stride_b=0, stride_d=0, fast_accum=0)
    return (row.dev_cap, *g._replace(ws_bytes=0, align=0, api="lt"))


def render(row: Tuned, by_layout: bool = False) -> str:
    """The line of a row. Raises ValueError with the reason where TunableOp cannot say it."""
    g = row.gemm
    if reason := _inexpressible(row):
        raise ValueError(reason)
    hipblaslt.sound(g)
    layout = g.trans_a + g.trans_b
    a, b, d = (_type_name(kind, row.dev_cap) for kind in (g.type_a, g.type_b, g.type_d))
    sizes = f"{layout.lower()}_{g.m}_{g.n}_{g.k}"
    sizes += f"_B_{g.batch}" if g.batch > 1 else ""
    sizes += f"_ld_{g.lda}_{g.ldb}_{g.ldd}"
    if g.fp8:
        operation = f"ScaledGemmTunableOp_{a}_{b}_{d}"
        bias = "None" if g.epi == "-" else _type_name(g.bias_type, row.dev_cap)
        sizes += f"_rw_{int(g.scale_mode == 3)}_bias_{'Float' if bias == 'float' else bias}"
    else:
        kind = "AndBias" if g.epi == "bias" else "StridedBatched" if g.batch > 1 else ""
        operation = f"Gemm{kind}TunableOp_{a}"
    name = f"Gemm_Hipblaslt_{layout + '_' if by_layout else ''}{row.algo.algo_id}"
    return f"{operation}_{layout},{sizes},{name},{row.time_us / 1e3:.6g}\n"


def _type_name(kind: str, cap: int) -> str:
    names = [name for name, of in TYPES.items() if of == kind]
    return names[-1] if kind.startswith("float8") and cap == 904 else names[0]


def _inexpressible(row: Tuned) -> str:
    g = row.gemm
    plain = (g.type_a,) * 3 == (g.type_a, g.type_b, g.type_d)
    double = g.type_a == "float64"
    if row.dev_cap not in hipblaslt.GPUS:
        known = ", ".join(f"{cap} ({arch})" for cap, arch in hipblaslt.GPUS.items())
        return f"dev_cap {row.dev_cap}: no AMD GPU that is known here ({known})"
    if g.api not in ("lt", "gemmex", "gemmstridedbatchedex"):
        return f"api {g.api}: TunableOp serves GEMMs that a GPU library launches"
    if g.fp8 and not (g.type_a.startswith("float8") and g.type_b.startswith("float8")):
        return f"mixed types {g.type_a}/{g.type_b}: TunableOp has no such operation"
    if not g.fp8 and not plain:
        return f"a result of {g.type_d}: TunableOp's GEMMs have one type"
    if g.epi not in ("-", "bias"):
        return f"epilogue {g.epi}: TunableOp knows a bias only"
    if (g.bias_type != "-") != (g.epi == "bias"):
        return f"epilogue {g.epi} with bias_type {g.bias_type}: TunableOp has no such operation"
    if g.epi == "bias" and not g.fp8 and g.bias_type != g.type_d:
        return f"a bias of {g.bias_type}: TunableOp's GEMMs have one type"
    if g.batch > 1 and (g.fp8 or g.epi != "-"):
        return "batched with FP8 or a bias: TunableOp has no such operation"
    if g.scale_mode not in ((0, 3) if g.fp8 else (0,)):
        return f"scale mode {g.scale_mode}: TunableOp scales tensors or rows"
    if (g.comp, g.scale) != (("f64", "float64") if double else ("f32", "float32")):
        return f"comp {g.comp}, scale {g.scale}: not what PyTorch computes {g.type_a} in"
    if row.algo.algo_id < 0:
        return f"algo_id {row.algo.algo_id}: no algorithm"
    return ""
