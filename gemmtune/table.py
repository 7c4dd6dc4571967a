"""The tables shapes.csv, candidates.csv and tuned.csv: read, write, append, merge.

A table is a header line, `# gemmtune {json}` provenance lines, then rows; other `#` lines and blank
lines are skipped. Columns are found by name, so a hand-made file may leave out those that have a
default. Writes are atomic (temporary file, fsync, rename); appends are fsynced, and a torn last
line, as a kill leaves it, is dropped when the table is read.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from gemmtune.errors import TableError, UsageError
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


class Shape(NamedTuple):
    """What the job ran: a Gemm, where, how often (`calls` per optimizer step on one rank)."""

    gemm: Gemm
    pass_: str = "other"
    recompute: int = 0
    site: str = ""
    calls: float = 1.0
    step: int = 0  # first optimizer step in which it was seen, counted from 0
    ranks: str = "0"  # ranks that ran it: "0-7", "0,2"
    time_us: float = 0.0  # mean time of a call in the job; 0 where it was not measured


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


def _own(cls: type[Any]) -> tuple[str, ...]:
    return tuple(_RENAMED.get(f, f) for f in cls._fields if f not in ("gemm", "algo"))


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
    values = {"aidx": 0, "bias_type": "-", "ws_min": 0, "ws_max": 2**63 - 1}
    for part in (Gemm, cls):
        values |= {_RENAMED.get(k, k): v for k, v in part._field_defaults.items()}
    return values


def _cell(name: str, text: str) -> Any:
    """The value of one cell. Raises ValueError with what is wrong."""
    if name in _INTS:
        value = int(text) if text.lstrip("-").isdigit() else None
        if value is None:
            raise ValueError("is not a whole number")
        if value < 0 and name in INT_FIELDS:
            raise ValueError("is negative")
        return value
    if name in _FLOATS:
        number = float(text)
        if not 0 <= number < float("inf"):
            raise ValueError("is not a number from 0 up")
        return number
    if name in _ENUMS and text not in _ENUMS[name]:
        raise ValueError(f"is none of {' '.join(_ENUMS[name])}")
    return text


def _build(cls: type[Row], cells: Mapping[str, Any]) -> Row:
    parts: dict[str, Any] = {"gemm": Gemm(*(cells[k] for k in KEY))}
    if "algo" in cls._fields:
        parts["algo"] = Algo(*(cells[k] for k in Algo._fields))
    own = {f: cells[_RENAMED.get(f, f)] for f in cls._fields if f not in parts}
    return cls(**parts, **own)


def _format(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _line(row: Shape | Candidate | Tuned) -> str:
    cells = {_RENAMED.get(k, k): v for k, v in row._asdict().items()}
    cells |= cells.pop("gemm")._asdict()
    if "algo" in cells:
        cells |= cells.pop("algo")._asdict()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(_format(cells[c]) for c in COLUMNS[type(row)])
    return text.getvalue()


def read(path: str | os.PathLike[str], cls: type[Row]) -> Table[Row]:
    """Read a table of `cls` (Shape, Candidate or Tuned).

    Raises UsageError where there is no such file, TableError with file, line, column and value.
    """
    return parse(read_text(path), cls, name=str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a table file, line ends and all. Raises UsageError or TableError."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise TableError(f"{path}: byte {e.start} is not UTF-8: is this a CSV file?") from None
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from None


def parse(text: str, cls: type[Row], name: str = "table") -> Table[Row]:
    """Parse the text of a table; see `read`."""
    rows: list[Row] = []
    provenance: dict[str, Any] = {}
    header: list[str] | None = None
    defaults = _defaults(cls)
    lines = text.removeprefix("\ufeff").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        if line.startswith(PROVENANCE):
            try:
                provenance |= json.loads(line.removeprefix(PROVENANCE))
            except (ValueError, TypeError):
                raise TableError(f"{where}: the provenance comment is not JSON") from None
            continue
        if not line.strip() or line.startswith("#"):
            continue
        if header is None:
            header = [c.strip() for c in line.strip().split(",")]
            _check_header(header, cls, where)
            continue
        if number == len(lines) and not line.endswith("\n") and cls is Candidate:
            break  # an append that a kill cut short; whoever appends next starts that row afresh
        cells = next(csv.reader([line.rstrip("\r\n")]))
        if len(cells) != len(header):
            raise TableError(f"{where}: {len(cells)} cells where the header has {len(header)}")
        values = dict(defaults)
        for column, cell in zip(header, cells, strict=True):
            try:
                values[column] = _cell(column, cell.strip())
            except ValueError as e:
                raise TableError(f"{where}: column {column}: {cell!r} {e}") from None
        rows.append(_build(cls, values))
    if header is None:
        raise TableError(f"{name}: empty: expected a header line {','.join(COLUMNS[cls][:4])},…")
    return Table(rows, provenance)


def _check_header(header: list[str], cls: type[Any], where: str) -> None:
    known = COLUMNS[cls]
    kind = f"a {cls.__name__.lower()} table"
    if unknown := [c for c in header if c not in known]:
        raise TableError(f"{where}: unknown column {unknown[0]!r} for {kind}")
    if missing := [c for c in known if c in _REQUIRED and c not in header]:
        raise TableError(f"{where}: column {missing[0]!r} is missing for {kind}")
    if len(set(header)) != len(header):
        raise TableError(f"{where}: a column stands twice")


def render(rows: Iterable[Row], cls: type[Row], provenance: Mapping[str, Any]) -> str:
    """The text of a table."""
    head = ",".join(COLUMNS[cls]) + "\n"
    note = PROVENANCE + json.dumps(dict(provenance), sort_keys=True) + "\n" if provenance else ""
    return head + note + "".join(_line(row) for row in rows)


def write(
    path: str | os.PathLike[str],
    rows: Iterable[Row],
    cls: type[Row],
    provenance: Mapping[str, Any],
) -> None:
    """Write a table atomically. Raises UsageError where the folder cannot be written."""
    write_text(path, render(rows, cls, provenance))


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise UsageError if `write` to this path would fail, before the work that leads to it."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: name a file in a folder that you may write to")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically: temporary file beside it, fsync, rename. Raises UsageError."""
    target = Path(path)
    try:
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as e:
        raise UsageError(f"cannot write {target}: {e.strerror} ({target.parent})") from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as f:
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(fd, 0o666 & ~umask)
            f.write(text)
            f.flush()
            os.fsync(fd)
        os.replace(temporary, target)
    except OSError as e:
        Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"cannot write {target}: {e.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append(path: str | os.PathLike[str], rows: Iterable[Shape | Candidate | Tuned]) -> None:
    """Append rows to a table and fsync. A torn last line of an earlier append is cut off first."""
    text = "".join(_line(row) for row in rows)
    try:
        with open(path, "r+b") as f:
            content = f.read()
            f.seek(content.rfind(b"\n") + 1)
            f.truncate()
            f.write(text.encode())
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UsageError(f"cannot append to {path}: {e.strerror}") from None


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
