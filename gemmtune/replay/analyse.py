"""What a replay showed: from the ranks' step records to block times, intervals and coverage. Pure.

A step took as long as it did on its slowest rank. A block is worth the trimmed mean of its counted
steps, a pair the ratio default / tuned of its blocks (above 1: the table is faster). Which steps
are a block is what the ranks wrote down. Blocks and pairs that a job cut short are left out; what
is whole counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmtune.gemm import Gemm
from gemmtune.replay import noise
from gemmtune.replay.decide import ratios
from gemmtune.replay.plan import (
    COMPARE,
    CONTROL,
    END,
    MIN_PAIRS,
    PROBE,
    Block,
    Plan,
    Round,
    blocks,
    pairs_of,
)
from gemmtune.replay.power import Drawn, Spell, drawn
from gemmtune.stats import Interval, bootstrap_interval, trimmed_mean
from gemmtune.textfile import json_values

# A true difference of z % is shown with a probability of 80 % once half the interval is so much
# narrower than z: normal quantiles of 97.5 % and 80 %, (1.96 + 0.84) / 1.96.
_POWER_FACTOR = 1.43
# Differences, in percent, worth planning for.
_LADDER = (20.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


# Confidence that a claim takes. Stopping once the interval is narrow makes it miss a little more
# often than it says, so that with 95 % a table of defaults would be claimed to differ that often.
CLAIM = 0.97

ARMS = (("default", False), ("tuned", True))


class Calls(NamedTuple):
    """A row's Gemm in one step of one rank: calls and their time, native and as the row says."""

    native: int = 0
    native_us: float = 0.0
    tuned: int = 0
    tuned_us: float = 0.0


class Step(NamedTuple):
    """One optimizer step of one rank; `rows` by the row's index in the table."""

    step: int
    us: float
    rows: Mapping[int, Calls]


class Rank(NamedTuple):
    """The records of one rank.

    `fallbacks`: calls that failed open, by reason. `readings`: those of gemmtune.job.readings, by
    the step they were taken before. `lost`: why and when the rank lost touch with rank 0.
    `gemms`: those of the table that it replayed. `graphed`: calls that went into CUDA graphs.
    """

    rank: int
    steps: Sequence[Step]
    rounds: Sequence[Round]
    world: int = 1
    fallbacks: Mapping[str, int] = {}
    differences: Sequence[str] = ()
    host: str = ""
    readings: Mapping[int, Mapping[str, float]] = {}
    lost: str = ""
    plan: Plan = Plan()
    gemms: Sequence[str] = ()
    graphed: int = 0


class Row(NamedTuple):
    """A row of the table as the replay met it. `line`: where it stands in the file.

    `calls` is per step and rank in the tuned blocks; `ranks` are those that launched its algorithm.
    The times are those of one call in the job, `ratio` their paired ratio, None without two pairs.
    """

    line: int
    gemm: Gemm
    config: str
    ranks: tuple[int, ...]
    calls: float
    default_us: float
    tuned_us: float
    ratio: Interval | None
    met: bool

    @property
    def lost_us(self) -> float:
        """Microseconds a step that the row costs more than the default; negative: it saves."""
        return self.calls * (self.tuned_us - self.default_us)


class Timed(NamedTuple):
    """A whole block: its counted steps, each of the slowest rank, in microseconds."""

    block: Block
    steps_us: tuple[float, ...]

    @property
    def value_us(self) -> float:
        return trimmed_mean(self.steps_us)


class Result(NamedTuple):
    """All that a replay showed; the verdict is drawn from this alone.

    `planned` is the number of pairs that was decided on, `needed` the steps that they take.
    """

    plan: Plan
    rounds: list[Round]
    blocks: list[Timed]
    effect: Interval
    sure: Interval  # the effect's too, with CLAIM confidence: a claim is made where it leaves 1 out
    control: Interval
    pairs: int
    aa_pairs: int
    planned: int
    needed: int
    default_us: float
    tuned_us: float
    rows: list[Row]
    ranks: tuple[int, ...]
    world: int
    steps_seen: int
    fallbacks: dict[str, int]
    noise: list[str]
    notes: list[str]
    power: Mapping[str, Drawn] = {}  # by arm, default and tuned; of those where a GPU tells
    graphed: int = 0  # calls that went into CUDA graphs, on all ranks

    @property
    def done(self) -> bool:
        """Whether the replay came to its end."""
        return bool(self.rounds) and self.rounds[-1].kind == END


