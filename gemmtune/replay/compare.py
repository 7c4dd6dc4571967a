"""Two jobs compared by alternated processes: what is left to run, and what was shown. Pure.

A step took as long as it did on its slowest rank; a process is worth the trimmed mean of its
counted steps; a pair is the ratio of a's time to b's (above 1: b is faster). The pairs give the
interval, not the steps: two processes of one job differ by more than the steps within either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gemmtune.replay.turns import ARMS, Plan, Run, schedule
from gemmtune.replay.verdict import Verdict, percent
from gemmtune.stats import Interval, ratio_interval, trimmed_mean
from gemmtune.textfile import json_values

EXIT = {"faster": 0, "no difference": 0, "out of memory": 0, "slower": 1, "unknown": 2}

# How a process went. A killed one may have been ended by the system for want of memory.
OK, NO_MEMORY, KILLED, FAILED, SHORT = "ok", "out of memory", "killed", "failed", "short"
STARVED = (NO_MEMORY, KILLED)

FAILURES = 2  # in a row, after which an arm is given up
ALONE = 2  # processes that an arm needs for its own figures, once the other ran out of memory


class Outcome(NamedTuple):
    """What one process showed. `ranks_us` are its counted steps, by rank.

    `at` is the step, from 1, in which one that did not come to its end was; `error` its own words,
    `memory` whose memory ran out. tokens, flops and peak_flops are one rank's in one step, as the
    job said; None where it did not.
    """

    pair: int
    arm: str
    status: str
    code: int
    seconds: float
    ranks_us: Mapping[str, list[float]] = {}
    at: int = 0
    error: str = ""
    memory: str = ""
    peak_bytes: int = 0
    world: int = 0
    device: str = ""
    tokens: float | None = None
    flops: float | None = None
    peak_flops: float | None = None
    host: str = ""

    @property
    def step_us(self) -> float:
        """The trimmed mean of the counted steps, each on its slowest rank."""
        return trimmed_mean([max(times) for times in zip(*self.ranks_us.values(), strict=True)])


class Arm(NamedTuple):
    """The figures of an arm; None and nan for what is not known. `ended` is why it has no more.

    Tokens are those of all ranks, TFLOP/s those of one; peak memory is the largest of any rank.
    """

    name: str
    runs: int
    step_us: float
    tokens_per_s: float | None
    tflops_per_rank: float | None
    mfu: float | None
    peak_bytes: int
    world: int
    device: str
    ended: Outcome | None

    @property
    def starved(self) -> bool:
        return self.ended is not None and self.ended.status in STARVED


class Result(NamedTuple):
    """All that a comparison showed; `effect` is the time of a over that of b."""

    plan: Plan
    arms: tuple[Arm, Arm]
    pairs: int
    effect: Interval
    notes: list[str]


def remaining(plan: Plan, outcomes: Sequence[Outcome]) -> list[Run]:
    """The processes still to run, in order, should all go well.

    An arm that ran out of memory, or failed twice in a row, is not run again. Then the other has
    its own figures taken after an arm out of memory; after a failed one nothing follows.
    """
    done = {(o.pair, o.arm) for o in outcomes}
    left = [run for run in schedule(plan) if (run.pair, run.arm) not in done]
    for arm in ARMS:
        mine = [o for o in outcomes if o.arm == arm]
        if any(o.status in STARVED for o in mine):
            other = [o for o in outcomes if o.arm != arm and o.status == OK]
            left = [run for run in left if run.arm != arm][: max(ALONE - len(other), 0)]
        elif len(mine) >= FAILURES and all(o.status != OK for o in mine[-FAILURES:]):
            left = []
    return left


def analyse(
    plan: Plan, outcomes: Sequence[Outcome], tokens_per_step: float | None = None
) -> Result:
    """The figures of both arms and the ratio over whole pairs, from whatever is there.

    `tokens_per_step`, of all ranks, stands above what the jobs say.
    """
    good = {(o.pair, o.arm): o for o in outcomes if o.status == OK}
    pairs = [
        (good[i, "a"], good[i, "b"])
        for i in range(plan.runs)
        if (i, "a") in good and (i, "b") in good
    ]
    a, b = (_arm(arm, outcomes, tokens_per_step) for arm in ARMS)
    notes = []
    if a.runs and b.runs:
        for what, mine, other in (("ranks", a.world, b.world), ("device", a.device, b.device)):
            if mine != other:
                notes.append(f"the jobs differ: {what} {mine} in a, {other} in b")
    hosts = sorted({o.host for o in good.values()})
    if len(hosts) > 1:
        notes.append(f"the processes ran on different machines: {', '.join(hosts)}")
    if fewer := sorted({o.arm for o in good.values() if len(o.ranks_us) < o.world}):
        notes.append(f"{' and '.join(fewer)}: not all ranks left their steps here")
    effect = ratio_interval([x.step_us / y.step_us for x, y in pairs])
    return Result(plan, (a, b), len(pairs), effect, notes)


def _arm(name: str, outcomes: Sequence[Outcome], tokens_per_step: float | None) -> Arm:
    mine = [o for o in outcomes if o.arm == name]
    good = [o for o in mine if o.status == OK]
    ended = next((o for o in mine if o.status in STARVED), None) or next(
        (o for o in reversed(mine) if o.status != OK), None
    )
    if not good:
        peak = max((o.peak_bytes for o in mine), default=0)
        return Arm(name, 0, math.nan, None, None, None, peak, 0, "", ended)
    last = good[-1]
    step_us = math.exp(trimmed_mean([math.log(o.step_us) for o in good]))
    tokens = tokens_per_step or (None if last.tokens is None else last.tokens * last.world)
    tflops = None if last.flops is None else last.flops / step_us / 1e6
    peak_tflops = None if last.peak_flops is None else last.peak_flops / 1e12
    return Arm(
        name,
        len(good),
        step_us,
        None if tokens is None else tokens / step_us * 1e6,
        tflops,
        tflops / peak_tflops if tflops is not None and peak_tflops else None,
        max(o.peak_bytes for o in good),
        last.world,
        last.device,
        ended,
    )


def judge(result: Result) -> Verdict:
    """Draw the verdict: running out of memory is one; else a difference whose interval excludes 1
    counts."""
    starved = [arm for arm in result.arms if arm.starved]
    effect = result.effect
    compared = result.pairs >= 2
    if not compared:
        found = Verdict("unknown", "nothing can be compared")
    elif effect.low > 1 or effect.high < 1:
        word = "faster" if effect.ratio > 1 else "slower"
        low, centre, high = sorted(abs(percent(x)) for x in effect)
        found = Verdict(word, f"b is {word} by {centre:.1f} % [{low:.1f}, {high:.1f}]")
    else:
        found = Verdict(
            "no difference",
            f"no difference shown: b is faster by {percent(effect.ratio):+.1f} % "
            f"[{percent(effect.low):+.1f}, {percent(effect.high):+.1f}]; "
            f"with more --runs a smaller one would show",
        )
    said = [f"{arm.name} {_how(arm.ended)}" for arm in result.arms if arm.ended]
    if len(starved) == 1 and any(arm.runs for arm in result.arms if arm not in starved):
        return Verdict("out of memory", "; ".join(said + [found.text] * compared))
    if not compared:
        few = f"{result.pairs} whole pair{'' if result.pairs == 1 else 's'}, 2 are needed"
        return Verdict("unknown", f"{found.text}: {'; '.join(said) or few}")
    return found


def _how(outcome: Outcome) -> str:
    """What became of a process, after the name of its arm."""
    if outcome.status == NO_MEMORY:
        memory = f" ({outcome.memory})" if outcome.memory else ""
        return f"ran out of memory at step {outcome.at}{memory}"
    if outcome.status == KILLED:
        return f"was killed at step {outcome.at} (out of memory?)"
    if outcome.status == FAILED:
        return f"failed at step {outcome.at} with exit code {outcome.code}: {outcome.error}"
    return outcome.error


def progress(plan: Plan, outcome: Outcome, left: float) -> str:
    """A line about a process that has ended; `left` are the seconds that the rest should take."""
    what = f"{outcome.step_us / 1e3:.2f} ms a step" if outcome.status == OK else _how(outcome)
    more = f"; {int(left) // 60}:{int(left) % 60:02} left" if left else ""
    return f"{outcome.arm} {outcome.pair + 1}/{plan.runs}: {what}, in {outcome.seconds:.0f} s{more}"


def lines(result: Result, verdict: Verdict) -> Iterator[str]:
    """The report, line by line; the verdict is the last."""
    a, b = result.arms
    plan = result.plan
    rows: list[tuple[str, ...]] = [("", a.name, b.name)]
    if a.runs or b.runs:
        rows += [
            (name, *(_cell(show, value) for value in values))
            for name, show, values in (
                ("processes", "{:d}", (a.runs, b.runs)),
                ("ranks", "{:d}", (a.world or None, b.world or None)),
                ("step, ms", "{:.2f}", (a.step_us / 1e3, b.step_us / 1e3)),
                ("steps/s", "{:.4g}", (1e6 / a.step_us, 1e6 / b.step_us)),
                ("tokens/s", "{:,.0f}", (a.tokens_per_s, b.tokens_per_s)),
                ("TFLOP/s per rank", "{:.4g}", (a.tflops_per_rank, b.tflops_per_rank)),
                ("MFU", "{:.1%}", (a.mfu, b.mfu)),
                ("peak memory, GiB", "{:.2f}", tuple(_gib(x.peak_bytes) for x in (a, b))),
            )
            if any(value is not None for value in values)
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        for row in rows:
            cells = (row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]))
            yield "  ".join(cells).rstrip()
        yield (
            f"{result.pairs} of {plan.runs} pairs of processes, {plan.steps} steps counted in each"
        )
    for arm in result.arms:
        if arm.ended and arm.ended.error and arm.starved:
            yield f"{arm.name} said: {arm.ended.error}"
        elif arm.ended and result.pairs >= 2 and not arm.starved:
            yield f"warning: a process of {arm.name} does not count: it {_how(arm.ended)}"
    for note in result.notes:
        yield f"warning: {note}"
    yield verdict.text


def _cell(show: str, value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else show.format(value)


def _gib(size: int) -> float | None:
    return size / 2**30 if size else None


def as_json(result: Result, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """JSON values of all of it, the raw step times included, so that it can be recomputed."""
    values: dict[str, Any] = json_values(result)
    values["processes"] = [
        {**json_values(o), "step_us": o.step_us if o.status == OK else None} for o in outcomes
    ]
    return values
