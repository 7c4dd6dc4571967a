"""import: what is read of each kind of log, what is refused, and that no damage makes up a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gemmtune.capture import logs
from gemmtune.capture.logs import Reader
from gemmtune.cli import main
from gemmtune.gemm import Gemm

FIXTURES = Path(__file__).parent / "fixtures" / "logs"
TE_CSV = FIXTURES.parent / "te_csv"
BF16 = ("bfloat16",) * 3
TN = Gemm(6144, 8192, 4096, "T", "N", *BF16, "-", 4096, 4096, 6144, api="lt")
FP8 = TN._replace(type_a="float8e4m3", type_b="float8e4m3")
BENCH = (
    "hipblaslt-bench --api_method c -m 6144 -n 8192 -k 4096 --lda 4096 --ldb 4096 --ldc 6144 --ldd"
    " 6144  --stride_a 0 --stride_b 0 --stride_c 0 --stride_d 0  --alpha 1.000000 --beta 0.000000"
    " --transA T --transB N --batch_count 1  --a_type bf16_r --b_type bf16_r --c_type bf16_r"
    " --d_type bf16_r --scale_type f32_r --bias_type f32_r   --compute_type f32_r"
)
TRACE = (
    "[Trace][cublasLtMatmul] A=0X7F00 Adesc=[type=R_16BF rows=4096 cols=6144 ld=4096] B=0X7F00"
    " Bdesc=[type=R_16BF rows=4096 cols=8192 ld=4096] C=0X7F00 Cdesc=[type=R_16BF rows=6144"
    " cols=8192 ld=6144] D=0X7F00 Ddesc=[type=R_16BF rows=6144 cols=8192 ld=6144] computeDesc=["
    "computeType=COMPUTE_32F scaleType=R_32F transa=OP_T] algo=[algoId=66] workSpace=0X0"
    " workSpaceSizeInBytes=0 beta=0 outOfPlace=0 stream=0X0"
)
NVTE = "m=6144 k=4096 n=8192 transa=T transb=N A_type={0} B_type={0} D_type={0} grad=0 bias=0 "
NVTE += "gelu=0 {1}accumulate=0"
HEADER = (
    "transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,stride_a,beta,ldb,stride_b,ldc,stride_c"
    ",ldd,stride_d,a_type,b_type,c_type,d_type,compute_type,scaleA,scaleB,scaleC,scaleD,amaxD,"
    "activation_type,bias_vector,bias_type,rotating_buffer,hipblaslt-Gflops,hipblaslt-GB/s,us"
)
TUNED = (
    "T,N,0,1,6144,8192,4096,1,4096,25165824,0,4096,33554432,6144,50331648,6144,50331648,bf16_r,"
    "bf16_r,bf16_r,bf16_r,f32_r,0,0,0,0,0,none,0,f32_r,512,66613.8,363.509,613.1"
)


def read(tmp_path: Path, *texts: str | bytes) -> Reader:
    reader = Reader()
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.log"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        reader.read(str(path))
    return reader


def one(tmp_path: Path, line: str) -> Gemm:
    """The Gemm of one line, which must be read."""
    reader = read(tmp_path, line + "\n")
    assert [str(u) for u in reader.shown] == []
    ((gemm, _),) = reader.calls
    return gemm


def why(tmp_path: Path, text: str) -> str:
    """Why a text of one record gives no row."""
    reader = read(tmp_path, text + "\n")
    assert (reader.calls, bool(reader.shown)) == ({}, True)
    return reader.shown[0].reason


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.mark.parametrize(
    ("file", "rows", "calls", "other"),
    [
        ("hipblaslt_bench.log", 6, 6, 0),  # one line is a group of three, one of them empty
        ("nvte_gemm_config.log", 2, 2, 0),
        ("te_llama_h200_cublaslt.log", 15, 15, 0),
        ("torch_h200_cublaslt_level5.log", 5, 6, 20),
        ("tunableop_results.csv", 4, 4, 4),
    ],
)
def test_every_line_of_the_stored_logs_is_accounted_for(
    file: str, rows: int, calls: int, other: int
) -> None:
    reader = Reader()
    reader.read(str(FIXTURES / file))
    assert (len(reader.calls), sum(reader.calls.values())) == (rows, calls)
    assert (reader.other, reader.unread) == (other, 0)
    assert sum(reader.kinds.values()) + other == reader.lines


def test_a_recorded_step_of_transformer_engine_is_read_field_by_field() -> None:
    reader = Reader()
    reader.read(str(FIXTURES / "te_llama_h200_cublaslt.log"))
    fprop = FP8._replace(fast_accum=1, ws_bytes=33555456, align=16)
    wgrad = fprop._replace(m=4096, n=6144, k=8192, type_b="float8e5m2", fast_accum=0)
    wgrad = wgrad._replace(lda=8192, ldb=8192, ldd=4096)
    assert {fprop, wgrad} <= {gemm for gemm, _ in reader.calls}
    assert {pass_ for _, pass_ in reader.calls} == {"other"}  # FP8 leaves it open


def test_mixed_and_rotated_files_add_their_calls_up(tmp_path: Path) -> None:
    text = f"step 1\n{BENCH}\n[default0]: {BENCH}\r\n{TRACE}\n{NVTE.format('bf16', '')}\n"
    reader = read(tmp_path, text, f"{BENCH}\n" + "x" * 50)
    traced = TN._replace(align=16)
    assert reader.calls == {(TN, "other"): 3, (traced, "other"): 1, (TN, "fprop"): 1}
    assert (reader.other, reader.unread, reader.lines) == (2, 0, 7)


@pytest.mark.parametrize(
    ("change", "gemm"),
    [
        ((" --beta 0.000000", " --beta 1.000000"), TN._replace(beta=1)),
        (("hipblaslt-bench", "/opt/rocm/bin/hipblaslt-bench"), TN),
        (("--compute_type f32_r", "--compute_type c_f32_r --flush --rotating 512 --iters 0"), TN),
        (("f32_r   --", "f32_r --activation_type none --algo_method index --"), TN),
        (
            ("--scale_type", "--bias_vector --bias_source d --scale_type"),
            TN._replace(epi="bias", bias_type="float32"),
        ),
        (
            ("--scale_type", "--use_e --activation_type gelu --aux_type bf16_r --scale_type"),
            TN._replace(epi="geluaux"),
        ),
        (
            (
                "--scale_type",
                "--gradient --use_e --bias_vector --activation_type gelu --scale_type",
            ),
            TN._replace(epi="dgelubgrad", bias_type="float32"),
        ),
        (
            ("--scale_type", "--gradient --bias_vector --bias_source b --scale_type"),
            TN._replace(epi="bgradb", bias_type="float32"),
        ),
        (
            ("--batch_count 1 ", "--batch_count 8 "),
            TN._replace(batch=8),
        ),
    ],
)
def test_variants_of_bench_lines(change: tuple[str, str], gemm: Gemm, tmp_path: Path) -> None:
    assert change[0] in BENCH
    assert one(tmp_path, BENCH.replace(*change)) == gemm


@pytest.mark.parametrize(
    ("scale", "mode"), [("s", 0), ("1", 0), ("0", 0), ("v", 3), ("2", 3), ("3", 2)]
)
def test_scale_modes_of_old_and_new_bench_lines(scale: str, mode: int, tmp_path: Path) -> None:
    fp8 = BENCH.replace("--a_type bf16_r --b_type bf16_r", "--a_type f8_r --b_type f8_fnuz_r")
    line = fp8.replace("--batch_count 1", f"--batch_count 1 --scaleA {scale} --scaleB {scale}")
    assert one(tmp_path, line) == FP8._replace(scale_mode=mode)


def test_a_line_typed_by_hand_has_the_benchmarks_defaults(tmp_path: Path) -> None:
    line = "hipblaslt-bench -m 64 -n 32 -k 16 -r bf16_r --compute_type f32_r -v | tee out.txt"
    assert one(tmp_path, line) == Gemm(64, 32, 16, "N", "N", *BF16, "-", 64, 16, 64, api="lt")
    batched = one(tmp_path, line.replace("-v", "--transB T --batch_count 4"))
    assert (batched.stride_a, batched.stride_b, batched.stride_d) == (1024, 512, 2048)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((" --transB N", ""), "no --transB: the line is cut"),
        ((" --d_type bf16_r", ""), "no --d_type: the line is cut"),
        (("--compute_type f32_r", "--compute_type xf32_r"), "compute_type 'xf32_r'"),
        (("--a_type bf16_r", "--a_type i8_r"), "'i8_r' is no type"),
        (("--lda 4096", "--lda 409"), "lda 409 is smaller than the matrix"),
        (("-m 6144", "-m 0"), "a size of 0"),
        (("--ldb 4096", "--ldb 4096 --ldb 4096"), "--ldb stands twice"),
        (("-k 4096", "-k 4096 7"), "'7' is no option"),
        (("-k 4096", "-k 4_096"), "k is '4_096'"),
        (("--scale_type", "--swizzleA --scale_type"), "--swizzleA: not in a table"),
        (("f32_r   --", "f32_r --activation_type relu --"), "activation relu"),
        (("f32_r   --", "f32_r hipblaslt-bench --"), "two lines in one"),
    ],
)
def test_a_bench_line_that_is_cut_torn_or_odd_gives_no_row(
    change: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    assert change[0] in BENCH
    assert reason in why(tmp_path, BENCH.replace(*change))


@pytest.mark.parametrize("joined", ["\n", " \n", "\n  "])
def test_a_wrapped_trace_line_is_put_together(joined: str, tmp_path: Path) -> None:
    wrapped = "[2026-01-01][cublasLt][7]" + re.sub(r" (?=[A-Dcaw]\w*=)", joined, TRACE)
    reader = read(tmp_path, f"{wrapped}\nnext: loss=2\n")
    assert reader.calls == {(TN._replace(align=16), "other"): 1}
    assert (reader.unread, reader.lines) == (0, sum(reader.kinds.values()) + reader.other)
    inside_words = re.sub("(.{70})", r"\1\n", TRACE)
    assert read(tmp_path, inside_words + "\n").calls == reader.calls


@pytest.mark.parametrize(
    ("change", "gemm"),
    [
        (("[cublasLtMatmul]", "[cublasLtTSTMatmul]"), TN._replace(api="gemmex")),
        (("[cublasLtMatmul]", "[cublasLtSSSMatmul]"), TN._replace(api="gemmex")),
        (("beta=0", "beta=?"), TN._replace(beta=1)),
        (("scaleType=R_32F transa=OP_T", "scaleType=R_32F transA=OP_T transB=OP_N"), TN),
        (
            ("transa=OP_T", "transa=OP_T epilogue=EPILOGUE_BIAS biasPointer=0x7f00"),
            TN._replace(epi="bias", bias_type="bfloat16"),
        ),
        (("workSpace=0X0 workSpaceSizeInBytes=0", "workSpace=0X10 workSpaceSizeInBytes=99"), None),
        (("B=0X7F00", "B=0X7F04"), TN._replace(align=4)),
    ],
)
def test_variants_of_trace_lines(
    change: tuple[str, str], gemm: Gemm | None, tmp_path: Path
) -> None:
    assert change[0] in TRACE
    gemm = gemm or TN._replace(ws_bytes=99)
    assert one(tmp_path, TRACE.replace(*change)) == gemm._replace(align=gemm.align or 16)


def test_a_product_of_row_major_matrices_is_read_as_that_of_their_transposes(
    tmp_path: Path,
) -> None:
    line = TRACE
    for name, rows, columns in (("A", 8192, 4096), ("B", 6144, 4096), *[("CD", 8192, 6144)] * 2):
        for matrix in name:
            new = f"{matrix}desc=[type=R_16BF rows={rows} cols={columns} ld={columns}"
            line = re.sub(rf"{matrix}desc=\[[^]]*", f"{new} order=ORDER_ROW", line)
    line = line.replace("transa=OP_T", "transb=OP_T")  # y = x·Wᵀ, all of it by rows
    assert one(tmp_path, line) == TN._replace(align=16)
    assert "ORDER_ROW" in why(tmp_path, line.replace(" order=ORDER_ROW", "", 1))
    assert "ORDER_COL32" in why(tmp_path, line.replace("ORDER_ROW", "ORDER_COL32", 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((" beta=0", ""), "no beta"),
        (("COMPUTE_32F", "COMPUTE_32F_FAST_TF32"), "COMPUTE_32F_FAST_TF32: not in a table"),
        (("rows=6144 cols=8192", "rows=6144 cols=8193"), "do not fit together"),
        (("R_16BF", "R_4F_E2M1"), "R_4F_E2M1: not in a table"),
        (("transa=OP_T", "transa=OP_T epilogue=EPILOGUE_RELU"), "EPILOGUE_RELU: not in a table"),
        (("ld=4096]", "ld=4096"), "is no field"),
        (("algo=[algoId=66]", "algo=[algoId=66] beta=0"), "beta stands twice"),
    ],
)
def test_a_trace_line_that_is_cut_torn_or_odd_gives_no_row(
    change: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    assert change[0] in TRACE
    assert reason in why(tmp_path, TRACE.replace(*change))


def test_numbers_of_types_are_read_as_the_te_that_wrote_the_file_counts(tmp_path: Path) -> None:
    open_line = NVTE.format(5, "") + "\n"  # bfloat16 to TE 1, float16 to TE 2
    assert "mean others in TE 1 and 2" in why(tmp_path, open_line.strip())
    te1 = read(tmp_path, open_line + NVTE.format(3, "") + "\n")
    assert {g.type_a for g, _ in te1.calls} == {"bfloat16", "float32"}
    te2 = read(tmp_path, open_line + NVTE.format(6, "use_fp8=0 scale_mode=tensor ") + "\n")
    assert {g.type_a for g, _ in te2.calls} == {"float16", "bfloat16"}
    assert "the line is cut" in why(tmp_path, NVTE.format("bf16", "").removesuffix("accumulate=0"))


def test_profile_lines_count_calls(tmp_path: Path) -> None:
    line = (
        "- { function: matmul, M: 6144, N: 8192, K: 4096, lda: 4096, ldb: 4096, ldc: 6144, ldd:"
        " 6144, stride_a: 0, stride_b: 0, stride_c: 0, stride_d: 0, alpha: 1, beta: 0, transA: T,"
        ' transB: N, batch_count: 1, scaleA: 0, scaleB: 0, bias_vector: false, a_type: "bf16_r",'
        " b_type: bf16_r, c_type: bf16_r, d_type: bf16_r, scale_type: f32_r, bias_type: f32_r,"
        " compute_type: c_f32_r, activation_type: none, call_count: 12 }\n"
    )
    assert read(tmp_path, line, line).calls == {(TN, "other"): 24}
    assert "the line is cut" in why(tmp_path, line[:-40])
    assert "call_count" in why(tmp_path, line.replace("call_count: 12", "call_count: x").strip())


def test_tuning_files_of_all_versions(tmp_path: Path) -> None:
    rows = {
        "by position": f"Git Version: abc-dirty\n    {TUNED},56537,gfx942,304\n",
        "today's": f"    {HEADER},solution_index,gcnArchName,CUs\n    {TUNED},7,gfx942:x,304\n",
        "once misspelt": f"[0]:{HEADER},soulution_index\n    {TUNED},56537\n",
        "with more columns": f"{HEADER.replace('amaxD', 'amaxD,swizzle_a')}\n"
        f"{TUNED.replace('none', '0,none')}\n",
    }
    for name, text in rows.items():
        assert read(tmp_path, text).calls == {(TN, "other"): 1}, name
    assert "cells" in why(tmp_path, TUNED)
    assert "grouped" in why(tmp_path, f"{HEADER}\n{TUNED.replace('T,N,0', 'T,N,1')}")


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("GemmTunableOp_BFloat16_TN,tn_6144_8192_4096,Default,0", {}),  # of an old version
        ("GemmTunableOp_BFloat16_TN,tn_6144_8192_4096_ld_4096_4096_6144", {}),  # untuned
        ("GemmAndBiasTunableOp_BFloat16_TN,tn_6144_8192_4096_ld_4096_4096_6144,Default,0",
         {"epi": "bias", "bias_type": "bfloat16"}),
        ("ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e5m2fnuz_BFloat16_TN,"
         "tn_6144_8192_4096_ld_4096_4096_6144_rw_1_bias_None",
         {"type_a": "float8e4m3", "type_b": "float8e5m2", "scale_mode": 3}),
        ("ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,"
         "tn_6144_8192_4096_ld_4096_4096_6144_rw_0_bias_BFloat16,Gemm_Hipblaslt_-7,inf",
         {"type_a": "float8e4m3", "type_b": "float8e4m3", "epi": "bias", "bias_type": "bfloat16"}),
    ],
)  # fmt: skip
def test_variants_of_tunableop_lines(line: str, change: dict[str, object], tmp_path: Path) -> None:
    assert one(tmp_path, line) == TN._replace(**change)  # type: ignore[arg-type]
    assert "disagree" in why(tmp_path, line.replace(",tn_", ",nn_"))


def test_the_passes_of_te_rows_are_known_by_their_transposes_where_they_are_not_fp8() -> None:
    reader = Reader()
    reader.read(str(TE_CSV / "v2_good.csv"))
    assert {(g.fp8, pass_) for g, pass_ in reader.calls} == {(True, "other"), (False, "dgrad")}
    assert logs.pass_of(TN._replace(epi="bgradb")) == "wgrad"
    assert logs.pass_of(TN) == "other"


def test_a_line_that_the_end_of_the_file_cuts_is_not_trusted(tmp_path: Path) -> None:
    for line in (BENCH, TRACE, NVTE.format("bf16", ""), f"{HEADER}\n{TUNED}"):
        reader = read(tmp_path, f"{line}\n{line}")
        assert sum(reader.calls.values()) == 1, line
        assert "ends inside this line" in reader.shown[0].reason
