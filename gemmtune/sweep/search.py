"""The search: which algorithms stay in the race, which is chosen. Pure but for the clock given.

Reads times through a `Sampler`; writes nothing. All that is random follows the seed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gemmtune.gemm import Algo
from gemmtune.stats import Interval, ratio_interval, trimmed_mean

# Mean microseconds per launch of that algorithm over so many launches.
Sampler = Callable[[Algo, int], float]

KEEP = 3  # finalists beside the default
HOPELESS = 4.0  # times the default's time at first sight: out before the race
MIN_REPEATS, MAX_REPEATS = 7, 25  # pairs with the default that a round collects
SAMPLE_US = 2_000.0  # a sample of the screen lasts at least this long: clocks and timers are coarse
SCREEN_SHARE = 0.4  # of a shape's time, where a sustained confirmation follows
CONFIRM_REPEATS = 10
CHUNKS = 8  # of a stretch, so that an interruption spoils one of them and not the stretch
CONFIDENCE = 0.99  # over all finalists of a Gemm together


class Raced(NamedTuple):
    """What a race found: mean times, and ratios paired with the default (above 1 is faster)."""

    times_us: dict[Algo, list[float]]
    ratios: dict[Algo, list[float]]

    def time_us(self, algo: Algo) -> float:
        return trimmed_mean(self.times_us[algo])

    def interval(self, algo: Algo, rivals: int) -> Interval:
        """The ratio's interval, widened for the number of algorithms that are compared."""
        return ratio_interval(self.ratios[algo], 1 - (1 - CONFIDENCE) / max(rivals, 1))


class Screened(NamedTuple):
    """The last round of the screen, and the rounds in which others were dropped."""

    finalists: list[Algo]
    last: Raced
    dropped: dict[Algo, tuple[str, Raced]]


def race(
    default: Algo,
    algos: Sequence[Algo],
    sample: Sampler,
    launches: Mapping[Algo, int],
    *,
    repeats: int,
    rng: random.Random,
) -> Raced:
    """Time the default and each of `algos` once per repeat, in random order."""
    entrants = [default, *algos]
    raced = Raced({a: [] for a in entrants}, {a: [] for a in algos})
    for _ in range(repeats):
        times = {a: sample(a, launches[a]) for a in rng.sample(entrants, len(entrants))}
        for algo, time in times.items():
            raced.times_us[algo].append(time)
            if algo != default:
                raced.ratios[algo].append(times[default] / time)
    return raced


def screen(
    default: Algo,
    first_us: Mapping[Algo, float],
    sample: Sampler,
    budget_us: float,
    rng: random.Random,
) -> Screened:
    """Successive halving. `first_us` is each algorithm's time at first sight, the default's too.

    The last round decides where no confirmation follows, so it takes fresh samples of those that
    are left. `budget_us` is kept to where MIN_REPEATS launches of each fit in.
    """
    alive = [a for a in first_us if a != default and first_us[a] <= HOPELESS * first_us[default]]
    dropped: dict[Algo, tuple[str, Raced]] = {
        a: (
            f"{first_us[a] / first_us[default]:.1f} times the default's time at first sight",
            Raced({a: [first_us[a]]}, {a: [first_us[default] / first_us[a]]}),
        )
        for a in first_us
        if a != default and a not in alive
    }
    rounds = 1 + max(0, math.ceil(math.log2(max(len(alive), 1) / KEEP)))
    estimate = dict(first_us)
    raced = Raced({default: [first_us[default]]}, {})
    for number in range(1, rounds + 1):
        if not alive:
            break
        entrants = [default, *alive]
        share = budget_us / rounds
        one_repeat = sum(max(SAMPLE_US, estimate[a]) for a in entrants)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(share / one_repeat)))
        sample_us = min(max(share / repeats / len(entrants), 1.0), 10 * SAMPLE_US)
        launches = {a: max(1, round(sample_us / estimate[a])) for a in entrants}
        raced = race(default, alive, sample, launches, repeats=repeats, rng=rng)
        estimate |= {a: raced.time_us(a) for a in entrants}
        if number == rounds:
            break
        keep = max(KEEP, math.ceil(len(alive) / 2))
        ranked = sorted(alive, key=lambda a: -statistics.median(raced.ratios[a]))
        for a in ranked[keep:]:
            dropped[a] = (f"round {number} of {rounds}", raced)
        alive = ranked[:keep]
    ranked = sorted(alive, key=lambda a: -statistics.median(raced.ratios[a]))
    return Screened(ranked, raced, dropped)


def confirm(
    default: Algo,
    finalists: Sequence[Algo],
    sample: Sampler,
    time_us: Mapping[Algo, float],
    *,
    budget_us: float,
    rng: random.Random,
) -> Raced:
    """Fresh samples of the finalists, each alone for a stretch of `budget_us`, at its own clocks.

    The first fifth of a stretch lets clocks and caches settle and is not counted; of the rest,
    chunk by chunk, the trimmed mean.
    """
    entrants = [default, *finalists]
    stretch_us = budget_us / CONFIRM_REPEATS / len(entrants)
    launches = {a: max(1, round(stretch_us / time_us[a])) for a in entrants}

    def sustained(algo: Algo, count: int) -> float:
        settle = count // 5
        if settle:
            sample(algo, settle)
        chunks = min(CHUNKS, count - settle)
        return trimmed_mean([sample(algo, (count - settle) // chunks) for _ in range(chunks)])

    return race(default, finalists, sustained, launches, repeats=CONFIRM_REPEATS, rng=rng)


def choose(intervals: Mapping[Algo, Interval], min_gain: float) -> Algo | None:
    """The algorithm to take in the default's place; None keeps the default.

    Only what is faster beyond doubt counts: the low end of its ratio's interval clears
    1 + min_gain. Of several such the one with the highest low end. Pure.
    """
    sure = {a: i.low for a, i in intervals.items() if i.low > 1 + min_gain}
    return max(sure, key=lambda a: sure[a]) if sure else None
