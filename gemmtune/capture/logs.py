"""GEMMs from logs and tables that other tools write: reads files, yields the rows of shapes.csv.

Each line is recognised by itself, so kinds may be mixed in a file and files be rotated; files are
read line by line. A line of a known kind that cannot be read whole gives no row: it is counted,
and the first ones are kept with their reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gemmtune.capture import nvte, trace
from gemmtune.dialects import hipblaslt, override, te, tunableop
from gemmtune.dialects.convert import tuned_of
from gemmtune.errors import UsageError
from gemmtune.gemm import LAYOUT_PASSES, Gemm
from gemmtune.table import LARGEST, Shape

KINDS = (
    "cuBLASLt or hipBLASLt trace lines (CUBLASLT_LOG_LEVEL=2), hipblaslt-bench command lines"
    " (HIPBLASLT_LOG_MASK=32), its YAML (mask 64), hipBLASLt tuning files, NVTE_LOG_GEMM_CONFIG=1"
    " lines, PyTorch TunableOp files, Transformer Engine's algorithm CSVs"
)
LONGEST = 1 << 20  # bytes of a line; a longer one is no log line
MOST_WRAPPED = 64  # lines that a launch may be wrapped into
KEPT = 5  # lines that could not be read, shown

_BENCH = re.compile(r"(?:^|[\s/])hipblaslt-bench\s+(-.*)")
_PROFILE = re.compile(r"^\s*-?\s*(\{\s*function\s*:.*)")
_LIBRARY = re.compile(r"\[(cublasLt|HIPBLASLT)\]")
_TE_ROW = re.compile(r"[0-9]+(,[0-9]+){3},[NT],[NT],")


class Unread(NamedTuple):
    """A line that was not read, and why."""

    file: str
    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: not read: {self.reason}: {self.text[:80]!r}"


class Reader:
    """Collects the GEMMs of files; every line is counted once.

    `kinds`: lines that gave GEMMs, by kind. `other`: lines without a GEMM. `unread`: how many could
    not be read, `shown` the first of them. `uncounted`: GEMMs of tables, which say no calls.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[Gemm, str], float] = {}
        self.kinds: dict[str, int] = {}
        self.other = self.unread = self.uncounted = self.lines = 0
        self.shown: list[Unread] = []
        self._begin("")

    def _begin(self, file: str) -> None:
        self._file = file
        self._columns: tuple[str, ...] | None = None
        self._dialect: str | None = None
        self._launch: tuple[int, str, list[str]] | None = None
        self._numbering: str | None = None
        self._open: list[tuple[int, str, dict[str, str]]] = []  # TE lines that wait for it

    def read(self, path: str) -> None:
        """Read a file. Raises UsageError where it cannot be opened."""
        self._begin(path)
        number = 0
        try:
            for number, line in _lines(path):
                self.lines += 1
                if line is None:
                    self._end_launch()
                    self._fail(number, "a line of more than a megabyte", "")
                elif line.endswith("\n"):
                    self._line(number, line.rstrip("\r\n"))
                else:
                    self._last(number, line)
        except OSError as e:
            raise UsageError(f"cannot read {path}: {e.strerror}") from None
        self._end_launch()
        for at, text, fields in self._open:
            known = [self._numbering] if self._numbering else list(nvte.NUMBERINGS)
            self._take(at, text, "NVTE line", lambda f=fields, k=known: [nvte.gemm(f, k)])  # type: ignore[misc]
        self._open = []

    def shapes(self, steps: float = 1.0) -> list[Shape]:
        """The rows, in the order first seen. `steps`: optimizer steps that the files cover."""
        return [
            Shape(gemm, pass_, calls=min(count / steps, LARGEST))
            for (gemm, pass_), count in self.calls.items()
        ]

    def _last(self, number: int, line: str) -> None:
        """A last line without its end may have been cut anywhere."""
        if self._launch and trace.whole(self._launch[2][-1]):
            self._end_launch()
        unread, kinds, calls = self.unread, dict(self.kinds), dict(self.calls)
        self._line(number, line)
        self._end_launch()
        if self.kinds != kinds and self.unread == unread:
            self.kinds, self.calls = kinds, calls
            self._fail(number, "the file ends inside this line (end it if it is whole)", line)

    def _line(self, number: int, line: str) -> None:
        begun = trace.start(line)
        if self._launch and not begun and self._continues(line):
            self._launch[2].append(line)
            return
        self._end_launch()
        if begun:
            self._launch = (number, begun[0], [begun[1]])
        elif _LIBRARY.search(line):
            self.other += 1
        elif found := _BENCH.search(line):
            options = found[1]
            self._take(number, line, "hipblaslt-bench line", lambda: _bench(options))
        elif found := _PROFILE.match(line):
            self._profile(number, line, found[1])
        elif nvte.is_line(line):
            self._nvte(number, line)
        elif tunableop.is_line(line):
            if line.startswith("Validator,"):
                self.other += 1
            else:
                self._table(number, line, "TunableOp row", lambda: tunableop.gemm(line))
        else:
            self._table_line(number, line)

    def _table_line(self, number: int, line: str) -> None:
        if (columns := override.header(line)) is not None:
            self._columns = columns
            self.other += 1
        elif override.is_row(line):
            names = self._columns
            self._table(
                number,
                line,
                "hipBLASLt tuning row",
                lambda: hipblaslt.gemm(override.fields(line, names)),
            )
        elif (dialect := te.detect(line)) is not None:
            self._dialect = dialect
            self.other += 1
        elif _TE_ROW.match(line.strip()):
            self._table(number, line, "TE table row", lambda: _te(line, self._dialect))
        else:
            self.other += 1

    def _continues(self, line: str) -> bool:
        assert self._launch is not None
        parts = self._launch[2]
        if trace.whole(parts[-1]) or len(parts) >= MOST_WRAPPED:
            return False
        others = (_LIBRARY.search, _BENCH.search, _PROFILE.match, nvte.is_line, tunableop.is_line)
        return ("=" in line or "]" in line) and not any(other(line) for other in others)

    def _end_launch(self) -> None:
        if self._launch:
            number, function, parts = self._launch
            self._launch = None
            unread = self.unread
            self._take(number, parts[0], "trace line", lambda: [trace.gemm(function, parts)])
            self.other += 0 if self.unread > unread else len(parts) - 1
            self.unread += len(parts) - 1 if self.unread > unread else 0

    def _nvte(self, number: int, line: str) -> None:
        try:
            fields = nvte.fields(line)
            possible = nvte.numberings(fields) if "A_type" in fields else []
            if len(possible) == 1:
                self._numbering = self._numbering or possible[0]
            else:
                nvte.gemm(fields, possible)  # the same whichever it is
        except ValueError as e:
            if "no line tells which" in str(e):
                self._open.append((number, line, fields))
            else:
                self._fail(number, str(e), line)
            return
        self._take(number, line, "NVTE line", lambda: [nvte.gemm(fields, possible)])

    def _profile(self, number: int, line: str, text: str) -> None:
        count = 1.0

        def gemms() -> list[Gemm]:
            nonlocal count
            fields = hipblaslt.profile(text)
            calls = fields.get("call_count", "")
            if not re.fullmatch("[0-9]{1,15}", calls):
                raise ValueError(f"call_count is {calls!r}")
            count = float(calls)
            return [hipblaslt.gemm(fields)]

        self._take(number, line, "hipBLASLt profile line", gemms, lambda: count)

    def _table(self, number: int, line: str, kind: str, gemm: Callable[[], Gemm]) -> None:
        before = self.kinds.get(kind, 0)
        self._take(number, line, kind, lambda: [gemm()])
        self.uncounted += self.kinds.get(kind, 0) - before

    def _take(
        self,
        number: int,
        line: str,
        kind: str,
        gemms: Callable[[], list[Gemm]],
        count: Callable[[], float] = lambda: 1.0,
    ) -> None:
        try:
            found = gemms()
        except ValueError as e:
            self._fail(number, str(e), line)
            return
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        for gemm in found:
            key = gemm, pass_of(gemm, dense=kind in ("NVTE line", "TE table row"))
            self.calls[key] = self.calls.get(key, 0.0) + count()

    def _fail(self, number: int, reason: str, line: str) -> None:
        self.unread += 1
        if len(self.shown) < KEPT:
            self.shown.append(Unread(self._file, number, reason, line.strip()))


