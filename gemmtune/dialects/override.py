"""hipBLASLt's tuning files: read and write. Pure.

hipblaslt-bench writes them to HIPBLASLT_TUNING_FILE, a job loads one named by
HIPBLASLT_TUNING_OVERRIDE_FILE. Line 1 is `Git Version: REVISION` and must be the library's own;
then a header and a row for each GEMM, both indented. Older libraries wrote rows alone and read them
by position: 37 cells, the solution's index the 35th. Newer ones read by the header's names, in
their order. What is written here has the 37 columns under today's names, so both read it. (Sources:
argument_model.hpp and UserDrivenTuningParser.cpp of ROCm/hipBLASLt and ROCm/rocm-libraries.)

The library looks a row up by transposes, sizes, batch, types of A, B and C and the compute type; it
holds an algorithm of index 0 for none, and checks an algorithm's need of workspace itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gemmtune.dialects import hipblaslt
from gemmtune.gemm import Algo
from gemmtune.table import WS_MAX, Tuned, split_lines

HEADER = (
    "transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,stride_a,beta,ldb,stride_b,ldc,stride_c,"
    "ldd,stride_d,a_type,b_type,c_type,d_type,compute_type,scaleA,scaleB,scaleC,scaleD,amaxD,"
    "activation_type,bias_vector,bias_type,rotating_buffer,hipblaslt-Gflops,hipblaslt-GB/s,us,"
    "solution_index,gcnArchName,CUs"
)
COLUMNS = tuple(HEADER.split(","))
VERSION = "Git Version: "
# Of a row that says no rank: any list of the library's that is long enough has the algorithm, and
# TE searches a list from its start where the rank is beyond it.
ANY_RANK = 9_999

_HEADER = re.compile(r"\s*(?:\[\d+\]:)?\s*transA,transB,")
_ROW = re.compile(r"\s*[NTC],[NTC],")


def header(line: str) -> tuple[str, ...] | None:
    """The column names of a header line; None for any other."""
    if not _HEADER.match(line):
        return None
    names = line.strip().split(":", 1)[-1] if line.strip().startswith("[") else line.strip()
    return tuple(hipblaslt.SHORT.get(name, name) for name in names.split(","))


def is_row(line: str) -> bool:
    return bool(_ROW.match(line))


def fields(line: str, names: Sequence[str] | None) -> dict[str, str]:
    """The cells of a row by name; `names` is the header above it, None where there was none.

    Raises ValueError where it cannot be told which cell is which.
    """
    cells = line.strip().split(",")
    names = names or COLUMNS
    if len(cells) != len(names) or len(set(names)) != len(names):
        raise ValueError(f"{len(cells)} cells, and {len(names)} columns")
    row = dict(zip(names, cells, strict=True))
    if row.get("grouped_gemm", "0") != "0":
        raise ValueError("a grouped GEMM: its sizes are not in the row")
    return row


def detect(text: str) -> bool:
    """Whether a text is a tuning file: by line 1, or a header or row at its start."""
    first = text.lstrip("\ufeff \n\r\t").split("\n", 1)[0]
    return first.startswith(VERSION.strip()) or header(first) is not None or is_row(first)


def git_version(text: str) -> str:
    """The library's revision in line 1; "" where there is none."""
    first = text.split("\n", 1)[0]
    return first.partition(VERSION)[2].strip()


def read(text: str, gpu: int | None = None) -> Iterator[tuple[int, Tuned | str]]:
    """The rows with their line numbers, or why one is none of ours. `gpu`: dev_cap where the row
    names no architecture."""
    names = None
    for number, line in enumerate(split_lines(text), 1):
        if (found := header(line)) is not None:
            names = found
        elif is_row(line):
            try:
                yield number, _tuned(fields(line, names), gpu)
            except ValueError as e:
                yield number, str(e)
        elif line.strip() and not line.strip().startswith(VERSION.strip()):
            yield number, "neither a header nor a row of hipblaslt-bench"


