"""Transformer Engine's algorithm CSV (ROCm fork): its dialects, names and rows; read and write.

TE loads such a file from TE_HIPBLASLT_ALGO_LOAD. Line 1 names the dialect and must be byte-exact;
then one row a line; blank lines and `#` lines are skipped, so a table is kept here as its lines,
and one that is read and written again is the same to the byte. Sources: rocm_gemm.cu of
ROCm/TransformerEngine (te-v1, te-v2) and one published file (te-v3). docs/te-csv.md has it all.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from gemmtune.errors import TableError
from gemmtune.gemm import EPILOGUES, FP8_TYPES
from gemmtune.table import Tuned, read_provenance, split_lines

TYPES = ("float32", "float16", "bfloat16", *FP8_TYPES)
BLANKS = " \t\n\r\f\v"  # what TE strips from a row
ALGO_LOAD, ALGO_SAVE = "TE_HIPBLASLT_ALGO_LOAD", "TE_HIPBLASLT_ALGO_SAVE"  # TE's variables

_KEY = ("dev_cap", "m", "n", "k", "trans_a", "trans_b", "type_a", "type_b", "type_d", "bias_type")
_LD = ("lda", "ldb", "ldd")
_WS = ("ws_min", "ws_max", "algo_id", "aidx")

COLUMNS: dict[str, tuple[str, ...]] = {
    "te-v1": (*_KEY, *_LD, "epi", "comp", "scale", *_WS),
    "te-v2": (*_KEY, *_LD, "fp8_scale", "epi", "comp", "scale", *_WS),
    "te-v3": (*_KEY, "aux_type", *_LD, "scale_mode", "epi", "comp", "scale_type", *_WS),
}
HEADERS = {dialect: ",".join(columns) for dialect, columns in COLUMNS.items()}
# Of its key what every other source of a GEMM says too, and in the same words.
SAID = (*_KEY[1:-1], *_LD, "epi")
# Columns that are not named as the field of Row that they fill.
FIELD_OF = {"fp8_scale": "scale_mode", "scale_type": "scale"}


class Row(NamedTuple):
    """A row of any dialect. All fields but the last four are TE's key."""

    dev_cap: int
    m: int
    n: int
    k: int
    trans_a: str
    trans_b: str
    type_a: str
    type_b: str
    type_d: str
    bias_type: str
    lda: int
    ldb: int
    ldd: int
    epi: str
    comp: str
    scale: str
    ws_min: int
    ws_max: int
    algo_id: int
    aidx: int
    scale_mode: int = 0
    aux_type: str = "-"

    @property
    def key(self) -> tuple[Any, ...]:
        """What TE looks a row up by, beside the workspace."""
        return (*self[:16], self.scale_mode, self.aux_type)

    @property
    def fp8(self) -> bool:
        return self.type_a in FP8_TYPES or self.type_b in FP8_TYPES


NAMES: dict[str, tuple[str, ...]] = {
    "trans_a": ("N", "T"),
    "trans_b": ("N", "T"),
    "type_a": TYPES,
    "type_b": TYPES,
    "type_d": TYPES,
    "bias_type": ("-", *TYPES),
    "aux_type": ("-", *TYPES),
    "epi": EPILOGUES,
    "comp": ("f32",),
    "scale": TYPES,  # known, though every other than float32 is skipped
}
DIMENSIONS = ("m", "n", "k", *_LD)
# Bits of the integer types that TE reads into.
_LIMITS = {"ws_min": 2**64, "ws_max": 2**64, "algo_id": 2**63}


def value(field: str, text: str) -> Any:
    """A cell's value as TE reads it. Raises ValueError where TE reads something else, or throws."""
    if field in NAMES:
        if text not in NAMES[field]:
            raise ValueError("is no name that TE knows here")
        return text
    if not (digits := re.fullmatch("[+]?0*([0-9]+)", text.strip(BLANKS))):
        raise ValueError("is not a whole number from 0 up")
    if len(digits[1]) > 20 or int(digits[1]) >= _LIMITS.get(field, 2**31):
        raise ValueError("is too large")
    return int(digits[1])


class Line(NamedTuple):
    """A line with its end; `row` is None for the header, comments and blank lines."""

    text: str
    row: Row | None = None