def analyse(
    plan: Plan,
    ranks: Sequence[Rank],
    rows: Sequence[tuple[int, Gemm, str]],
    captured: str = "",
) -> Result:
    """Analyse the records of all ranks; `rows` are the table's: line, Gemm, config.

    `captured` is the regime (gemmtune.regime) in which the job ran that the table was made for.
    Works with whatever is there: no ranks, or no whole pair, leave the intervals unbounded.
    """
    ranks, notes = _one_each(ranks)
    ranks, rounds, more = _agreed(ranks)
    notes += more
    slowest = _slowest(ranks)
    us = np.full(max(slowest, default=-1) + 1, np.nan)
    us[list(slowest)] = list(slowest.values())
    timed = [
        Timed(block, tuple(slowest[i] for i in block.steps))
        for block in blocks(rounds)
        if all(i in slowest for i in block.steps)
    ]
    pairs = _pairs(timed)
    notes += sorted({d for rank in ranks for d in rank.differences})
    power = {name: found for name, tuned in ARMS if (found := drawn(_spells(ranks, pairs, tuned)))}
    now = power["default"].regime if "default" in power else ""
    if captured and now and captured != now:
        notes.append(
            f"the job was captured {captured} and runs {now} here, where other algorithms may be"
            " best: capture and sweep it as it runs now"
        )
    fallbacks: Counter[str] = Counter()
    hosts: dict[str, list[Mapping[int, Mapping[str, float]]]] = {}
    for rank in ranks:
        fallbacks.update(rank.fallbacks)
        hosts.setdefault(rank.host, []).append(rank.readings)
    controls = ratios(rounds, us, CONTROL)
    compared = ratios(rounds, us, COMPARE)
    planned, needed = _planned(plan, rounds)
    return Result(
        plan=plan,
        rounds=rounds,
        blocks=timed,
        effect=bootstrap_interval(compared),
        sure=bootstrap_interval(compared, CLAIM),
        control=bootstrap_interval(controls),
        pairs=len(pairs),
        aa_pairs=len(controls),
        planned=planned,
        needed=needed,
        default_us=trimmed_mean([a.value_us for a, _ in pairs]) if pairs else math.nan,
        tuned_us=trimmed_mean([b.value_us for _, b in pairs]) if pairs else math.nan,
        rows=[_row(i, row, ranks, timed, pairs) for i, row in enumerate(rows)],
        ranks=tuple(r.rank for r in ranks),
        world=max((r.world for r in ranks), default=0),
        steps_seen=len(us),
        fallbacks=dict(fallbacks),
        noise=noise.describe(
            [t.block.first for t in timed],
            [t.value_us for t in timed],
            [t.block.tuned for t in timed],
            [t.steps_us for t in timed],
            hosts,
        ),
        notes=notes,
        power=power,
        graphed=sum(rank.graphed for rank in ranks),
    )


def _spells(
    ranks: Sequence[Rank], pairs: Sequence[tuple[Timed, Timed]], tuned: bool
) -> list[Spell]:
    """The blocks of one arm on every rank, with the readings that were taken there."""
    blocks = [pair[tuned] for pair in pairs]
    return [
        Spell(
            rank.readings.get(t.block.first, {}),
            rank.readings.get(t.block.last + 1, {}),
            t.value_us,
        )
        for rank in ranks
        for t in blocks
    ]


def _planned(plan: Plan, rounds: Sequence[Round]) -> tuple[int, int]:
    """Pairs decided on, and the steps that they take; the least there may be where none were."""
    least = plan.pairs or MIN_PAIRS
    if planned := pairs_of(rounds, COMPARE):
        end = max(entry.end for entry in rounds if entry.kind == COMPARE)
        block = rounds[-1].block or rounds[-2].block
        return max(planned, least), end + 2 * block * max(least - planned, 0)
    needed = plan.steps
    for entry in rounds:
        if entry.kind == PROBE:
            needed = max(needed, entry.end + 1)
        if entry.kind == CONTROL:
            needed = entry.end + 2 * entry.block * least
    return least, needed


def more_pairs(effect: Interval, pairs: int) -> tuple[int, float] | None:
    """How many more pairs would show a difference of how many percent, at the spread seen.

    The difference is the largest of a round series that the present interval cannot show; None
    where there is no interval to plan from.
    """
    if not 0 < effect.half_width < math.inf:
        return None
    width = 100 * effect.half_width
    goal = next((z for z in _LADDER if z < width * _POWER_FACTOR), _LADDER[-1])
    needed = math.ceil(pairs * (width * _POWER_FACTOR / goal) ** 2)
    return max(needed - pairs, 1), goal


