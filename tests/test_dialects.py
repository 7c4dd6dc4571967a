"""Dialects: byte-for-byte reading and writing, conversion, and a finding for every fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune import table
from gemmtune.dialects import DIALECTS, GEMMTUNE, detect, te
from gemmtune.dialects.convert import convert, te_of, tuned_of
from gemmtune.dialects.finding import ERROR, WARNING, Finding
from gemmtune.dialects.lint import lint
from gemmtune.dialects.merge import merge
from gemmtune.errors import Incompatible, TableError
from gemmtune.gemm import Algo, Gemm
from gemmtune.table import Tuned

FIXTURES = Path(__file__).parent / "fixtures" / "te_csv"
GOOD = {f"te-v{n}": (FIXTURES / f"v{n}_good.csv").read_bytes().decode() for n in (1, 2, 3)}
V1, V2, V3 = (te.HEADERS[d] + "\n" for d in te.HEADERS)
BF16 = "904,6144,8192,4096,T,N,bfloat16,bfloat16,bfloat16,-,4096,4096,6144,-,f32,float32"
FP8 = "904,6144,8192,4096,T,N,float8e4m3,float8e5m2,bfloat16,float32,4096,4096,6144,-,f32,float32"
END = ",0,33554432,251711,4\n"
ROW = BF16 + END
GEMM = Gemm(
    *(6144, 8192, 4096, "T", "N", "bfloat16", "bfloat16", "bfloat16", "-", 4096, 4096, 6144)
)._replace(api="lt")
TUNED = Tuned(904, GEMM, 0, 2**25, Algo(251711, 4, "251711"), 600.0, 640.0)


def errors(text: str | bytes, **kwargs: object) -> list[Finding]:
    data = text.encode() if isinstance(text, str) else text
    return [f for f in lint(data, **kwargs) if f.severity == ERROR]  # type: ignore[arg-type]


def warnings(text: str, **kwargs: object) -> list[Finding]:
    return [f for f in lint(text.encode(), **kwargs) if f.severity == WARNING]  # type: ignore[arg-type]


def put(column: str, cell: str, row: str = ROW, dialect: str = "te-v1") -> str:
    """A table whose one row has another cell."""
    cells = row.rstrip("\n").split(",")
    cells[te.COLUMNS[dialect].index(column)] = cell
    return te.HEADERS[dialect] + "\n" + ",".join(cells) + "\n"


# Reading, writing, converting


@pytest.mark.parametrize("dialect", GOOD)
def test_a_good_table_is_clean_and_the_same_to_the_byte_when_written_again(dialect: str) -> None:
    text = GOOD[dialect]
    assert errors(text) == []
    assert detect(text) == dialect
    assert te.write(te.read(text)) == text
    assert convert(text, dialect) == (text, [])


@pytest.mark.parametrize("source", GOOD)
@pytest.mark.parametrize("to", [*GOOD, GEMMTUNE])
def test_every_good_table_comes_back_to_the_byte_from_every_dialect(source: str, to: str) -> None:
    there = convert(GOOD[source], to)
    assert there.findings == []
    assert detect(there.text) == to
    if to != GEMMTUNE:
        assert errors(there.text) == []
    back = convert(there.text, source)
    assert back.findings == []
    assert back.text == GOOD[source]


blanks = st.text(" \t\r", max_size=2)
comments = st.sampled_from(
    ["\n", "# note\n", '# gemmtune {"stage": "sweep"}\n', " \t\n", "  # x\r\n"]
)
rows = st.builds(
    lambda before, n, extra, after: f"{before}{BF16},0,{n},{n},4{extra}{after}\n",
    *(blanks, st.integers(0, 2**40), st.sampled_from(["", ",x", ",,"]), blanks),
)


@given(st.lists(comments | rows, max_size=6), st.sampled_from([*te.HEADERS]), st.booleans())
def test_comments_blanks_and_extra_columns_survive_any_conversion(
    lines: list[str], to: str, ended: bool
) -> None:
    text = V1 + "".join(lines)
    text = text if ended else text[:-1]
    document = te.read(text)
    assert te.write(document) == text
    assert convert(convert(text, to).text, "te-v1").text == text


def test_a_column_that_the_target_lacks_is_refused_unless_it_says_nothing() -> None:
    fp8_v3 = (
        "905,32,64,128,T,N,float8e4m3,float8e4m3,bfloat16,float32,{},128,128,32,{},{},f32,float32"
    )
    lines = [("-", 0, "-"), ("bfloat16", 0, "geluaux"), ("-", 2, "-"), ("-", 0, "bias")]
    text = V3 + "".join(fp8_v3.format(*x) + END for x in lines)
    assert errors(text) == []
    text_v1, findings = convert(text, "te-v1")
    assert [(f.line, f.effect) for f in findings] == [
        (3, "te-v1 has no aux_type, and this row's is bfloat16"),
        (4, "te-v1 has no scale mode, and this row's is 2"),
    ]
    assert [r.epi for r in te.read(text_v1).rows] == ["-", "bias"]
    assert [f.line for f in convert(text, "te-v2").findings] == [3]
    assert [f.line for f in convert(text, GEMMTUNE).findings] == [3]
    assert [r.scale_mode for r in te.read(convert(text, "te-v2").text).rows] == [0, 2, 0]


def test_our_table_becomes_one_te_row_per_te_key() -> None:
    fp8 = GEMM._replace(type_a="float8e4m3", type_b="float8e4m3")
    biased = fp8._replace(epi="bias", bias_type="bfloat16")
    bias = GEMM._replace(epi="bias", bias_type="bfloat16")
    tuned = [TUNED._replace(gemm=g) for g in (GEMM, fp8, biased, bias)]
    assert [te_of(t).bias_type for t in tuned] == ["-", "float32", "bfloat16", "-"]
    text = table.render(tuned, Tuned, {"stage": "sweep"})
    converted = convert(text, "te-v1")
    assert converted.findings == []
    assert errors(converted.text) == []
    assert te.read(converted.text).provenance == {"stage": "sweep"}
    assert detect(text) == GEMMTUNE
    again = table.parse(convert(converted.text, GEMMTUNE).text, Tuned)
    assert again.provenance == {"stage": "sweep"}
    assert [r.gemm.bias_type for r in again.rows] == ["-", "-", "bfloat16", "-"]
    assert [tuned_of(te_of(t)) for t in tuned[:3]] == [
        t._replace(time_us=0.0, default_us=0.0) for t in tuned[:3]
    ]


def test_rows_of_one_te_key_give_way_to_the_one_that_saves_the_most_time() -> None:
    plain = TUNED._replace(algo=Algo(1, 0, "1"), time_us=90.0, default_us=100.0)
    accumulating = plain._replace(
        gemm=GEMM._replace(beta=1), algo=Algo(2, 0, "2"), time_us=60.0, default_us=100.0
    )
    text = table.render([plain, accumulating], Tuned, {})
    converted = convert(text, "te-v1")
    assert [r.algo_id for r in te.read(converted.text).rows] == [2]
    assert [(f.line, f.severity) for f in converted.findings] == [(2, WARNING)]
    often = {plain.gemm: 10.0, accumulating.gemm: 1.0}
    assert [r.algo_id for r in te.read(convert(text, "te-v1", often).text).rows] == [1]
    same = accumulating._replace(algo=plain.algo)
    assert convert(table.render([plain, same], Tuned, {}), "te-v1").findings == []
    apart = [plain._replace(ws_max=99), accumulating._replace(ws_min=100)]
    text = convert(table.render(apart, Tuned, {}), "te-v1").text
    assert [r.algo_id for r in te.read(text).rows] == [1, 2]
    assert errors(text) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dev_cap": 0}, "CPU"),
        ({"gemm": GEMM._replace(api="mm")}, "api mm"),
        ({"gemm": GEMM._replace(batch=8)}, "batch 8"),
        ({"gemm": GEMM._replace(type_a="float64")}, "type_a float64"),
        ({"gemm": GEMM._replace(comp="f64")}, "comp f64"),
        ({"gemm": GEMM._replace(scale="float64")}, "scale float64"),
        ({"gemm": GEMM._replace(scale_mode=2)}, "no scale mode"),
        ({"gemm": GEMM._replace(k=0)}, "size of 0"),
        ({"gemm": GEMM._replace(m=2**31)}, "2147483648"),
        ({"algo": Algo(-1, 0, "")}, "algo_id -1"),
        ({"algo": Algo(1, -1, "")}, "aidx -1"),
    ],
)
def test_what_te_cannot_say_is_refused_row_by_row(change: dict[str, object], reason: str) -> None:
    text = table.render([TUNED._replace(**change), TUNED], Tuned, {"x": 1})  # type: ignore[arg-type]
    converted = convert(text, "te-v1")
    assert [f.line for f in converted.findings] == [3]
    assert reason in converted.findings[0].effect
    assert [r.algo_id for r in te.read(converted.text).rows] == [TUNED.algo.algo_id]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("m,n\n", "t.csv:1: not a header"),
        (put("m", "1e3"), "t.csv:2: column m: '1e3' is not a whole number"),
        (put("type_a", "bf16"), "t.csv:2: column type_a: 'bf16' is no name"),
        (put("aidx", "9" * 5000), "is too large"),
        (V1 + BF16 + "\n", "t.csv:2: the row ends before column ws_min"),
    ],
)
def test_reading_a_bad_table_names_file_line_column_and_value(text: str, where: str) -> None:
    with pytest.raises(TableError) as e:
        te.read(text, "t.csv")
    assert where in str(e.value)


# Lint: the faulty files


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("v1_crlf.csv", "CRLF"),
        ("v1_bom.csv", "byte-order mark"),
        ("v1_header_trailing_blank.csv", "blanks in the header"),
    ],
)
def test_each_faulty_file_is_found(file: str, reason: str) -> None:
    (finding,) = errors((FIXTURES / file).read_bytes())
    assert (finding.line, "ignores the whole file" in finding.effect) == (1, True)
    assert reason in finding.effect


def test_each_faulty_row_is_found() -> None:
    found = errors((FIXTURES / "v1_bad_rows.csv").read_bytes())
    assert [(f.line, f.column, f.value) for f in found] == [
        (2, "type_a", "bf16"),
        (3, "epi", "none"),
        (4, "bias_type", "bfloat16"),
        (5, "bias_type", "-"),
        (6, "ws_min", "33554432"),
        (8, "ws_min", "1024"),
        (9, "lda", "2048"),
        (10, "", ""),
    ]
    does = ["throws", "throws", "never", "never", "skips", "keeps line 7", "never", "throws"]
    assert [word in f.effect for f, word in zip(found, does, strict=True)] == [True] * 8
    assert [f.mend for f in found[:2]] == ["Write bfloat16", "Write -"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("", "empty"),
        ("\n", "empty"),
        (V1.replace("\n", ",\n"), "column 21 is ''"),
        (V1.upper(), "quotes, case or blanks"),
        (V1.replace("m,", '"m",'), "quotes, case or blanks"),
        (" " + V1, "blanks"),
        (V1.replace(",", ", "), "blanks"),
        ("# tuned\n" + V1, "the header is on line 2"),
        ("\n" + V1, "the header is on line 2"),
        (V1.replace("aidx", "algo_idx"), "column 20 is 'algo_idx'"),
        (V3.replace("ws_min", "fp4_alpha,ws_min"), "column 19 is 'fp4_alpha'"),
        (V1.replace(",aidx", ""), "column 20 is missing"),
        (ROW, "column 1 is '904'"),
    ],
)
def test_a_header_that_is_not_exact_is_found(header: str, reason: str) -> None:
    found = errors(header + ROW if header.strip() else header)
    assert found[0].line == 1
    assert "Incorrect algo storage legend" in found[0].effect
    assert reason in found[0].effect


def test_the_header_of_another_te_is_found_and_the_conversion_named() -> None:
    (finding,) = errors(GOOD["te-v2"], dialect="te-v1")
    assert "ignores the whole file" in finding.effect
    assert "gemmtune convert FILE --to te-v1" in finding.mend
    assert errors(GOOD["te-v2"], dialect="te-v2") == []


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_header_alone_loads_nothing_and_is_said(end: str) -> None:
    assert errors(V1.rstrip("\n") + end) == []
    assert ["no rows" in f.effect for f in warnings(V1.rstrip("\n") + end)] == [True]


THROWS, SKIPS, LEFT, NEVER = "throws", "skips the row in silence", "left over", "never uses"


@pytest.mark.parametrize(
    ("column", "cell", "effect"),
    [
        *((c, "1e3", THROWS) for c in te.DIMENSIONS),
        *(("m", cell, THROWS) for cell in ("", "x", '"6144"', "6144.5", "2147483648", "9" * 5000)),
        *(("n", cell, NEVER) for cell in ("0", "-8192")),
        *((c, "0", NEVER) for c in ("m", "k")),
        *(
            (c, cell, THROWS)
            for c in ("trans_a", "trans_b")
            for cell in ("t", " T", '"T"', "", "C")
        ),
        *((f"type_{x}", cell, THROWS) for x in "abd" for cell in ("BFLOAT16", "bf16", "float64")),
        ("bias_type", "none", THROWS),
        *(("epi", cell, THROWS) for cell in ("none", "", "BIAS", "gelu", '"-"')),
        *(("comp", cell, THROWS) for cell in ("f64", "F32", "float32")),
        ("scale", "f32", THROWS),
        *(("scale", cell, SKIPS) for cell in ("float16", "float8e4m3")),
        *(("dev_cap", cell, SKIPS) for cell in ("gfx942", "", "942", "0", "-904", "9.04", '"904"')),
        *((c, cell, LEFT) for c in ("ws_min", "ws_max") for cell in ("1e3", "x", "", "-1")),
        *((c, "12.5", LEFT) for c in ("ws_max", "algo_id", "aidx")),
        *((c, "18446744073709551616", LEFT) for c in ("ws_max", "algo_id", "aidx")),
        *(("algo_id", cell, LEFT) for cell in ("1e3", "", "-1", "9223372036854775808")),
        ("aidx", "-1", "ignores the row's algo_id"),
        ("ws_min", "33554433", "skips the row"),
        ("lda", "4095", NEVER),
        ("ldb", "4095", NEVER),
        ("ldd", "6143", NEVER),
        ("bias_type", "float32", NEVER),
    ],
)
def test_a_bad_cell_of_te_v1_is_found(column: str, cell: str, effect: str) -> None:
    found = errors(put(column, cell))
    assert [(f.line, f.column, f.value) for f in found] == [(2, column, cell)]
    assert effect in found[0].effect
    assert found[0].mend


@pytest.mark.parametrize(
    ("trans", "lds", "bad"),
    [
        ("N,N", (6144, 4096, 6144), ""),
        ("N,T", (6144, 8192, 6144), ""),
        ("T,T", (4096, 8192, 6144), ""),
        ("N,N", (4096, 4096, 6144), "lda"),
        ("N,T", (6144, 4096, 6144), "ldb"),
    ],
)
def test_leading_dimensions_are_held_against_the_transposes(
    trans: str, lds: tuple[int, int, int], bad: str
) -> None:
    a, b, d = lds
    row = f"904,6144,8192,4096,{trans},bfloat16,bfloat16,bfloat16,-,{a},{b},{d},-,f32,float32{END}"
    assert [f.column for f in errors(V1 + row)] == ([bad] if bad else [])


@pytest.mark.parametrize("cell", ["-", "float8e4m3"])
def test_an_fp8_row_needs_a_bias_type(cell: str) -> None:
    assert errors(V1 + FP8 + END) == []
    (finding,) = errors(put("bias_type", cell, FP8 + END))
    assert "never uses" in finding.effect


@pytest.mark.parametrize("cells", range(1, 20))
def test_a_row_cut_anywhere_is_found(cells: int) -> None:
    cut = ",".join(ROW.strip().split(",")[:cells])
    for text in (cut, cut + "\n", cut + ROW):
        found = errors(V1 + ROW.replace("904,6144", "904,2048", 1) + text)
        assert found, text
    (finding,) = errors(V1 + cut + "\n" + ROW.replace(",N,", ",T,"))[:1]
    assert ("left over" if cells >= 16 else "throws") in finding.effect


def test_overlapping_ranges_are_found_and_touching_ones_are_not() -> None:
    low, high = ROW.replace(",0,33554432,", ",0,99,"), ROW.replace(",0,33554432,", ",100,200,")
    assert errors(V1 + low + high) == []
    (finding,) = errors(V1 + low + high.replace("100,", "99,"))
    assert (finding.line, finding.column) == (3, "ws_min")
    assert "keeps line 2" in finding.effect
    assert "start this range at 100" in finding.mend
    (finding,) = errors(V1 + ROW + "# and again\n" + ROW)
    assert finding.line == 4
    skipped = low.replace("float32", "float16")
    assert [f.column for f in errors(V1 + skipped + low)] == ["scale"]


def test_a_gpu_that_is_not_the_machines_is_found() -> None:
    assert errors(V1 + ROW, gpu=904) == []
    (finding,) = errors(V1 + ROW, gpu=905)
    assert (finding.column, "skips the row in silence" in finding.effect) == ("dev_cap", True)
    assert errors(put("dev_cap", "900"), gpu=900) == []
    mixed = V1 + ROW + ROW.replace("904", "905", 1)
    assert errors(mixed) == []
    assert [f.column for f in warnings(mixed)] == ["dev_cap"]


@pytest.mark.parametrize(
    ("dialect", "column", "cell", "effect"),
    [
        ("te-v2", "fp8_scale", "6", SKIPS),
        ("te-v2", "fp8_scale", "-1", SKIPS),
        ("te-v2", "fp8_scale", "tensor", THROWS),
        ("te-v2", "fp8_scale", "", THROWS),
        ("te-v3", "scale_mode", "6", SKIPS),
        ("te-v3", "scale_type", "float16", SKIPS),
        ("te-v3", "aux_type", "", THROWS),
        ("te-v3", "aux_type", "bfloat16", NEVER),
    ],
)
def test_a_bad_cell_of_the_later_dialects_is_found(
    dialect: str, column: str, cell: str, effect: str
) -> None:
    row = convert(V1 + FP8 + END, dialect).text.splitlines()[1]
    (finding,) = errors(put(column, cell, row, dialect))
    assert (finding.column, finding.value) == (column, cell)
    assert effect in finding.effect


def test_scale_modes_without_fp8_are_never_sure_in_te_v2() -> None:
    row = convert(V1 + ROW, "te-v2").text.splitlines()[1]
    text = put("fp8_scale", "0", row, "te-v2")
    assert errors(text) == []
    assert ["uninitialised" in f.effect for f in warnings(text)] == [True]
    (finding,) = errors(put("fp8_scale", "2", row, "te-v2"))
    assert "never uses" in finding.effect


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (put("m", "+6144"), "reads it as 6144"),
        (put("m", " 6144\t"), "reads it as 6144"),
        (put("k", "04096"), "reads it as 4096"),
        (V1 + ROW.replace("\n", ",note\n"), "after aidx"),
        (V1 + ROW.replace("\n", " # note\n"), "ignores the rest"),
        (V1 + ROW.rstrip("\n"), "no end"),
        (put("ws_min", "1024"), "never kept in memory"),
        (put("aidx", "20000"), "20001 results"),
        (put("n", "8200", FP8 + END), "multiples of 16"),
        (put("trans_a", "N", FP8 + END).replace(",4096,4096,6144", ",6144,4096,6144"), "T,N"),
        (V1 + "# gemmtune {\n" + ROW, "not a JSON object"),
    ],
)
def test_what_te_puts_up_with_is_a_warning(text: str, word: str) -> None:
    assert errors(text) == []
    assert [word in f.effect for f in warnings(text)] == [True]


def test_blanks_comments_and_line_ends_that_te_skips_are_clean() -> None:
    text = V1 + "\n \t\n  # note\n" + ROW.replace("\n", " \r\n") + "\n"
    assert lint(text.encode()) == []


@pytest.mark.parametrize("place", [3, 300])
@pytest.mark.parametrize(("junk", "word"), [(b"\0", "NUL"), (b"\xff", "0xff"), (b"\xc3", "0xc3")])
def test_bytes_that_are_no_text_are_found(place: int, junk: bytes, word: str) -> None:
    data = (V1 + "# comment\n" + ROW + "# the end of it\n").encode()
    found = errors(data[:place] + junk + data[place:])
    assert any(word in f.effect for f in found)


def test_two_tables_in_one_file_are_found() -> None:
    (finding,) = errors(V1 + ROW + V1 + ROW.replace("6144", "2048"))
    assert (finding.line, "second header" in finding.effect) == (4 - 1, True)


def test_lines_torn_by_two_writers_are_found() -> None:
    other = ROW.replace("904,6144", "904,2048")
    for at in range(1, len(ROW) - 1):
        assert errors(V1 + other + ROW[:at] + other.replace("2048", "1024")), at


# Our own table


def test_our_table_is_an_error_to_te_and_clean_to_gemmtune() -> None:
    text = table.render([TUNED], Tuned, {"stage": "sweep"})
    (finding,) = errors(text)
    assert "gemmtune convert FILE --to te-v1" in finding.mend
    (finding,) = errors(text, dialect="te-v2")
    assert "gemmtune convert FILE --to te-v2" in finding.mend
    assert errors(text, dialect=GEMMTUNE) == []
    assert errors(GOOD["te-v1"], dialect=GEMMTUNE)[0].line == 1


def test_faults_of_our_table_are_found() -> None:
    good = table.render([TUNED], Tuned, {}).splitlines()
    cells = good[1].split(",")
    text = "\n".join(
        (
            *(good[0], good[1], good[1], good[1].replace(",0,33554432,", ",5,4,")),
            *(",".join(["904", "1e3", *cells[2:]]), "1,2", "# gemmtune 1"),
        )
    )
    assert [(f.line, f.column) for f in errors(text, dialect=GEMMTUNE)] == [
        *((3, "ws_min"), (4, "ws_min"), (5, "m"), (6, ""), (7, "")),
    ]


@given(st.binary(max_size=300), st.sampled_from(["", V1, V2, V3]), st.booleans())
def test_lint_takes_any_bytes(junk: bytes, header: str, ours: bool) -> None:
    head = ",".join(table.COLUMNS[Tuned]) + "\n" if ours else header
    for dialect in (None, *DIALECTS):
        for finding in lint(head.encode() + junk, dialect):
            assert str(finding)


# Merging


def test_merging_keeps_the_faster_row_and_reports_the_conflict() -> None:
    slow = TUNED._replace(algo=Algo(1, 0, "1"), time_us=700.0)
    other = TUNED._replace(gemm=GEMM._replace(beta=1))
    a, b = table.render([slow, other], Tuned, {}), table.render([TUNED], Tuned, {})
    for pair in ([("a", a), ("b", b)], [("b", b), ("a", a)]):
        merged = merge(pair)
        rows = table.parse(merged.text, Tuned).rows
        assert set(rows) == {TUNED, other}
        (conflict,) = merged.conflicts
        assert "kept 251711, the faster, 600 us against 700 us" in conflict
        assert "a:2" in conflict
        assert "b:2" in conflict
    untimed = table.render([TUNED._replace(time_us=0.0)], Tuned, {})
    merged = merge([("a", a), ("u", untimed)])
    assert slow in table.parse(merged.text, Tuned).rows
    assert "do not both have a time" in merged.conflicts[0]
    assert merge([("b", b), ("c", b)]) == (b, [], [])


def test_merging_te_tables_keeps_the_first_and_lines_as_they_stand() -> None:
    mine = V1 + "# rank 0\n" + ROW
    theirs = V1 + "# rank 1\n" + ROW.replace("251711", "7") + FP8 + END
    merged = merge([("a", mine), ("b", theirs)])
    assert merged.text == V1 + "# rank 0\n# rank 1\n" + ROW + FP8 + END
    assert "kept 251711, the first" in merged.conflicts[0]
    assert errors(merged.text) == []
    touching = ROW.replace(",0,33554432,", ",33554433,33554434,")
    assert merge([("a", V1 + ROW), ("b", V1 + touching)]).text == V1 + ROW + touching
    wider = merge([("a", V1 + ROW), ("b", V1 + ROW.replace("33554432", "99999999"))])
    assert "kept 0 to 33554432 of a:2" in wider.conflicts[0]


def test_merging_keeps_what_all_provenances_say_and_what_differs_by_table() -> None:
    machine = {"library": "1.0-abc", "arch": "gfx942"}
    a, b = ({"machine": {**machine, "host": h}, "stage": "sweep", "rank": h} for h in "ab")
    pair = [("a", table.render([TUNED], Tuned, a)), ("b", table.render([TUNED], Tuned, b))]
    merged = merge(pair)
    assert table.parse(merged.text, Tuned).provenance == {
        "machine": machine,
        "stage": "sweep",
        "merged": [
            {"table": "a", "machine": {"host": "a"}, "rank": "a"},
            {"table": "b", "machine": {"host": "b"}, "rank": "b"},
        ],
    }
    assert merged.notes == []


def test_merging_refuses_other_builds_and_dialects_unless_forced() -> None:
    a, b = (
        table.render([TUNED], Tuned, {"machine": {"library": x}}) for x in ("1.0-abc", "1.0-def")
    )
    with pytest.raises(Incompatible, match=r"the GEMM library is 1.0-abc in a and 1.0-def in b"):
        merge([("a", a), ("b", b)])
    assert merge([("a", a), ("b", b)], force=True).notes == [
        "the GEMM library is 1.0-abc in a and 1.0-def in b"
    ]
    silent = merge([("a", a), ("c", table.render([TUNED], Tuned, {}))])
    assert silent.notes == ["c does not say which library build it was made with"]
    v1, v2 = V1 + ROW, convert(V1 + FP8 + END, "te-v2").text
    with pytest.raises(Incompatible, match="gemmtune convert b --to te-v1"):
        merge([("a", v1), ("b", v2)])
    assert merge([("a", v1), ("b", v2)], force=True).text == V1 + ROW + FP8 + END
    mx = put("fp8_scale", "2", v2.splitlines()[1], "te-v2")
    with pytest.raises(Incompatible, match="no scale mode"):
        merge([("a", v1), ("b", mx)], force=True)