class Document(NamedTuple):
    """A TE table, line by line."""

    dialect: str
    lines: list[Line]

    @property
    def rows(self) -> list[Row]:
        return [line.row for line in self.lines if line.row is not None]

    @property
    def provenance(self) -> dict[str, Any]:
        """What the `# gemmtune {json}` lines say."""
        return read_provenance(write(self))[0]


def detect(text: str) -> str | None:
    """The dialect whose header is line 1, to the byte; None where TE would ignore the file."""
    first = text.split("\n", 1)[0]
    return next((d for d, header in HEADERS.items() if header == first), None)


def is_row(line: str) -> bool:
    """Whether TE takes a line after the header for a row."""
    body = line.strip(BLANKS)
    return bool(body) and not body.startswith("#")


def split(line: str) -> tuple[str, list[str], str]:
    """The blanks before a row, its cells as they stand, and the blanks and line end after it."""
    body = line.strip(BLANKS)
    start = line.index(body)
    return line[:start], body.split(","), line[start + len(body) :]


def read(text: str, name: str = "table") -> Document:
    """Read a TE table. Raises TableError with file, line, column and value.

    Whether TE would use what it reads is another question: see lint.
    """
    dialect = detect(text)
    if dialect is None:
        raise TableError(f"{name}:1: not a header of {', '.join(HEADERS)}: gemmtune check {name}")
    lines = []
    for number, line in enumerate(split_lines(text), 1):
        if number == 1 or not is_row(line):
            lines.append(Line(line))
            continue
        columns = COLUMNS[dialect]
        cells = split(line)[1]
        values = {}
        for column, cell in zip(columns, cells, strict=False):
            field = FIELD_OF.get(column, column)
            try:
                values[field] = value(field, cell)
            except ValueError as e:
                raise TableError(f"{name}:{number}: column {column}: {cell!r} {e}") from None
        if len(cells) < len(columns):
            missing = columns[len(cells)]
            raise TableError(f"{name}:{number}: the row ends before column {missing}")
        lines.append(Line(line, Row(**values)))
    return Document(dialect, lines)


def write(document: Document) -> str:
    """The text of a table: its lines as they stand."""
    return "".join(line.text for line in document.lines)


def te_row(row: Tuned) -> Tuned:
    """A row that says the algorithm's need (ws_min) and rank (aidx), as TE keeps it in memory.

    A row that is exactly right TE looks up anew at every GEMM: it stores in memory only what it had
    to put right, ws_min or aidx (rocm_gemm.cu, GemmAlgoCache). So ws_min is 0 where the need is
    above, else aidx is one more than the rank: TE's search starts there and wraps round. A TE that
    takes ids directly puts only ws_min right, and looks a row without a need up at every GEMM.
    """
    if row.ws_min:
        return row._replace(ws_min=0)
    return row._replace(algo=row.algo._replace(aidx=row.algo.aidx + 1))


def line_of(row: Row, dialect: str) -> Line:
    """A new line for a row. Raises ValueError where the dialect cannot say it."""
    cells = [str(getattr(row, FIELD_OF.get(c, c))) for c in COLUMNS[dialect]]
    if reason := inexpressible(row, dialect):
        raise ValueError(reason)
    return Line(",".join(cells) + "\n", row)


def inexpressible(row: Row, dialect: str) -> str:
    """Why the columns of a dialect cannot hold a row; "" where they can."""
    fields = {FIELD_OF.get(c, c) for c in COLUMNS[dialect]}
    if row.scale_mode != 0 and "scale_mode" not in fields:
        return f"{dialect} has no scale mode, and this row's is {row.scale_mode}"
    if row.aux_type != "-" and "aux_type" not in fields:
        return f"{dialect} has no aux_type, and this row's is {row.aux_type}"
    return ""


def recast(line: Line, source: str, target: str) -> Line:
    """A row's line in another dialect: columns put in or taken out, all else as it stands.

    Raises ValueError where the target cannot say it.
    """
    if line.row is None or source == target:
        return line
    if reason := inexpressible(line.row, target):
        raise ValueError(reason)
    before, cells, after = split(line.text)
    have = {FIELD_OF.get(c, c): cell for c, cell in zip(COLUMNS[source], cells, strict=False)}
    have = {"scale_mode": "0", "aux_type": "-", **have}
    new = [have[FIELD_OF.get(c, c)] for c in COLUMNS[target]]
    extra = cells[len(COLUMNS[source]) :]
    return Line(before + ",".join(new + extra) + after, line.row)
