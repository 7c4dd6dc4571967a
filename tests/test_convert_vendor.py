"""hipBLASLt tuning files and TunableOp results: written for their loaders, and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemmtune import table
from gemmtune.cli import main
from gemmtune.dialects import GEMMTUNE, OVERRIDE, TUNABLEOP, override, te, tunableop
from gemmtune.dialects.convert import Converted, convert, source_of
from gemmtune.errors import Incompatible, UsageError
from gemmtune.gemm import EPILOGUES, Algo, Gemm
from gemmtune.table import WS_MAX, Tuned

FIXTURES = Path(__file__).parent / "fixtures"
LIKE = (FIXTURES / "logs" / "tunableop_results.csv").read_text()
VALIDATORS = "".join(line for line in LIKE.splitlines(keepends=True) if "Validator" in line)
GEMM = Gemm(
    *(64, 32, 128, "T", "N", "bfloat16", "bfloat16", "bfloat16", "-", 128, 128, 64), api="lt"
)
TUNED = Tuned(904, GEMM, 0, WS_MAX, Algo(7, override.ANY_RANK, "7"), 9.5)
MADE = {"machine": {"library": "hipBLASLt 1.0.1-abcdef12", "dev_cap": 904}}
ALL = (*te.COLUMNS, OVERRIDE, TUNABLEOP)


def ours(*rows: Tuned, **provenance: object) -> str:
    return table.render(rows, Tuned, provenance or MADE)


def back(text: str) -> list[Tuned]:
    """The rows of a table of any dialect, as ours."""
    converted = convert(text, GEMMTUNE)
    assert converted.findings == []
    return table.parse(converted.text, Tuned).rows


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


# What a loader of hipBLASLt's does with a file, written apart from gemmtune: by position as in
# 2024 (37 cells), and by the header's names in their order as since 2025. Both hold an index of 0
# for none (UserDrivenTuningParser.cpp).

NAMES = ("transA", "transB", "batch_count", "m", "n", "k")
NAMES += ("a_type", "b_type", "c_type", "compute_type", "solution_index")


def loaded_by_position(text: str) -> list[list[str]]:
    rows = []
    for line in text.splitlines():
        cells = line.strip().split(",")
        if "Git Version" in line or len(cells) != 37 or not cells[3].isdecimal():
            continue
        at = (0, 1, 3, 4, 5, 6, 17, 18, 19, 21, 34)
        rows.append([cells[i] for i in at])
    return [row for row in rows if int(row[-1]) > 0]


def loaded_by_names(text: str) -> list[list[str]]:
    rows, lines = [], iter(text.splitlines())
    for line in lines:
        if "transA" not in line:
            continue
        wanted, found = list(NAMES), []
        for name, cell in zip(
            line.strip().split(","), next(lines).strip().split(","), strict=False
        ):
            if wanted and name == wanted[0]:
                found.append(cell)
                wanted.pop(0)
        rows += [found] if not wanted else []
    return [row for row in rows if int(row[-1]) > 0]


def loaded_by_pytorch(text: str, here: str) -> dict[tuple[str, str], tuple[str, float]]:
    """As Tunable.cpp: nothing unless the validators are exactly those of this machine."""
    validators, results = {}, {}
    for line in text.removesuffix("\n").split("\n"):
        parts = line.split(",")
        assert parts[0], "PyTorch reads past the end of an empty line"
        if parts[0] == "Validator":
            validators[parts[1]] = parts[2]
        else:
            results.setdefault((parts[0], parts[1]), (parts[2], float(parts[3])))
    same = validators == dict(line.split(",")[1:] for line in here.splitlines())
    return results if same else {}


def test_a_tuning_file_is_read_alike_by_old_and_new_libraries() -> None:
    fp8 = GEMM._replace(type_a="float8e4m3", type_b="float8e5m2")
    batched = GEMM._replace(batch=4, stride_a=8192, stride_b=4096, stride_d=2048)
    rows = [TUNED._replace(gemm=g) for g in (GEMM, fp8, batched)]
    text, findings = convert(ours(*rows), OVERRIDE)
    assert findings == []
    assert text.split("\n")[0] == "Git Version: abcdef12"
    sizes = ["64", "32", "128"]
    bf16 = ["bf16_r"] * 3
    expected = [
        ["T", "N", "1", *sizes, *bf16, "f32_r", "7"],
        ["T", "N", "1", *sizes, "f8_fnuz_r", "bf8_fnuz_r", "bf16_r", "f32_r", "7"],
        ["T", "N", "4", *sizes, *bf16, "f32_r", "7"],
    ]
    assert loaded_by_names(text) == loaded_by_position(text) == expected
    assert "f8_r,bf8_r" in convert(ours(rows[1]._replace(dev_cap=905)), OVERRIDE).text


def test_pytorch_loads_what_is_written_and_launches_the_algorithm() -> None:
    fp8 = GEMM._replace(type_a="float8e4m3", type_b="float8e5m2", scale_mode=3)
    biased = GEMM._replace(epi="bias", bias_type="bfloat16")
    rows = [TUNED._replace(gemm=g) for g in (GEMM, fp8, biased)]
    text, findings = convert(ours(*rows), TUNABLEOP, like=VALIDATORS)
    assert findings == []
    sizes = "tn_64_32_128_ld_128_128_64"
    scaled = "ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e5m2fnuz_BFloat16_TN"
    assert loaded_by_pytorch(text, VALIDATORS) == {
        ("GemmTunableOp_BFloat16_TN", sizes): ("Gemm_Hipblaslt_7", 0.0095),
        (scaled, f"{sizes}_rw_1_bias_None"): ("Gemm_Hipblaslt_7", 0.0095),
        ("GemmAndBiasTunableOp_BFloat16_TN", sizes): ("Gemm_Hipblaslt_7", 0.0095),
    }
    older = VALIDATORS + "GemmTunableOp_Half_NN,nn_1_1_1_ld_1_1_1,Gemm_Hipblaslt_NN_5,1\n"
    assert ",Gemm_Hipblaslt_TN_7," in convert(ours(TUNED), TUNABLEOP, like=older).text


def test_what_the_build_and_the_gpu_are_is_never_made_up() -> None:
    with pytest.raises(UsageError, match=r"--like FILE.*HIPBLASLT_TUNING_FILE"):
        convert(ours(TUNED, stage="sweep"), OVERRIDE)
    with pytest.raises(UsageError, match=r"Validator line PT_VERSION.*PYTORCH_TUNABLEOP_ENABLED=1"):
        convert(ours(TUNED), TUNABLEOP)
    with pytest.raises(UsageError, match="GCN_ARCH_NAME"):
        without = "".join(x for x in VALIDATORS.splitlines(True) if "GCN_ARCH" not in x)
        convert(ours(TUNED), TUNABLEOP, like=without)
    text = convert(ours(TUNED, stage="sweep"), OVERRIDE, like="Git Version: 12ab-dirty\n").text
    assert text.startswith("Git Version: 12ab-dirty\n")
    assert convert(ours(TUNED, a=1), OVERRIDE, like=VALIDATORS).text.startswith(
        "Git Version: abcdef12\n"
    )
    other = VALIDATORS.replace("abcdef12", "0badcafe")
    for to in (OVERRIDE, TUNABLEOP):
        with pytest.raises(Incompatible, match="algorithm numbers hold for one build"):
            convert(ours(TUNED), to, like=other)
    with pytest.raises(Incompatible, match="sweep on the job's GPU"):
        convert(ours(TUNED._replace(dev_cap=905)), TUNABLEOP, like=VALIDATORS)


@pytest.mark.parametrize("to", [*te.COLUMNS, GEMMTUNE, OVERRIDE])
def test_results_of_tunableop_serve_other_jobs_and_what_is_not_hipblaslts_is_refused(
    to: str,
) -> None:
    text, findings = convert(LIKE, to)
    assert [(f.line, f.effect) for f in findings] == [
        (6, "Gemm_Rocblas_-612000017: no algorithm of hipBLASLt"),
        (7, "Default: no algorithm of hipBLASLt"),
    ]
    assert source_of(text) == to
    rows = back(text) if to != GEMMTUNE else table.parse(text, Tuned).rows
    assert [(r.dev_cap, r.algo.algo_id, r.gemm.m) for r in rows] == [
        (904, 60111, 6144),
        (904, 417, 4096),
    ]
    if to in te.COLUMNS:  # TE looks for the algorithm in a list that is long enough
        assert {row.aidx for row in te.read(text).rows} == {9_999}
    if to == GEMMTUNE:
        machine = table.parse(text, Tuned).provenance["machine"]
        assert machine == {"library": "hipBLASLt 1.0.1-abcdef12"}


@pytest.mark.parametrize(
    ("change", "to", "reason"),
    [
        ({"dev_cap": 0}, ALL[3:], "dev_cap 0"),
        ({"api": "mm"}, ALL[3:], "api mm"),
        ({"api": "gemmex"}, [OVERRIDE], "api gemmex"),
        ({"epi": "geluaux"}, ALL[3:], "epilogue geluaux"),
        ({"type_d": "float32"}, [TUNABLEOP], "a result of float32"),
        ({"comp": "f64"}, ALL[3:], "comp f64"),
        (
            {"type_a": "float8e4m3", "type_b": "float8e4m3", "scale_mode": 1},
            ALL[3:],
            "scale mode 1",
        ),
        ({"fast_accum": 1}, [OVERRIDE], "fast_accum 1"),
        ({"algo": Algo(0, 0, "0")}, [OVERRIDE], "algo_id 0"),
        ({"algo": Algo(-3, 0, "")}, ALL[3:], "algo_id -3"),
        ({"m": 0}, ALL[3:], "a size of 0"),
        ({"bias_type": "bfloat16"}, ALL[3:], "bias_type bfloat16"),
        ({"batch": 2, "epi": "bias", "bias_type": "bfloat16"}, [TUNABLEOP], "batched"),
        ({"epi": "bias", "bias_type": "float32"}, [TUNABLEOP], "a bias of float32"),
    ],
)
def test_what_a_dialect_cannot_hold_is_refused_row_by_row(
    change: dict[str, object], to: list[str], reason: str
) -> None:
    outer = {k: v for k, v in change.items() if k in Tuned._fields}
    inner = {k: v for k, v in change.items() if k not in outer}
    row = TUNED._replace(gemm=GEMM._replace(**inner), **outer)  # type: ignore[arg-type]
    kept = TUNED._replace(gemm=GEMM._replace(m=80, ldd=80))
    for dialect in to:
        converted = convert(ours(row, kept), dialect, like=VALIDATORS)
        assert [f.line for f in converted.findings] == [3], dialect
        assert reason in converted.findings[0].effect
        assert [r.gemm.m for r in back(converted.text)] == [80]


def test_rows_that_a_dialect_cannot_tell_apart_become_the_one_that_saves_the_most() -> None:
    plain = TUNED._replace(algo=Algo(1, 0, "1"), time_us=90.0, default_us=100.0)
    adding = plain._replace(
        gemm=GEMM._replace(beta=1), algo=Algo(2, 0, "2"), time_us=60.0, default_us=100.0
    )
    for to in (OVERRIDE, TUNABLEOP):
        text, (finding,) = convert(ours(plain, adding), to, like=VALIDATORS)
        assert (finding.line, finding.severity) == (3, "warning")
        assert [r.algo.algo_id for r in back(text)] == [2]
        often = {plain.gemm: 10.0, adding.gemm: 1.0}
        text = convert(ours(plain, adding), to, often, like=VALIDATORS).text
        assert [r.algo.algo_id for r in back(text)] == [1]


types = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
fp8_types = st.sampled_from(["float8e4m3", "float8e5m2"])


@st.composite
def tuned(draw: st.DrawFn) -> Tuned:
    """Rows of all kinds, most of which some dialect can hold."""
    m, n, k = (draw(st.integers(1, 300)) * 16 for _ in range(3))
    trans_a, trans_b = draw(st.sampled_from("NT")), draw(st.sampled_from("NT"))
    fp8 = draw(st.booleans())
    kind = draw(types)
    a, b = (draw(fp8_types), draw(fp8_types)) if fp8 else (kind, kind)
    epi = draw(st.sampled_from(["-", "-", "-", "bias", *EPILOGUES]))
    pad = st.sampled_from([0, 0, 16])
    batch = draw(st.sampled_from([1, 1, 1, 8]))
    lda = (m if trans_a == "N" else k) + draw(pad)
    ldb = (k if trans_b == "N" else n) + draw(pad)
    ldd = m + draw(pad)
    double = kind == "float64" and not fp8
    gemm = Gemm(
        *(m, n, k, trans_a, trans_b, a, b),
        type_d="bfloat16" if fp8 else draw(st.sampled_from([kind, kind, "float32"])),
        bias_type="-"
        if epi in ("-", "geluaux", "dgelu")
        else draw(st.sampled_from([kind, "bfloat16"])),
        lda=lda,
        ldb=ldb,
        ldd=ldd,
        epi=epi,
        comp="f64" if double else "f32",
        scale="float64" if double else "float32",
        beta=draw(st.integers(0, 1)),
        batch=batch,
        stride_a=lda * (k if trans_a == "N" else m) if batch > 1 else 0,
        stride_b=ldb * (n if trans_b == "N" else k) if batch > 1 else 0,
        stride_d=ldd * n if batch > 1 else 0,
        scale_mode=draw(st.sampled_from([0, 0, 2, 3])) if fp8 else 0,
        ws_bytes=draw(st.sampled_from([0, 2**25])),
        align=draw(st.sampled_from([0, 16])),
        api="lt",
    )
    algo_id = draw(st.integers(1, 2**31 - 1))
    algo = Algo(algo_id, draw(st.integers(0, 5000)), str(algo_id))
    time_us = draw(st.sampled_from([0.0, 12.5, 613.0]))
    cap = draw(st.sampled_from([904, 905]))
    return Tuned(cap, gemm, draw(st.sampled_from([0, 512])), WS_MAX, algo, time_us)


def as_held(row: Tuned, dialect: str) -> Tuned:
    """What a dialect has no words for at its default: what reading it back must give."""
    g = row.gemm._replace(ws_bytes=0, align=0, fast_accum=0)
    if dialect != OVERRIDE:
        g = g._replace(beta=0)
    if dialect in te.COLUMNS:
        if not g.fp8:
            g = g._replace(bias_type="-")  # TE has none
        algo = row.algo
        return row._replace(gemm=g, time_us=0.0, algo=algo)
    algo = row.algo._replace(aidx=override.ANY_RANK)
    return row._replace(gemm=g, ws_min=0, algo=algo)


def write(rows: list[Tuned], to: str) -> Converted:
    return convert(ours(*rows), to, like=validators_of(rows[0].dev_cap))


def validators_of(dev_cap: int) -> str:
    return VALIDATORS if dev_cap == 904 else VALIDATORS.replace("gfx942", "gfx950")


@settings(max_examples=300, deadline=None)
@given(tuned(), st.sampled_from(ALL), st.sampled_from(ALL))
def test_a_row_comes_back_from_every_dialect_that_can_hold_it_or_is_refused_with_the_reason(
    row: Tuned, first: str, second: str
) -> None:
    there = write([row], first)
    if there.findings:
        assert [(f.line, f.severity) for f in there.findings] == [(3, "error")]
        assert there.findings[0].effect
        return
    (found,) = back(there.text)
    assert found == as_held(row, first)
    onward = convert(there.text, second, like=validators_of(row.dev_cap))
    assume(not onward.findings)
    (again,) = back(onward.text)
    assert (again.dev_cap, again.algo.algo_id) == (row.dev_cap, row.algo.algo_id)
    assert again.gemm == as_held(as_held(row, first), second).gemm


def test_the_command_converts_and_says_how_to_get_what_is_missing(tmp_path: Path) -> None:
    path, like = tmp_path / "tuned.csv", tmp_path / "like.csv"
    path.write_text(
        ours(TUNED, TUNED._replace(gemm=GEMM._replace(k=256, epi="dgelu", lda=256, ldb=256)))
    )
    like.write_text(LIKE)
    result = run("convert", path, "--to", "tunableop", "--like", like)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{path}:4: error: epilogue dgelu" in result.stderr
    result = run("convert", path, "--to", "tunableop", "--drop")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "PYTORCH_TUNABLEOP_FILENAME=like.csv" in result.stderr
    out = tmp_path / "out.csv"
    assert (
        run("convert", path, "--to", "tunableop", "--like", like, "--drop", "-o", out).exit_code
        == 0
    )
    assert out.read_text().startswith(VALIDATORS)
    assert run("convert", out, "--to", "override").stdout.count("gfx942,-\n") == 1
    assert run("convert", like, "--to", "te-v1", "--drop").stdout.count("\n904,") == 2


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LIKE, convert(ours(TUNED), OVERRIDE).text]), st.data())
def test_damaged_files_are_findings_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.binary(max_size=12))
    path = tmp_path_factory.getbasetemp() / "damaged.csv"
    path.write_bytes(text.encode()[:at] + junk + text.encode()[at + data.draw(st.integers(0, 9)) :])
    for to in ("te-v1", "gemmtune", OVERRIDE, TUNABLEOP):
        result = run("convert", path, "--to", to)
        assert result.exit_code in (0, 1, 2, 3), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
    assert tunableop.gemm("GemmTunableOp_Half_TN,tn_1_1_1_ld_1_1_1").m == 1
