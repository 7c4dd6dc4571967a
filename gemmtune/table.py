"""The tables shapes.csv, candidates.csv and tuned.csv: read and write.

A table is a header line, `# gemmtune {json}` provenance lines, then rows, each on one line; other
`#` lines and blank lines are skipped. Columns are found by name, so a hand-made file may leave out
those that have a default. Whatever is written can be read: a value that could not be is refused.
Times and ratios are written with six digits, everything else exactly. Writes are atomic (temporary
file, fsync, rename).
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from gemmtune import textfile
from gemmtune.errors import TableError
from gemmtune.gemm import (
    COMPUTE_TYPES,
    EPILOGUES,
    INT_FIELDS,
    KEY,
    PASSES,
    TYPE_BYTES,
    Algo,
    Gemm,
)

PROVENANCE = "# gemmtune "
WS_MAX = 2**63 - 1  # ws_max where an algorithm may have any workspace


class Shape(NamedTuple):
    """What the job ran: a Gemm, where, how often (`calls` per optimizer step on one rank)."""

    gemm: Gemm
    pass_: str = "other"
    recompute: int = 0
    site: str = ""
    calls: float = 1.0
    step: int = 0  # first of the recorded steps in which it was seen, counted from 0
    ranks: str = "0"  # ranks that ran it: "0-7", "0,2"
    time_us: float = 0.0  # mean time of a call in the job; 0 where it was not measured
    default: str = ""  # configuration that the job's own call was given, where the API shows it


class Candidate(NamedTuple):
    """What a sweep found out about an algorithm. `ratio`: default time / its (above 1: faster)."""

    gemm: Gemm
    algo: Algo
    status: str  # ok | failed | dropped | finalist | winner | default
    reason: str = ""
    time_us: float = 0.0
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    samples: int = 0
    regime: str = ""  # how time_us was measured: screen | sustained


class Tuned(NamedTuple):
    """A row that a job can use: for this Gemm, launch this algorithm when the workspace fits."""

    dev_cap: int
    gemm: Gemm
    ws_min: int
    ws_max: int
    algo: Algo
    time_us: float = 0.0
    default_us: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0

    def overlaps(self, other: Tuned) -> bool:
        """Whether some workspace fits both rows."""
        return self.ws_min <= other.ws_max and self.ws_max >= other.ws_min


Row = TypeVar("Row", Shape, Candidate, Tuned)

_TE_KEY = KEY[: KEY.index("beta")]
_RENAMED = {"pass_": "pass"}
_ENUMS: dict[str, Sequence[str]] = {
    "trans_a": ("N", "T"),
    "trans_b": ("N", "T"),
    "type_a": tuple(TYPE_BYTES),
    "type_b": tuple(TYPE_BYTES),
    "type_d": tuple(TYPE_BYTES),
    "bias_type": ("-", *TYPE_BYTES),
    "epi": EPILOGUES,
    "comp": COMPUTE_TYPES,
    "pass": PASSES,
}
_INTS = INT_FIELDS | {*Algo._fields[:2], "dev_cap", "ws_min", "ws_max", "samples", "step"}
_INTS |= {"recompute"}
_FLOATS = {"calls", "time_us", "default_us", "ratio", "ratio_low", "ratio_high"}
_REQUIRED = {
    *("m", "n", "k", "trans_a", "trans_b", "type_a", "type_b", "type_d", "lda", "ldb", "ldd"),
    *("algo_id", "config", "status", "dev_cap"),
}


# No more than that: float() takes 1_000, nan and other scripts' digits.
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"


LARGEST = 1e18  # of a time, a count of calls or a ratio: sums and products of such stay finite
_MOST_RANKS = 1 << 20
# What other stages read from a provenance, by the JSON types that it may have.
_PROVENANCE_TYPES: dict[str, tuple[type[Any], ...]] = {
    "threads": (int,),
    "ranks": (int,),
    "ranks_per_node": (int,),
    "machine": (dict,),
    "backend": (str,),
    "device": (str,),
    "command": (str, list),
}


def _ranks_fit(text: str) -> bool:
    if not re.fullmatch(r"[0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*", text):
        return False
    parts = [part.partition("-") for part in text.split(",")]
    return all(int(a) <= int(b or a) < _MOST_RANKS for a, _, b in parts)


def _own(cls: type[Any]) -> tuple[str, ...]:
    return tuple(_RENAMED.get(f, f) for f in cls._fields if f not in ("gemm", "algo"))


MADE_BY: dict[type[Any], str] = {
    Shape: "gemmtune capture writes one (shapes.csv)",
    Candidate: "gemmtune sweep writes one (candidates.csv)",
    Tuned: "gemmtune sweep writes one (tuned.csv)",
}
COLUMNS: dict[type[Any], tuple[str, ...]] = {
    Shape: (*KEY, *_own(Shape)),
    Candidate: (*KEY, *Algo._fields, *_own(Candidate)),
    # TE's twenty columns first (te-v1), then ours.
    Tuned: (
        "dev_cap",
        *_TE_KEY,
        *("ws_min", "ws_max", "algo_id", "aidx"),
        *KEY[len(_TE_KEY) :],
        "config",
        *_own(Tuned)[3:],
    ),
}


class Table(NamedTuple, Generic[Row]):
    """Rows and what is known of their making (`provenance`, JSON values by name)."""

    rows: list[Row]
    provenance: dict[str, Any]


def _defaults(cls: type[Any]) -> dict[str, Any]:
    values = {"aidx": 0, "bias_type": "-", "ws_min": 0, "ws_max": WS_MAX}
    for part in (Gemm, cls):
        values |= {_RENAMED.get(k, k): v for k, v in part._field_defaults.items()}
    return values


def _cell(name: str, text: str) -> Any:
    """The value of one cell. Raises ValueError with what is wrong."""
    if name in _INTS:
        # int() would take other scripts' digits and balk at thousands of them.
        if not re.fullmatch("-?[0-9]{1,20}", text):
            raise ValueError("is not a whole number")
        value = int(text)
        low = -(2**63) if name in ("algo_id", "aidx") else 0
        high = 2**64 if name in ("ws_min", "ws_max") else 2**63
        if value < low:
            raise ValueError("is negative" if low == 0 else "is too small")
        if value >= high:
            raise ValueError("is too large")
        return value
    if name in _FLOATS:
        number = float(text) if re.fullmatch(_NUMBER, text) else -1.0
        if not 0 <= number < float("inf"):
            raise ValueError("is not a number from 0 up")
        if number > LARGEST:
            raise ValueError("is too large")
        return number
    if name == "ranks" and not _ranks_fit(text):
        raise ValueError("is no list of ranks such as 0-7,9")
    if name in _ENUMS and text not in _ENUMS[name]:
        raise ValueError(f"is none of {' '.join(_ENUMS[name])}")
    return text


def _build(cls: type[Row], cells: Mapping[str, Any]) -> Row:
    parts: dict[str, Any] = {"gemm": Gemm(*(cells[k] for k in KEY))}
    if "algo" in cls._fields:
        parts["algo"] = Algo(*(cells[k] for k in Algo._fields))
    own = {f: cells[_RENAMED.get(f, f)] for f in cls._fields if f not in parts}
    return cls(**parts, **own)


def _format(name: str, value: Any) -> str:
    """The text of one cell. Raises ValueError where it could not be read again."""
    if name in _INTS:
        text = str(int(value))
    elif name == "calls":  # FLOPs are counted with it: exact
        text = repr(float(value)).removesuffix(".0")
    elif name in _FLOATS:
        text = f"{value:.6g}"
    else:  # one row, one line: a message of several lines is joined
        text = re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", str(value)).strip()
    _cell(name, text)
    return text


def line(row: Shape | Candidate | Tuned) -> str:
    """A row as a line of its table. Raises TableError where a value could not be read again."""
    cells = {_RENAMED.get(k, k): v for k, v in row._asdict().items()}
    cells |= cells.pop("gemm")._asdict()
    if "algo" in cells:
        cells |= cells.pop("algo")._asdict()
    texts = []
    for name in COLUMNS[type(row)]:
        try:
            texts.append(_format(name, cells[name]))
        except (ValueError, TypeError, OverflowError) as e:
            raise TableError(f"cannot write column {name}: {cells[name]!r} {e}") from None
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(texts)
    return text.getvalue()


class Fault(NamedTuple):
    """A cell (column "" : a line) that is wrong: `reason` follows the value in a sentence."""

    line: int
    column: str
    value: str
    reason: str

    def __str__(self) -> str:
        return (f"column {self.column}: {self.value!r} " if self.column else "") + self.reason


def read(path: str | os.PathLike[str], cls: type[Row]) -> Table[Row]:
    """Read a table of `cls` (Shape, Candidate or Tuned).

    Raises UsageError where there is no such file, TableError with file, line, column and value.
    """
    return parse(textfile.read_text(path), cls, name=str(path))


def split_lines(text: str) -> list[str]:
    """The lines with their ends. Only a line feed ends a line, as for Transformer Engine."""
    return list(io.StringIO(text, newline="\n"))


def parse(text: str, cls: type[Row], name: str = "table") -> Table[Row]:
    """Parse the text of a table; see `read`."""
    rows: list[Row] = []
    for number, row in scan(text, cls):
        if isinstance(row, Fault):
            raise TableError(f"{name}:{number}: {row}")
        rows.append(row)
    provenance, faults = read_provenance(text)
    for fault in faults:
        raise TableError(f"{name}:{fault.line}: {fault}")
    return Table(rows, provenance)


def read_provenance(text: str) -> tuple[dict[str, Any], list[Fault]]:
    """What a table's provenance lines say (a later line over an earlier one)."""
    provenance: dict[str, Any] = {}
    faults = []
    lines = split_lines(text.removeprefix("\ufeff"))
    for number, text_line in enumerate(lines, 1):
        if text_line.startswith(PROVENANCE):
            try:
                value = json.loads(text_line.removeprefix(PROVENANCE))
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                provenance |= value
                faults += [Fault(number, "", "", wrong) for wrong in provenance_faults(value)]
            else:
                faults.append(Fault(number, "", "", "the provenance is not a JSON object"))
    return provenance, faults


