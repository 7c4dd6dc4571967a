"""docs/te-csv.md: what it says that check says is what check says."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

from gemmtune import table
from gemmtune.dialects import te
from gemmtune.dialects.lint import lint
from gemmtune.table import Tuned

TEXT = (ROOT / "docs" / "te-csv.md").read_text()
HEADER = te.HEADERS["te-v1"] + "\n"
TYPES = "bfloat16,bfloat16,bfloat16,-", "float8e4m3,float8e5m2,bfloat16,float32"
ROWS = [
    f"904,6144,8192,4096,T,N,{types},4096,4096,6144,-,f32,float32,0,33554432,251711,4\n"
    for types in TYPES
]
GOOD = HEADER + ROWS[0]
FILES = {
    "has Windows line ends": GOOD.replace("\n", "\r\n"),
    "begins with a byte-order mark": "\ufeff" + GOOD,
    "has a blank at the end of line 1": GOOD.replace("aidx", "aidx "),
    "has a comment above the header": "# tuned\n" + GOOD,
    "is empty": "",
    "is another dialect than `--dialect`": te.HEADERS["te-v2"] + "\n",
    "is tuned.csv as gemmtune writes it": table.render([], Tuned, {}),
    "is two files, one after the other": GOOD + GOOD,
    "ends without a line end": GOOD.rstrip("\n"),
    "holds a NUL byte": GOOD.replace("float32", "float32\0"),
    "has a header alone": HEADER,
}


def rows_of(heading: str) -> list[tuple[str, str]]:
    """The rows of the table under a heading row."""
    body = TEXT.split(f"| {heading} | `check` says |\n|---|---|\n")[1].split("\n\n")[0]
    return [(a, b) for a, b in re.findall(r"^\| (.*?) \| (.*) \|$", body, re.MULTILINE)]


def test_the_good_rows_are_clean() -> None:
    assert [f for row in ROWS for f in lint((HEADER + row).encode())] == []


@pytest.mark.parametrize(("file", "says"), rows_of("the file"))
def test_check_says_this_of_such_a_file(file: str, says: str) -> None:
    dialect = "te-v1" if "--dialect" in file else None
    assert says in "\n".join(map(str, lint(FILES[file].encode(), dialect)))
    assert set(FILES) == {name for name, _ in rows_of("the file")}


@pytest.mark.parametrize(("row", "says"), rows_of("the row has"))
def test_check_says_this_of_such_a_row(row: str, says: str) -> None:
    column, _, value = row.split("`")[1].partition("=")
    cells = ROWS[row.startswith("FP8")].rstrip("\n").split(",")
    cells[te.COLUMNS["te-v1"].index(column)] = value
    found = [str(f) for f in lint((HEADER + ",".join(cells) + "\n").encode())]
    assert any(line.startswith(says) for line in found), found


def test_the_headers_are_those_that_are_read() -> None:
    for dialect, header in te.HEADERS.items():
        assert re.search(rf"\| {dialect} \| .* \| `{header}` \|", TEXT)
