"""GEMMs that Transformer Engine cannot tell apart, and so runs by one row of its table. Pure.

Its key has no beta: a weight gradient that accumulates and one that does not get the same
algorithm. One that is faster in the one and slower, wrong or not known in the other must not win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmtune.dialects.convert import te_of
from gemmtune.gemm import Gemm
from gemmtune.table import WS_MAX, Candidate, Tuned

KNOWN = ("default", "winner", "finalist", "dropped")


def agree(
    rows: Mapping[Gemm, list[Candidate]], calls: Mapping[Gemm, float]
) -> dict[Gemm, list[Candidate]]:
    """The rows of all Gemms, where those of one key have one winner, or none.

    Of their winners the one that saves the most time over all of them, by `calls` per step.
    """
    groups: dict[tuple[object, ...], list[Gemm]] = {}
    for gemm, found in rows.items():
        try:
            key = te_of(Tuned(1, gemm, 0, WS_MAX, found[0].algo)).key
        except ValueError:  # TE never runs it
            continue
        groups.setdefault(key, []).append(gemm)
    settled = dict(rows)
    for gemms in groups.values():
        won = {row.algo.algo_id for g in gemms for row in rows[g] if row.status == "winner"}
        saved = {a: _saved_us(a, {g: rows[g] for g in gemms}, calls) for a in won}
        best = max(saved, key=lambda a: saved[a][0], default=0)
        for gemm in gemms if len(gemms) > 1 else ():
            settled[gemm] = [_settle(row, best, saved) for row in rows[gemm]]
    return settled


def _settle(row: Candidate, best: int, saved: Mapping[int, tuple[float, str]]) -> Candidate:
    if row.status != "winner" or (row.algo.algo_id == best and saved[best][0] > 0):
        return row
    us, why = saved[row.algo.algo_id]
    why = why or ("slower there than it is faster here" if us <= 0 else "another saves more")
    reason = f"Transformer Engine runs another GEMM by the same row (beta is not in its key): {why}"
    return row._replace(status="finalist", reason=reason)


def _saved_us(
    algo_id: int, group: Mapping[Gemm, Sequence[Candidate]], calls: Mapping[Gemm, float]
) -> tuple[float, str]:
    """Microseconds per step that an algorithm saves over all, and why that is nothing."""
    total = 0.0
    for gemm, found in group.items():
        default = next((row for row in found if row.status == "default"), None)
        row = next((row for row in found if row.algo.algo_id == algo_id), None)
        beta = f"beta {gemm.beta}"
        if default is None or row is None or not row.ratio:
            if row is not None and row.reason:
                return 0.0, f"with {beta} it fails ({row.reason})"
            return 0.0, f"with {beta} it was not measured"
        if row.status not in KNOWN:
            return 0.0, f"with {beta} it fails ({row.reason})"
        total += calls.get(gemm, 1.0) * default.time_us * (1 - 1 / row.ratio)
    return total, ""