def provenance_faults(provenance: Mapping[str, Any]) -> list[str]:
    """What other stages read from a provenance and could not use."""
    wrong = [
        f"{key} in the provenance cannot be {provenance[key]!r}"
        for key, kinds in _PROVENANCE_TYPES.items()
        if not _may_be(provenance.get(key), kinds)
    ]
    machine = provenance.get("machine")
    said = machine.get("dev_cap") if isinstance(machine, dict) else None
    if said is not None and not (type(said) is int and 0 <= said < 2**63):
        wrong.append(f"dev_cap in the provenance's machine cannot be {said!r}")
    return wrong


def _may_be(value: Any, kinds: tuple[type[Any], ...]) -> bool:
    if value is None:
        return True
    if kinds == (int,):
        return type(value) is int and 0 < value <= _MOST_RANKS
    return isinstance(value, kinds) and (
        not isinstance(value, list) or all(isinstance(word, str) for word in value)
    )


def scan(text: str, cls: type[Row]) -> Iterator[tuple[int, Row | Fault]]:
    """Every row, or what is wrong with it, with its line number. A bad header ends the scan."""
    header: list[str] | None = None
    defaults = _defaults(cls)
    lines = split_lines(text.removeprefix("\ufeff"))
    for number, text_line in enumerate(lines, 1):
        if not text_line.strip() or text_line.lstrip().startswith("#"):
            continue
        if header is None:
            header = [c.strip() for c in text_line.split(",")]
            if reason := _header_fault(header, cls):
                yield number, Fault(number, "", "", reason)
                return
            continue
        yield number, _row(text_line, number, header, defaults, cls)
    if header is None:
        reason = f"empty: expected a header line {','.join(COLUMNS[cls][:4])},…"
        yield max(len(lines), 1), Fault(max(len(lines), 1), "", "", reason)


