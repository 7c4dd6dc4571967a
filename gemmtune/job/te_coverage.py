"""What a job's Transformer Engine used of a table: keys that ran, joined with its rows. Pure.

That a file was loaded proves nothing, and neither does a row in what TE saves: it saves all that it
loaded. What does: the keys that the job ran, and that TE put a row right (its workspace or rank),
which it does when it has found the algorithm. Rows are written so that there is something to put
right (dialects/te.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gemmtune.dialects import te
from gemmtune.gemm import Gemm


def matches(row: te.Row, gemm: Gemm) -> bool:
    """Whether TE looks a GEMM up by the row's key, the workspace apart."""
    if any(getattr(row, name) != getattr(gemm, name) for name in te.SAID):
        return False
    if not gemm.fp8:
        return row.bias_type == "-"
    known = gemm.bias_type if gemm.bias_type != "-" else row.bias_type
    return row.bias_type == known and row.scale_mode == gemm.scale_mode


def used(rows: Sequence[te.Row], gemms: Iterable[tuple[Gemm, int]]) -> dict[int, int]:
    """Calls by the index of the row that they use: its key is theirs, and its workspace fits."""
    calls: dict[int, int] = {}
    for gemm, count in gemms:
        for index, row in enumerate(rows):
            if matches(row, gemm) and row.ws_min <= gemm.ws_bytes <= row.ws_max:
                calls[index] = calls.get(index, 0) + count
                break
    return calls


def unfit(rows: Sequence[te.Row], gemms: Sequence[Gemm], dev_caps: Iterable[int] = ()) -> str:
    """Why not one of the rows is used, in plain words."""
    table = f"0 of {len(rows)} rows fit"
    here = set(dev_caps)
    made = {row.dev_cap for row in rows}
    if here and not made & here:
        return f"{table} this GPU: they are for {_numbers(made)}, and this one is {_numbers(here)}"
    close = [(r, g) for r in rows for g in gemms if matches(r, g)]
    if close:
        row, gemm = close[0]
        return (
            f"{table} this job's workspace: {gemm.ws_bytes} bytes, and the first row is for"
            f" {row.ws_min} to {row.ws_max}"
        )
    return (
        f"{table} this job: it ran {len(set(gemms))} different GEMMs of Transformer Engine, none of"
        " the table's: capture and sweep it"
    )


def report(
    document: te.Document, records: Sequence[Mapping[str, Any]], saved: Sequence[str]
) -> list[str]:
    """Lines about a job that ran with a table: what was used, and what went wrong.

    `records`: what te_run left in each process; `saved`: the tables that TE itself saved there.
    """
    rows = document.rows
    if not rows:
        return ["the table has no rows: the job ran as it is"]
    ran = [[(Gemm(*gemm), calls) for gemm, calls in record["gemms"]] for record in records]
    users = [(record, gemms) for record, gemms in zip(records, ran, strict=True) if gemms]
    if not users:
        return [f"0 of {len(rows)} rows used: no GEMM of Transformer Engine was seen in the job"]
    lines = list(_differing(users))
    theirs = [(te.detect(text), text) for text in saved]
    spoken = {dialect for dialect, _ in theirs if dialect}
    if spoken and document.dialect not in spoken:
        lines.append(
            f"0 of {len(rows)} rows fit this Transformer Engine: it speaks {min(spoken)} and"
            f" ignored the table, which is {document.dialect}: gemmtune convert --to {min(spoken)}"
        )
        return lines
    left = [row for dialect, text in theirs if dialect for row in te.read(text).rows]
    calls: dict[int, int] = {}
    for _, gemms in users:
        for index, count in used(rows, gemms).items():
            calls[index] = calls.get(index, 0) + count
    dev_caps = {row.dev_cap for row in left}
    calls = {i: n for i, n in calls.items() if not dev_caps or rows[i].dev_cap in dev_caps}
    if not calls:
        return [*lines, unfit(rows, [g for _, gemms in users for g, _ in gemms], dev_caps)]
    steps = sum(record["steps"] for record, _ in users)
    rate = f"{sum(calls.values()) / steps:.6g} calls per step" if steps else ""
    ranks = len({record["rank"] for record, _ in users})
    lines.append(
        f"{len(calls)} of {len(rows)} rows used, on {ranks} rank{'s' * (ranks != 1)}"
        + (f", {rate}" if rate else "")
    )
    return lines + _launched([rows[i] for i in sorted(calls)], left)


def _launched(rows: Sequence[te.Row], left: Sequence[te.Row]) -> list[str]:
    """What TE says of the algorithms that it launched for rows that were used."""
    if not left:
        return ["which algorithms it launched is not known: Transformer Engine saved no table"]
    found, lost = 0, []
    for row in rows:
        after = [r for r in left if r.key == row.key and r.ws_max == row.ws_max]
        other = [r for r in left if r.key == row.key and r.algo_id != row.algo_id]
        if other:
            lost.append((row, other[0]))
        elif any(r.algo_id == row.algo_id and r != row for r in after):
            found += 1
    lines = []
    if found:
        lines.append(f"Transformer Engine found the algorithms of {found} of them by their numbers")
    if lost:
        row, taken = lost[0]
        lines.append(
            f"for {len(lost)} of them Transformer Engine took another algorithm: it did not find"
            f" {row.algo_id} for {row.m}x{row.n}x{row.k}, and launched {taken.algo_id}: the table"
            " is of another hipBLASLt build, or has too low a rank (aidx): sweep again"
        )
    return lines


def _differing(users: Sequence[tuple[Mapping[str, Any], Any]]) -> Iterable[str]:
    """What must be the same in all ranks, and is not; what should not be set, and is."""
    tables = {record["digest"]: record for record, _ in users}
    if len(tables) > 1:
        named = " and ".join(f"{r['load']} (rank {r['rank']})" for r in tables.values())
        yield (
            f"ranks read different tables, so they run different algorithms: {named}: the job sets"
            " TE_HIPBLASLT_ALGO_LOAD itself"
        )
    for name in sorted({name for record, _ in users for name in record["left"]}):
        yield f"the job itself sets {name}: Transformer Engine may tune or choose in it"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