def _tuned(row: dict[str, str], gpu: int | None) -> Tuned:
    gemm = hipblaslt.gemm(row)
    kept = hipblaslt.TYPES.get(row.get("bias_type", ""), "float32")
    if gemm.fp8 and gemm.epi == "-" and kept != "float32":
        gemm = gemm._replace(bias_type=kept)  # TE's key has one without a bias, too
    index = row.get("solution_index", "")
    if not re.fullmatch("[0-9]{1,10}", index) or not 0 < int(index) < 2**31:
        raise ValueError(f"solution_index is {index!r}: hipBLASLt reads 1 to 2147483647")
    cap = hipblaslt.dev_cap(row.get("gcnArchName", "")) or gpu
    if cap is None:
        raise ValueError("no gcnArchName: name the GPU, --gpu gfx942")
    algo = Algo(int(index), ANY_RANK, index)
    return Tuned(cap, gemm, 0, WS_MAX, algo, hipblaslt.time_of(row.get("us", "")))


def key(row: Tuned) -> tuple[object, ...]:
    """What hipBLASLt looks a row up by."""
    g = row.gemm
    types = g.type_a, g.type_b, g.type_d, g.comp
    return (row.dev_cap, g.m, g.n, g.k, g.trans_a, g.trans_b, g.batch, *types)


def render(row: Tuned) -> str:
    """The header and the row. Raises ValueError with the reason where a row cannot say it."""
    g = row.gemm
    if reason := _inexpressible(row):
        raise ValueError(reason)
    hipblaslt.sound(g)
    scale = "0" if not g.fp8 else {0: "1", 2: "3", 3: "2"}[g.scale_mode]
    compute = "f64_r" if g.comp == "f64" else "f32_r"
    fnuz = row.dev_cap == 904
    a, b, d = (_type_name(kind, fnuz) for kind in (g.type_a, g.type_b, g.type_d))
    bias = _type_name("float32" if g.bias_type == "-" else g.bias_type, fnuz)
    rate = g.flops / row.time_us / 1e3 if row.time_us else 0
    moved = g.bytes / row.time_us / 1e3 if row.time_us else 0
    cells = (
        *(g.trans_a, g.trans_b, 0, g.batch, g.m, g.n, g.k, 1, g.lda, g.stride_a, g.beta),
        *(g.ldb, g.stride_b, g.ldd, g.stride_d, g.ldd, g.stride_d, a, b, d, d, compute),
        *(scale, scale, 0, 0, 0, "none", int(g.epi == "bias"), bias, 0),
        *(f"{rate:.6g}", f"{moved:.6g}", f"{row.time_us:.6g}"),
        *(row.algo.algo_id, hipblaslt.GPUS[row.dev_cap], "-"),
    )
    return f"    {HEADER}\n    {','.join(map(str, cells))}\n"


def _type_name(kind: str, fnuz: bool) -> str:
    names = [name for name, of in hipblaslt.TYPES.items() if of == kind and len(name) > 1]
    return names[-1] if fnuz and len(names) > 1 else names[0]


def _inexpressible(row: Tuned) -> str:
    g = row.gemm
    types = set(hipblaslt.TYPES.values())
    if row.dev_cap not in hipblaslt.GPUS:
        known = ", ".join(f"{cap} ({arch})" for cap, arch in hipblaslt.GPUS.items())
        return f"dev_cap {row.dev_cap}: no AMD GPU that is known here ({known})"
    if g.api != "lt":
        return f"api {g.api}: hipBLASLt serves what is launched through the Lt API (lt)"
    if g.epi not in ("-", "bias") or (g.epi == "bias") > (g.bias_type != "-"):
        return f"epilogue {g.epi}: no column says more than a bias"
    if g.epi == "-" and g.bias_type not in ("-", *(types - {"float32"} if g.fp8 else ())):
        return f"bias_type {g.bias_type} without a bias: no column says it"
    if (g.comp, g.scale) not in (("f32", "float32"), ("f64", "float64")):
        return f"comp {g.comp}, scale {g.scale}: hipblaslt-bench has no such name"
    if g.scale_mode not in ((0, 2, 3) if g.fp8 else (0,)) or g.fast_accum:
        return f"scale mode {g.scale_mode}, fast_accum {g.fast_accum}: no column says it"
    if not 0 < row.algo.algo_id < 2**31:
        return f"algo_id {row.algo.algo_id}: hipBLASLt reads 1 to 2147483647"
    return ""