def _row(
    text_line: str, number: int, header: list[str], defaults: Mapping[str, Any], cls: type[Row]
) -> Row | Fault:
    try:
        cells = next(csv.reader([text_line.rstrip("\r\n")], strict=True))
    except csv.Error as e:
        return Fault(number, "", "", f"not a CSV row ({e})")
    if len(cells) != len(header):
        return Fault(number, "", "", f"{len(cells)} cells where the header has {len(header)}")
    values = dict(defaults)
    for column, cell in zip(header, cells, strict=True):
        try:
            values[column] = _cell(column, cell.strip())
        except ValueError as e:
            return Fault(number, column, cell, str(e))
    return _build(cls, values)


def _header_fault(header: list[str], cls: type[Any]) -> str:
    known = COLUMNS[cls]
    kind = f"a {cls.__name__.lower()} table"
    if unknown := [c for c in header if c not in known]:
        for other, columns in COLUMNS.items():
            if set(columns) & set(_REQUIRED) <= set(header) <= set(columns):
                what = other.__name__.lower()
                return f"this is a {what} table, and {kind} is wanted: {MADE_BY[cls]}"
        if not set(header) & set(known):
            return f"this is not {kind}: {MADE_BY[cls]}"
        return f"unknown column {unknown[0]!r} for {kind}"
    if missing := [c for c in known if c in _REQUIRED and c not in header]:
        return f"column {missing[0]!r} is missing for {kind}"
    return "a column stands twice" if len(set(header)) != len(header) else ""


