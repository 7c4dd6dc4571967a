"""Joins what a job's ranks recorded into the rows of shapes.csv, with remarks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gemmtune.capture.profile import merge_power, merge_steps
from gemmtune.gemm import Gemm
from gemmtune.table import Shape, format_ranks


class Captured(NamedTuple):
    """The rows of shapes.csv, what the recorded steps took, and remarks for the user."""

    rows: list[Shape]
    ranks: int
    step_us: float  # mean time of a recorded step; 0 where none ended, or where a GPU ran it
    gemm_us: float  # time a step spends in GEMM calls, mean over ranks; 0 where not measured
    remarks: list[str]
    gpu: dict[str, Any]  # see profile.merge_power; {} where none was read
    profile: dict[str, Any]  # see profile.merge_steps; {} where no step was profiled


def merge(ranks: Sequence[Mapping[str, Any]]) -> Captured:
    """Merge rank files: rows with equal calls on several ranks become one, others stay apart.

    `calls` are per step: a count over several recorded steps is divided by their number, a step
    that did not end counts as one.
    """
    found: dict[tuple[Gemm, str, int, str, str], dict[int, tuple[float, float, int]]] = {}
    for record in ranks:
        steps = max(len(record["step_s"]), 1)
        for row in record["rows"]:
            gemm, default = Gemm(*row["gemm"]), row.get("default", "")
            key = (gemm, row["pass"], row["recompute"], row["site"], default)
            calls, time_s, step = found.setdefault(key, {}).get(record["rank"], (0.0, 0.0, 1 << 30))
            found[key][record["rank"]] = (
                calls + row["calls"] / steps,
                time_s + row["time_s"] / steps,
                min(step, row["step"]),
            )
    rows = []
    on_cpu = all(record["device"] == "cpu" for record in ranks)
    timed = on_cpu or all(record["timed"] for record in ranks)  # a GPU's calls return at once
    for key, by_rank in found.items():
        for count in dict.fromkeys(calls for calls, _, _ in by_rank.values()):
            same = {rank: v for rank, v in by_rank.items() if v[0] == count}
            time_us = sum(v[1] / v[0] for v in same.values()) / len(same) * 1e6 if timed else 0.0
            first = min(v[2] for v in same.values())
            rows.append(Shape(*key[:4], count, first, format_ranks(same), time_us, key[4]))
    whole = [sum(r["step_s"]) / len(r["step_s"]) for r in ranks if r["step_s"]]
    return Captured(
        rows=rows,
        ranks=len({r["rank"] for r in ranks}),
        step_us=sum(whole) / len(whole) * 1e6 if whole and on_cpu else 0.0,
        gemm_us=_gemm_us(ranks) if timed else 0.0,
        remarks=_remarks(ranks, rows),
        gpu=merge_power({r["rank"]: r["gpu"] for r in ranks}),
        profile=merge_steps(r["profile"] for r in ranks),
    )


def _gemm_us(ranks: Sequence[Mapping[str, Any]]) -> float:
    per_rank: list[float] = [
        sum(row["time_s"] for row in r["rows"]) / max(len(r["step_s"]), 1) * 1e6 for r in ranks
    ]
    return sum(per_rank) / len(per_rank)


def _remarks(ranks: Sequence[Mapping[str, Any]], rows: Sequence[Shape]) -> list[str]:
    remarks = []
    numbers = {r["rank"] for r in ranks}
    world = max(r["world"] for r in ranks)
    if missing := set(range(world)) - numbers:
        remarks.append(f"nothing came from rank {format_ranks(missing)} of {world}")
    everywhere = format_ranks(numbers)
    differing = [row for row in rows if row.ranks != everywhere]
    if differing:
        remarks.append(
            f"ranks differ: {len(differing)} of {len(rows)} rows ran on some ranks only, or more"
            " often there (column ranks)"
        )
    untranslated: Counter[str] = Counter()
    for record in ranks:
        untranslated.update(record["untranslated"])
    if untranslated:
        named = ", ".join(f"{op} {count}x" for op, count in sorted(untranslated.items()))
        remarks.append(f"matrix products that are no GEMM of a table, left out: {named}")
    remarks += _te([r["te"] for r in ranks])
    kinds = {name for r in ranks for name in r["optimizers"]}
    calls = max((sum(r["optimizers"].values()) for r in ranks), default=0)
    seen = max((r["waited"] + len(r["step_s"]) for r in ranks), default=0)
    if len(kinds) > 1 or calls > seen > 0:
        remarks.append(
            f"{calls} optimizer calls ({', '.join(sorted(kinds))}) made {seen} steps: a step ends"
            " with the first optimizer; --optimizer names another, gemmtune.step() marks it by hand"
        )
    graphs = max(r["compiled"]["graphs"] for r in ranks)
    if graphs:
        hidden = sorted({option for r in ranks for option in r["compiled"]["hidden"]})
        remarks.append(
            f"torch.compile made {graphs} graphs; their library GEMMs are recorded, GEMMs that"
            " inductor generates itself (templates) cannot be seen"
            + (f"; here {', '.join(hidden)}" if hidden else "")
        )
    if any(not r["step_s"] for r in ranks):
        remarks.append("the job ended inside the first recorded step: counts are of a part of it")
    return remarks


def _te(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether Transformer Engine's calls, as it was asked for them, are those of the library."""
    agree = sum(c.get("agree", 0) for c in compared)
    differ: Counter[str] = Counter()
    for one in compared:
        differ.update(one.get("differ", {}))
    if not differ and not agree:
        return []
    total = agree + differ.total()
    said = f"Transformer Engine was asked for {total} GEMMs, and the library for the same ones"
    if not differ:
        return [said]
    named = ", ".join(f"{text} {count}x" for text, count in sorted(differ.items()))
    return [
        f"{said}, but for {differ.total()}: {named}. The table has the library's; please report it"
    ]
