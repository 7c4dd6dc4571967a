"""What a job used of a table: the record that each process leaves, and the line drawn from all.

Pure. Coverage is what was launched, never that a file was loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gemmtune.gemm import Gemm
from gemmtune.table import Tuned


class Use(NamedTuple):
    """One process's use of a table. `rows`: launches by the row's index, JSON's keys being text.

    `gemms`: different GEMMs that ran; `fallbacks`: calls that failed open, by reason; `graphed`:
    launches as CUDA graphs were captured; `differences` (soft) and `incompatible` (hard): how this
    machine differs from the table's.
    """

    rank: int = 0
    rows: Mapping[str, int] = {}
    gemms: int = 0
    steps: int = 0
    fallbacks: Mapping[str, int] = {}
    graphed: int = 0
    differences: Sequence[str] = ()
    incompatible: Sequence[str] = ()


def first_rows(rows: Sequence[Tuned]) -> dict[Gemm, int]:
    """The index of the row that a Gemm uses: the first whose workspace range holds the call's."""
    found: dict[Gemm, int] = {}
    for index, row in enumerate(rows):
        if row.ws_min <= row.gemm.ws_bytes <= row.ws_max:
            found.setdefault(row.gemm, index)
    return found


def summary(uses: Sequence[Use], rows: int) -> str:
    """One line: what the processes of a job used of a table of `rows` rows."""
    if not rows:
        return "the table has no rows: the job ran as it is"
    table = f"{rows} row{'' if rows == 1 else 's'}"
    if reasons := next((use.incompatible for use in uses if use.incompatible), None):
        return f"0 of {table} used: {'; '.join(reasons)}"
    failed: Counter[str] = Counter()
    for use in uses:
        failed.update(use.fallbacks)
    tail = ""
    if failed:
        reason, _ = failed.most_common(1)[0]
        tail = f"; {failed.total()} calls went through as the job made them ({reason})"
    users = [use for use in uses if use.rows]
    if not users:
        gemms = max((use.gemms for use in uses), default=0)
        if tail:
            return f"0 of {table} used{tail}"
        if gemms:
            return (
                f"0 of {table} fit this job: it ran {gemms} different GEMMs, none of the table's:"
                " capture and sweep it"
            )
        return f"0 of {table} fit this job: none of its Python processes ran a GEMM of torch here"
    used = {index for use in users for index in use.rows}
    total = sum(sum(use.rows.values()) for use in users)
    steps = sum(use.steps for use in users)
    if graphed := sum(use.graphed for use in users):
        tail = f", {graphed} of {total} as CUDA graphs were captured, which repeat them" + tail
    rate = f"{total / steps:.6g} calls per step" if steps else f"{total} calls"
    ranks = len({use.rank for use in users})
    return f"{len(used)} of {table} used, on {ranks} rank{'' if ranks == 1 else 's'}, {rate}{tail}"