def render(rows: Iterable[Row], cls: type[Row], provenance: Mapping[str, Any]) -> str:
    """The text of a table."""
    head = ",".join(COLUMNS[cls]) + "\n"
    note = PROVENANCE + json.dumps(dict(provenance), sort_keys=True) + "\n" if provenance else ""
    return head + note + "".join(line(row) for row in rows)


def write(
    path: str | os.PathLike[str],
    rows: Iterable[Row],
    cls: type[Row],
    provenance: Mapping[str, Any],
) -> None:
    """Write a table atomically. Raises UsageError where the folder cannot be written."""
    textfile.write_text(path, render(rows, cls, provenance))


def defaults(rows: Iterable[Shape]) -> dict[Gemm, str]:
    """The configuration that most of a Gemm's calls were given, where that is known."""
    calls: dict[Gemm, dict[str, float]] = {}
    for row in rows:
        if row.default:
            given = calls.setdefault(row.gemm, {})
            given[row.default] = given.get(row.default, 0.0) + row.calls
    return {gemm: max(given, key=lambda config: given[config]) for gemm, given in calls.items()}


def by_gemm(shapes: Iterable[Shape]) -> dict[Gemm, float]:
    """Calls per step of each distinct Gemm, passes and sites added up, in the order first seen.

    Where ranks differ it is the mean over all ranks that occur.
    """
    rows = list(shapes)
    world = len(set().union(*(parse_ranks(row.ranks) for row in rows)))
    calls: dict[Gemm, float] = {}
    for row in rows:
        mean = row.calls * len(parse_ranks(row.ranks)) / world
        calls[row.gemm] = calls.get(row.gemm, 0.0) + mean
    return calls


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text: {0,1,2,5} is "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranks(text: str) -> set[int]:
    """The ranks that a text of `format_ranks` names. Raises ValueError for any other text."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks
