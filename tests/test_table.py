"""table.py: written is read back; torn and bad files are told exactly; writes are atomic."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune import table, textfile
from gemmtune.errors import TableError, UsageError
from gemmtune.gemm import COMPUTE_TYPES, EPILOGUES, PASSES, TYPE_BYTES, Algo, Gemm
from gemmtune.table import Candidate, Shape, Tuned

size = st.integers(0, 2**63 - 1)
trans = st.sampled_from("NT")
kind = st.sampled_from(sorted(TYPE_BYTES))
# As the tables keep text: one line, no blanks at its ends.
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85\u2028\u2029")).map(
    lambda s: "".join(c for c in s if c >= " " and c != "\x7f").strip()
)
count = st.floats(0, 1e18, allow_subnormal=False)
short = st.floats(0, 1e18).map(lambda x: float(f"{x:.6g}"))  # times keep six digits

gemms = st.builds(
    Gemm,
    *(size, size, size, trans, trans, kind, kind, kind, st.sampled_from(["-", *TYPE_BYTES])),
    *(size, size, size, st.sampled_from(EPILOGUES), st.sampled_from(COMPUTE_TYPES), text),
    *(size,) * 9,
    text,
)
algos = st.builds(Algo, st.integers(-(2**63), 2**63 - 1), st.integers(-1, 2**31), text)
ranks = st.sets(st.integers(0, 5000), min_size=1, max_size=4).map(table.format_ranks)
shapes = st.builds(
    Shape, gemms, st.sampled_from(PASSES), st.integers(0, 1), text, count, size, ranks, short, text
)
candidates = st.builds(
    Candidate, gemms, algos, text, text, *(short,) * 4, st.integers(0, 10**6), text
)
tuneds = st.builds(
    Tuned, size, gemms, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), algos, *(short,) * 4
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("ab\n#", max_size=3), v),
    max_leaves=5,
)
provenances = st.dictionaries(st.text("abc", min_size=1), json_values, max_size=3)

GEMM = Gemm(
    *(6144, 8192, 4096, "T", "N", "bfloat16", "bfloat16", "bfloat16", "-", 4096, 4096, 6144)
)
HEADERS = {kind: ",".join(columns) for kind, columns in table.COLUMNS.items()}
TUNED = Tuned(904, GEMM, 0, 2**25, Algo(60217, 11, "60217"), 613.5, 640.25)


def candidate(number: int, reason: str = "") -> Candidate:
    return Candidate(GEMM, Algo(number, 0, f"c{number}"), "ok", reason, 10.0)


@given(st.lists(shapes, max_size=3), provenances)
def test_shapes_are_read_as_written(rows: list[Shape], provenance: dict[str, object]) -> None:
    assert table.parse(table.render(rows, Shape, provenance), Shape) == (rows, provenance)


@given(st.lists(candidates, max_size=3), provenances)
def test_candidates_are_read_as_written(
    rows: list[Candidate], provenance: dict[str, object]
) -> None:
    assert table.parse(table.render(rows, Candidate, provenance), Candidate) == (rows, provenance)


@given(st.lists(tuneds, max_size=3), provenances)
def test_tuned_rows_are_read_as_written(rows: list[Tuned], provenance: dict[str, object]) -> None:
    assert table.parse(table.render(rows, Tuned, provenance), Tuned) == (rows, provenance)


@given(st.text(max_size=400))
def test_any_text_is_a_table_or_a_table_error(junk: str) -> None:
    header = ",".join(table.COLUMNS[Shape]) + "\n"
    for content in (junk, header + junk, header + "# gemmtune " + junk):
        for cls in (Shape, Candidate, Tuned):
            with contextlib.suppress(TableError):
                table.parse(content, cls)


def test_a_message_of_several_lines_becomes_one_line() -> None:
    rows = [candidate(1, ' CUDA error:\n  "bad" launch\r\n\u2028#,x\x00 ')]
    read = table.parse(table.render(rows, Candidate, {}), Candidate).rows
    assert read[0].reason == 'CUDA error:   "bad" launch #,x'


def test_calls_are_exact_however_many() -> None:
    row = Shape(GEMM, calls=123456789.0)
    third = Shape(GEMM, calls=1 / 3)
    read = table.parse(table.render([row, third], Shape, {}), Shape).rows
    assert [r.calls for r in read] == [123456789.0, 1 / 3]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (Shape(GEMM, time_us=float("nan")), "time_us"),
        (Shape(GEMM, pass_="forward"), "pass"),
        (Shape(GEMM._replace(m=-1)), "m"),
        (Shape(GEMM._replace(type_a="bf16")), "type_a"),
        (TUNED._replace(ratio_low=float("inf")), "ratio_low"),
        (TUNED._replace(ws_min=None), "ws_min"),
    ],
)
def test_a_value_that_could_not_be_read_again_is_not_written(row: Shape, column: str) -> None:
    with pytest.raises(TableError, match=f"column {column}:"):
        table.line(row)


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("m", "1e3", "whole number"),
        ("m", "", "whole number"),
        ("m", "-5", "negative"),
        ("m", "\u0664", "whole number"),
        ("n", "9" * 5000, "whole number"),
        ("k", str(2**63), "too large"),
        ("type_a", "bf16", "none of"),
        ("trans_b", "t", "none of"),
        ("epi", "none", "none of"),
        ("pass", "forward", "none of"),
        ("calls", "1_000", "number from 0 up"),
        ("time_us", "nan", "number from 0 up"),
        ("time_us", "1.2.3", "number from 0 up"),
    ],
)
def test_a_bad_cell_is_told_by_file_line_column_and_value(
    column: str, cell: str, reason: str, tmp_path: Path
) -> None:
    lines = table.render([Shape(GEMM), Shape(GEMM)], Shape, {"a": 1}).splitlines()
    cells = lines[3].split(",")
    cells[table.COLUMNS[Shape].index(column)] = cell
    path = tmp_path / "shapes.csv"
    path.write_text("\n".join([*lines[:3], ",".join(cells)]) + "\n")
    with pytest.raises(TableError) as e:
        table.read(path, Shape)
    message = str(e.value)
    assert message.startswith(f"{path}:4: column {column}: {cell!r} ")
    assert reason in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", ":1: empty"),
        ("# gemmtune {}\n", "empty"),
        ("m,n\n", "column 'k' is missing"),
        ("m,n,k,speed\n", "unknown column 'speed'"),
        ("TUNED\n", "this is a tuned table, and a shape table is wanted: gemmtune capture writes"),
        ("import torch\n", "this is not a shape table: gemmtune capture writes one (shapes.csv)"),
        ("HEADER,m\n", "stands twice"),
        ("HEADER\n1,2\n", ":2: 2 cells where the header has"),
        ('HEADER\n"1,2\n', ":2: not a CSV row"),
        ("# gemmtune [1]\nHEADER\n", ":1: the provenance is not a JSON object"),
        ("HEADER\n# gemmtune {\n", ":2: the provenance is not a JSON object"),
        ("# gemmtune " + "[" * 100_000 + "\nHEADER\n", ":1: the provenance is not"),
    ],
)
def test_a_bad_line_is_told(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content.replace("HEADER", HEADERS[Shape]).replace("TUNED", HEADERS[Tuned]))
    with pytest.raises(TableError) as e:
        table.read(path, Shape)
    assert reason in str(e.value)
    assert str(path) in str(e.value)


def test_a_hand_made_table_may_leave_columns_out_and_come_from_excel() -> None:
    text = (
        "\ufeff# mine\r\nm,n,k,trans_a,trans_b,type_a,type_b,type_d,lda,ldb,ldd,calls\r\n\r\n"
        "6144 ,8192,4096,T,N,bfloat16,bfloat16,bfloat16,4096,4096,6144,32"
    )
    assert table.parse(text, Shape).rows == [Shape(GEMM, calls=32.0)]


def test_a_missing_file_and_one_that_is_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nothing.csv: No such file"):
        table.read(tmp_path / "nothing.csv", Shape)
    (tmp_path / "x.csv").write_bytes(b"m,n\n1,\xff\n")
    with pytest.raises(TableError, match=r"x.csv:2: byte 0xff is not UTF-8"):
        table.read(tmp_path / "x.csv", Shape)


def test_a_write_that_fails_leaves_the_old_table_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.csv"
    table.write(path, [TUNED], Tuned, {})
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"cannot write .*tuned.csv: No space left"):
        table.write(path, [], Tuned, {})
    monkeypatch.undo()
    with pytest.raises(TableError, match=r"is not text"):
        textfile.write_text(path, "\udc80")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["tuned.csv"]


def test_a_folder_that_is_missing_read_only_or_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*none/t.csv: No such file"):
        textfile.write_text(tmp_path / "none" / "t.csv", "")
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory"):
        textfile.write_text(tmp_path, "")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*: Not a directory"):
        textfile.write_text(tmp_path / "file" / "t.csv", "")


def test_a_read_only_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("old")
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # root may write anywhere, so the kernel's answer is played

        def refuse(*_: object) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=r"cannot write .*t.csv: Permission denied"):
        textfile.write_text(tmp_path / "t.csv", "new")
    monkeypatch.undo()
    tmp_path.chmod(0o700)
    assert (tmp_path / "t.csv").read_text() == "old"
    assert os.listdir(tmp_path) == ["t.csv"]


def test_what_can_be_written_is_told_as_the_write_will_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "link.csv").symlink_to(closed / "t.csv")
    monkeypatch.setattr(os, "access", lambda path, _: str(path) not in ("/dev", str(closed)))
    textfile.check_writable("/dev/null")  # a device lies in a folder that is not the user's
    textfile.check_writable(tmp_path / "t.csv")
    for path in (tmp_path / "link.csv", closed / "t.csv", closed):
        with pytest.raises(UsageError, match="may write to"):
            textfile.check_writable(path)


def test_a_write_follows_a_link_and_respects_the_umask(tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real.csv")
    before = os.umask(0o027)
    try:
        textfile.write_text(tmp_path / "link.csv", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "new"
    assert (tmp_path / "real.csv").stat().st_mode & 0o777 == 0o640
    textfile.write_text("/dev/null", "new")
    assert not Path("/dev/null").is_file()


def test_calls_are_added_up_by_gemm_and_ranks_are_named_by_range() -> None:
    other = GEMM._replace(beta=1)
    rows = [Shape(GEMM, "fprop", calls=2.0), Shape(other), Shape(GEMM, "dgrad", calls=1.0)]
    assert table.by_gemm(rows) == {GEMM: 3.0, other: 1.0}
    assert list(table.by_gemm(rows)) == [GEMM, other]
    assert table.format_ranks([5, 0, 1, 2, 2]) == "0-2,5"
    assert table.format_ranks([]) == ""


@pytest.mark.parametrize("ranks", ["x", "", "0-", "-1", "3-1", "0,,1", "0-2000000000"])
def test_ranks_that_are_none_are_a_fault(ranks: str) -> None:
    head = "m,n,k,trans_a,trans_b,type_a,type_b,type_d,lda,ldb,ldd,ranks\n"
    row = f'4,4,4,N,N,float32,float32,float32,4,4,4,"{ranks}"\n'
    with pytest.raises(TableError, match=r":2: column ranks: .* is no list of ranks"):
        table.parse(head + row, Shape)


@pytest.mark.parametrize(
    ("key", "value"),
    [("threads", "many"), ("threads", 0), ("machine", 5), ("backend", 7), ("command", [1])],
)
def test_a_provenance_that_no_stage_could_use_is_a_fault(key: str, value: object) -> None:
    head = "m,n,k,trans_a,trans_b,type_a,type_b,type_d,lda,ldb,ldd\n"
    text = head + "# gemmtune " + json.dumps({key: value}) + "\n"
    with pytest.raises(TableError, match=f":2: {key} in the provenance cannot be"):
        table.parse(text, Shape)
