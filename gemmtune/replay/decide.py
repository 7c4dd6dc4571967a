"""What comes next in a replay, decided as the step times come in. Pure.

`following` decides from nothing but the user's numbers, the rounds so far and the step times, so
that one process can decide for all ranks, and a simulated clock can stand in for a job.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from gemmtune.replay.plan import (
    COMPARE,
    CONTROL,
    DROP_SHARE,
    END,
    MIN_PAIRS,
    PROBE,
    PROBE_S,
    PROBE_STEPS,
    WARMUP,
    Plan,
    Round,
    lengths,
    pairs_of,
)
from gemmtune.stats import bootstrap_interval, trimmed

# Departures from the settled time that are small enough, as a share of it.
SETTLED = 0.001
# Of a limited time, at most this share goes into each half of the probe.
PROBE_SHARE = 0.05
MOST = 10**9  # pairs: no limit


def following(plan: Plan, rounds: Sequence[Round], us: np.ndarray) -> Round:
    """The round after `rounds`, all of which have run; `us` as in `ratios`.

    When to stop depends on the interval's width alone, never on what it shows.
    """
    last = rounds[-1]
    if last.kind == WARMUP and plan.block is None:
        known = us[np.isfinite(us)]
        probe_s = min(PROBE_S, plan.seconds * PROBE_SHARE) if plan.seconds else PROBE_S
        steps = probe_s * 1e6 / known.min() if known.size else 0
        return Round(PROBE, last.end, int(np.clip(steps, *PROBE_STEPS)), 0, ("ba",))
    if last.kind in (WARMUP, PROBE):
        block, drop = _lengths(plan, last, us)
        room = _room(plan, us, block)
        if plan.aa_pairs:
            control = min(plan.aa_pairs, max(room // 3, 2))
            return _round(plan, rounds, CONTROL, control, block, drop)
        pairs = max(min(plan.pairs or MIN_PAIRS, room), 2)
        return _round(plan, rounds, COMPARE, pairs, block, drop)
    more = min(_more_pairs(plan, rounds, us), _room(plan, us, last.block))
    if not pairs_of(rounds, COMPARE):
        more = max(more, 2)
    if more < 1:
        return Round(END, last.end)
    return _round(plan, rounds, COMPARE, more, last.block, last.drop)


def _room(plan: Plan, us: np.ndarray, block: int) -> int:
    """How many pairs of such blocks the plan's seconds leave room for."""
    if not plan.seconds or not np.isfinite(us).any():
        return MOST
    left_us = plan.seconds * 1e6 - float(np.nansum(us))
    return int(np.clip(left_us / (2 * block * float(np.nanmedian(us))), 0, MOST))


def _lengths(plan: Plan, last: Round, us: np.ndarray) -> tuple[int, int]:
    """Steps in a block, and how many of them do not count."""
    if plan.block is not None:
        return plan.block, max(plan.block // DROP_SHARE, 1)
    stretches = us[last.first : last.end].reshape(2, last.block)
    return lengths(max(settling(s) for s in stretches), float(np.nanmedian(us[: last.end])))


def ratios(rounds: Sequence[Round], us: np.ndarray, kind: str) -> np.ndarray:
    """The ratio side a / side b of each whole pair in rounds of this kind.

    `us` has the time of each step by its index, nan where there is none (shape (steps,)).
    """
    found = [np.empty(0)]
    for entry in rounds:
        if entry.kind == kind and entry.orders:
            times = np.full(entry.end - entry.first, np.nan)
            part = us[entry.first : entry.end]
            times[: len(part)] = part
            counted = times.reshape(-1, 2, entry.block)[:, :, entry.drop :]
            values = trimmed(counted)[0]
            forth = values[:, 0] / values[:, 1]
            turned = np.array([order == "ba" for order in entry.orders])
            found.append(np.where(turned, 1 / forth, forth))
    every = np.concatenate(found)
    return every[np.isfinite(every)]


def settling(stretch: np.ndarray) -> int:
    """How many steps after a switch until step times are within the noise of the stretch's end.

    At most half the stretch (shape (steps,), microseconds). Windows grow with their distance from
    the switch: what settles slowly is seen by averaging over longer.
    """
    half = len(stretch) // 2
    tail = stretch[half:]
    centre = float(np.nanmedian(tail))
    spread = 1.4826 * float(np.nanmedian(np.abs(tail - centre)))
    start = 0
    while start < half:
        width = max(start // 2, 3)
        # Three standard errors of a median of steps that go their own way for two or three.
        bound = SETTLED * centre + 3 * 2 * spread / math.sqrt(width)
        if abs(float(np.nanmedian(stretch[start : start + width])) - centre) <= bound:
            return start
        start = start + 1 if start < 4 else math.ceil(1.4 * start)
    return half


def _more_pairs(plan: Plan, rounds: Sequence[Round], us: np.ndarray) -> int:
    """How many more pairs of default against table to run; 0 ends the replay."""
    done = pairs_of(rounds, COMPARE)
    if plan.pairs is not None:
        return plan.pairs - done
    if not done:
        control = np.log(ratios(rounds, us, CONTROL))
        if len(control) < 2:
            return MIN_PAIRS
        unit = float(trimmed(control)[1]) * math.sqrt(len(control))
        needed = (2 * unit / (plan.precision / 100)) ** 2
        return math.ceil(min(max(needed, MIN_PAIRS), plan.max_pairs))
    width = 100 * bootstrap_interval(ratios(rounds, us, COMPARE)).precision
    if width <= plan.precision:
        return 0
    needed = done * (width / plan.precision) ** 2 - done
    few = max(done / 4, MIN_PAIRS / 2)  # seldom looks: each may stop at a width too narrow
    return min(math.ceil(max(needed, few)), plan.max_pairs - done)


def _round(
    plan: Plan, rounds: Sequence[Round], kind: str, pairs: int, block: int, drop: int
) -> Round:
    orders = _balanced(pairs, random.Random(f"{plan.seed} {len(rounds)}"))
    return Round(kind, rounds[-1].end, block, drop, orders)


def _balanced(pairs: int, random_: random.Random) -> tuple[str, ...]:
    """One order, "ab" or "ba", a pair: each equally often (but for one), shuffled."""
    sides = ["ab", "ba"]
    random_.shuffle(sides)
    chosen = [sides[i % 2] for i in range(pairs)]
    random_.shuffle(chosen)
    return tuple(chosen)
