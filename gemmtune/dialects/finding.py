"""One fault of a table, as check reports it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ERROR = "error"  # a table or row is refused, ignored, misread or never used: check exits with 1
WARNING = "warning"  # worth knowing; the table is used


class Finding(NamedTuple):
    """What is wrong where; `effect` is what Transformer Engine would do, `mend` what to do."""

    line: int
    column: str  # the column's name; "" for a whole line
    value: str
    severity: str
    effect: str
    mend: str

    def __str__(self) -> str:
        where = f"{self.column}={self.value[:60]!r}: " if self.column else ""
        return f"{self.severity}: {where}{self.effect}. {self.mend}."


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(f.severity == ERROR for f in findings)