def pass_of(gemm: Gemm, dense: bool = False) -> str:
    """The pass, where the call leaves no doubt: by its epilogue, and for what Transformer Engine's
    linear layers launch (`dense`) by the transposes, which FP8 does not have; else "other"."""
    by_epilogue = {
        "bias": "fprop",
        "geluaux": "fprop",
        "geluauxbias": "fprop",
        "dgelu": "dgrad",
        "dgelubgrad": "dgrad",
        "bgradb": "wgrad",
    }
    if gemm.epi in by_epilogue:
        return by_epilogue[gemm.epi]
    if dense and not gemm.fp8:
        return LAYOUT_PASSES.get(gemm.trans_a + gemm.trans_b, "other")
    return "other"


def _bench(text: str) -> list[Gemm]:
    if "hipblaslt-bench" in text:
        raise ValueError("two lines in one")
    groups = hipblaslt.command(text)
    if len(groups) == 1:
        return [hipblaslt.gemm(groups[0])]
    # Empty groups launch nothing.
    some = [group for group in groups if "0" not in (group.get("m"), group.get("n"))]
    return [hipblaslt.gemm(group, api="grouped_mm") for group in some]


def _te(line: str, dialect: str | None) -> Gemm:
    cells = te.split(line)[1]
    dialect = dialect or next((d for d, c in te.COLUMNS.items() if len(c) == len(cells)), None)
    if dialect is None or len(cells) < len(te.COLUMNS[dialect]):
        raise ValueError(f"{len(cells)} cells: no row of Transformer Engine's")
    values = {}
    for column, cell in zip(te.COLUMNS[dialect], cells, strict=False):
        field = te.FIELD_OF.get(column, column)
        try:
            values[field] = te.value(field, cell)
        except ValueError as e:
            raise ValueError(f"{column}={cell[:40]!r} {e}") from None
    return hipblaslt.sound(tuned_of(te.Row(**values)._replace(aux_type="-")).gemm)


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str | None]]:
    """The lines with their numbers; None for one that is too long to be read."""
    with open(path, "rb") as f:
        number = 0
        while data := f.readline(LONGEST):
            number += 1
            if len(data) < LONGEST or data.endswith(b"\n"):
                yield number, data.decode("utf-8", "replace")
                continue
            while data and not data.endswith(b"\n"):
                data = f.readline(LONGEST)
            yield number, None