def _one_each(ranks: Sequence[Rank]) -> tuple[list[Rank], list[str]]:
    """One record a rank: a restarted rank, or a second training, leaves several."""
    kept: dict[int, Rank] = {}
    for rank in ranks:
        if rank.rank not in kept or len(rank.steps) > len(kept[rank.rank].steps):
            kept[rank.rank] = rank
    notes = []
    if extra := len(ranks) - len(kept):
        notes.append(
            f"{extra} more processes of the job trained under the same ranks (restarts?): of each "
            f"rank the one with most steps counts"
        )
    found = [kept[r] for r in sorted(kept)]
    world = max((r.world for r in found), default=0)
    if found and len(found) < world:
        notes.append(f"only {len(found)} of {world} ranks left records here: they alone count")
    return found, notes


def _agreed(ranks: Sequence[Rank]) -> tuple[list[Rank], list[Round], list[str]]:
    """The rounds that all ranks went through, and those ranks that did."""
    notes = [f"rank {r.rank} went on with the default alone: {r.lost}" for r in ranks if r.lost]
    rounds = list(ranks[0].rounds) if ranks else []
    kept = []
    for rank in ranks:
        n = min(len(rank.rounds), len(rounds))
        if list(rank.rounds[:n]) == rounds[:n]:
            kept.append(rank)
            rounds = rounds[:n]
    if alone := len(ranks) - len(kept):
        notes.append(
            f"{alone} of {len(ranks)} ranks switched at other steps, as without a process group of"
            f" torch.distributed each decides by itself: they are left out"
        )
    return kept, rounds, notes


def _slowest(ranks: Sequence[Rank]) -> dict[int, float]:
    """Time of each step that all ranks have, on its slowest rank."""
    times = [{s.step: s.us for s in rank.steps} for rank in ranks]
    shared = set.intersection(*(set(t) for t in times)) if times else set()
    return {step: max(t[step] for t in times) for step in sorted(shared)}


def _pairs(timed: Sequence[Timed]) -> list[tuple[Timed, Timed]]:
    """Whole pairs of default against table, the default first."""
    sides: dict[int, dict[str, Timed]] = {}
    for one in timed:
        if not one.block.control:
            sides.setdefault(one.block.pair, {})[one.block.side] = one
    return [(s["a"], s["b"]) for s in sides.values() if len(s) == 2]


def _row(
    index: int,
    row: tuple[int, Gemm, str],
    ranks: Sequence[Rank],
    timed: Sequence[Timed],
    pairs: Sequence[tuple[Timed, Timed]],
) -> Row:
    tuned_steps = [i for t in timed if t.block.tuned for i in t.block.steps]
    by_rank = {r.rank: {s.step: s.rows[index] for s in r.steps if index in s.rows} for r in ranks}
    launched = {r: sum(c[i].tuned for i in tuned_steps if i in c) for r, c in by_rank.items()}
    everywhere = [calls for calls in by_rank.values() if calls]

    def call_us(block: Block, tuned: bool) -> float:
        """Mean time of a call in the block, over ranks; nan where there was none."""
        seen = [c[i] for c in everywhere for i in block.steps if i in c]
        count = sum(c.tuned if tuned else c.native for c in seen)
        return (
            sum(c.tuned_us if tuned else c.native_us for c in seen) / count if count else math.nan
        )

    times = [(call_us(a.block, False), call_us(b.block, True)) for a, b in pairs]
    times = [(a, b) for a, b in times if a > 0 and b > 0]
    per_rank = len(tuned_steps) * max(len([r for r in launched.values() if r]), 1)
    return Row(
        *row,
        ranks=tuple(r for r, count in launched.items() if count),
        calls=sum(launched.values()) / per_rank if per_rank else 0.0,
        default_us=trimmed_mean([a for a, _ in times]) if times else math.nan,
        tuned_us=trimmed_mean([b for _, b in times]) if times else math.nan,
        ratio=bootstrap_interval([a / b for a, b in times]) if len(times) > 1 else None,
        met=bool(everywhere),
    )


def as_json(result: Result) -> dict[str, Any]:
    """JSON values of all of it, the raw block values included, so that it can be recomputed."""
    values: dict[str, Any] = json_values(result)
    for cells, timed in zip(values["blocks"], result.blocks, strict=True):
        cells["value_us"] = timed.value_us
        cells["tuned"] = timed.block.tuned
    return values
