"""The search: which algorithm of a Gemm to take. Pure: a generator of questions to a device.

It is sent the answers, so whoever answers (a device, a journal of answers, a simulated clock) gets
the same further questions and the same verdicts for the same answers. In four stages:

1. CHECK of all in random order; what fails, or is hopeless at first sight, is out. Where there
   are many, of some; then of what resembles the fastest of them, and so on; the best go on.
2. Successive halving: rounds of repeats. A repeat times the default and all that are left once
   each, in an order drawn anew; after a round the better half stays, by all of its samples so far.
3. WHOLE of the finalists; the next best takes the place of one that fails.
4. Confirmation on fresh samples, since those by which a finalist was selected flatter it. Where
   the Gemm matters each finalist runs alone for a stretch, the first fifth of which is not counted.

Successive samples resemble each other (drift, neighbours, throttling), so the default and a
finalist are compared within a repeat. Its order being drawn independently, two repeats' ratios are
uncorrelated whatever the noise does in between, and the interval over repeats holds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from gemmtune.errors import BackendError
from gemmtune.gemm import Gemm
from gemmtune.stats import Interval, ratio_interval, trimmed_mean, trimmed_means
from gemmtune.sweep.learn import Guide

CHECK, WHOLE, TIME = "check", "whole", "time"

KEEP = 3  # finalists beside the default
FEW = 64  # algorithms that are all looked at, and of more as many before any are chosen
HEAD = 16  # of the list that are among them: the library's own choices come first
LEARNT = 24  # that are chosen at a time
MOST = 320  # of more that are looked at in all
LEARN_SHARE = 0.15  # of the time
ENTRANTS = 48  # that go on to the race where more than FEW were looked at
HOPELESS = 4.0  # times the default's time at first sight: out before the race
SAMPLE_US = 1_000.0  # a sample lasts at least this long: clocks and timers are coarse
LONGEST = 10  # times SAMPLE_US that a sample of the screen may last where there is time to spare
SCREEN_SHARE = 0.4  # of the time
MIN_REPEATS, MAX_REPEATS = 5, 40  # of a round of the screen
NEIGHBOURS = 9  # samples of the screen, one after the other, that tell the machine's state
SIGMAS = 3.0  # standard errors that count as beyond doubt in the screen, which only selects
PILOT, MIN_CONFIRM = 8, 12  # repeats of the confirmation: before it is planned, and at least
MANY = 400  # repeats of the confirmation that fill its time, of samples
STRETCHES = 24, 96  # the same of stretches, where times hardly vary and where they do
WORTH = 3  # independent samples that a stretch's chunks come to
STRETCH_US = 1e6  # the longest stretch that an algorithm runs alone
CHUNKS = 16  # samples in a stretch, so that an interruption spoils one and not the stretch
SETTLE = 5  # one in so many launches of a stretch comes first and is not counted
PRECISION = 0.003  # half-width of the ratio's interval beyond which more repeats tell nothing
CONFIDENCE = 0.99  # over all finalists of a Gemm together
FUTILE = 0.95  # confidence at which a finalist is given up

Algo = TypeVar("Algo", bound=Hashable)


class Task(NamedTuple):
    """What is asked for one Gemm."""

    gemm: Gemm
    seconds: float  # of timing
    sustained: bool  # whether it matters enough to be confirmed alone, at its own clocks
    min_gain: float
    seed: int


class Ask(NamedTuple):
    """One question to the device about one algorithm.

    CHECK: quick verification and two launches at first sight, `us` is the better of the two.
    WHOLE: a finalist's full verification. TIME: the time of a sample.
    """

    kind: str
    algo: int  # index in the backend's list for this Gemm; 0 is the default
    launches: int = 0  # TIME: back-to-back launches in the sample
    settle: int = 0  # TIME: launches right before it that are not counted


class Answer(NamedTuple):
    us: float = 0.0  # mean microseconds per launch; 0 where there is none
    reason: str = ""  # why this algorithm is out of the race; "" if it is fine


class Verdict(NamedTuple):
    """What became of one algorithm. `ratio`: default time / its (above 1: faster).

    Its interval is unbounded, (0, inf), after a single sample; all is 0 where it failed.
    """

    status: str  # default | winner | finalist | dropped | failed | untried
    reason: str = ""
    time_us: float = 0.0
    ratio: Interval = Interval(0.0, 0.0, 0.0)
    samples: int = 0  # repeats that the ratio rests on
    regime: str = ""  # screen | sustained


# Asks of a part of the search, and what that part found.
Stage = Generator[list[Ask], list[Answer], list[int]]


def search(
    count: int, task: Task, configs: Sequence[str] = ()
) -> Generator[list[Ask], list[Answer], list[Verdict]]:
    """The verdicts of `count` algorithms, the default's first.

    Where their `configs` are given and there are more than FEW, not all are looked at.

    Yields batches of asks, to be run in their order, and is sent as many answers. An algorithm is
    not asked for again after a batch with a reason against it; a batch names it more than once
    only for the samples of one stretch, and the first reason is kept. The times asked for
    (launches and settling, two launches a CHECK) add up to no more than `task.seconds` and 5 %
    wherever the least that is ever asked for fits in: the first sight of all or FEW, MIN_REPEATS
    samples
    of all that are left in each round, MIN_CONFIRM of the default and the finalists, each of
    SAMPLE_US or one launch, whichever is longer. Less is asked for where no finalist can win, or
    PRECISION is reached. Raises BackendError where the default fails, ValueError where there are
    not as many answers as asks.
    """
    race = _Race(count, task, configs)
    alive = yield from race.check()
    if not alive:  # nothing to choose from: the default's time is still wanted
        sample_us = min(task.seconds * 1e6, 1e5) / MIN_REPEATS
        for _ in range(MIN_REPEATS):
            yield from race.repeat([], sample_us)
        return race.verdicts()
    ranked = yield from race.screen(alive)
    finalists = yield from race.verify(ranked)
    if finalists:
        yield from race.confirm(finalists)
    return race.verdicts()


def choose(intervals: Mapping[Algo, Interval], min_gain: float) -> Algo | None:
    """The algorithm to take in the default's place; None keeps the default. Pure.

    Only what is faster beyond doubt counts: the low end of its ratio's interval clears
    1 + min_gain. Of several such the first given (in the order of the backend's list) that the best
    of them does not beat by more than min_gain, with the interval's high end taken for its ratio.
    Algorithms that are equally fast are common, and which of them came out on top is chance; their
    order is not, so two sweeps agree. The price is min_gain and half an interval at most.
    """
    sure = {a: i for a, i in intervals.items() if i.low > 1 + min_gain}
    best = max((i.ratio for i in sure.values()), default=0.0)
    return next((a for a, i in sure.items() if i.high * (1 + min_gain) >= best), None)


class _Race:
    """What is known of the algorithms of one Gemm. `rows`: times of a repeat, NaN where absent."""

    def __init__(self, count: int, task: Task, configs: Sequence[str] = ()) -> None:
        self.count, self.task, self.rng = count, task, random.Random(task.seed)
        self.guide = Guide(configs) if len(configs) > FEW else None
        self.us: dict[int, float] = {}  # the best that is known of each time
        self.spent_us = 0.0
        self.rows: list[list[float]] = []
        self.places: list[list[int]] = []  # where in its repeat each was timed
        self.failed: dict[int, str] = {}
        self.dropped: dict[int, Verdict] = {}
        self.finalists: list[int] = []
        self.spread = 0.0  # of the logarithms of an algorithm's times in the screen
        self.entered = 0  # finalists that the confirmation began with
        self.regime = "screen"

    def check(self) -> Stage:
        """First sight of all, or of what is promising; those that are worth a race."""
        order = list(range(self.count))
        if self.guide:
            order = order[:HEAD] + self.rng.sample(order[HEAD:], FEW - HEAD)
        while order:
            self.rng.shuffle(order)
            times = yield from self._ask([Ask(CHECK, a) for a in order])
            looked = zip(order, times, strict=True)
            self.us |= {a: us for a, us in looked if a not in self.failed}
            order = self._promising()
        untried = [a for a in self._left(range(self.count)) if a not in self.us]
        self.dropped |= dict.fromkeys(untried, Verdict("untried"))
        limit = HOPELESS * self.us[0]
        for a in self._left(range(1, self.count)):
            if self.us[a] > limit:
                ratio = self.us[0] / self.us[a]
                reason = f"{1 / ratio:.1f} times the default's time at first sight"
                interval = Interval(ratio, 0.0, math.inf)
                self.dropped[a] = Verdict("dropped", reason, self.us[a], interval, 1, self.regime)
        left = self._left(range(1, self.count))
        if self.guide:
            for a in sorted(left, key=lambda a: self.us[a])[ENTRANTS:]:
                interval = Interval(self.us[0] / self.us[a], 0.0, math.inf)
                reason = f"not of the {ENTRANTS} fastest at first sight"
                self.dropped[a] = Verdict("dropped", reason, self.us[a], interval, 1, self.regime)
        return self._left(left)

    def _promising(self) -> list[int]:
        """What to look at next; none where that is enough."""
        looked = len(self.us) + len(self.failed)
        spent = self.spent_us > LEARN_SHARE * self.task.seconds * 1e6
        if not self.guide or spent or looked >= min(MOST, self.count):
            return []
        slow = HOPELESS * self.us[0]
        known = self.us | dict.fromkeys(self.failed, slow)
        return self.guide.next(known, min(LEARNT, MOST - looked), self.rng)

    def screen(self, alive: list[int]) -> Stage:
        """Successive halving; all that may be faster, in the order of preference."""
        budget_us = SCREEN_SHARE * self.task.seconds * 1e6
        number, reserve = 0, list[int]()
        while alive:
            number += 1
            rounds = max(1, math.ceil(math.log2(len(alive) / KEEP)))  # this and those to come
            share_us = (budget_us - self.spent_us) / rounds
            shortest_us = sum(max(SAMPLE_US, self.us[a]) for a in (0, *alive))
            repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(share_us / shortest_us)))
            sample_us = share_us / repeats / (len(alive) + 1)
            sample_us = min(max(sample_us, SAMPLE_US), LONGEST * SAMPLE_US)
            for _ in range(repeats):
                alive = yield from self.repeat(alive, sample_us)
            if not alive:
                break
            times = trimmed_means(np.asarray(self.rows)[:, [0, *alive]]).tolist()
            self.us |= zip((0, *alive), times, strict=True)
            ranked = self._rank(alive)
            self._drop((a for a in alive if a not in ranked), "no gain in the screen")
            if rounds == 1:
                return ranked + reserve
            keep = max(KEEP, math.ceil(len(alive) / 2))
            self._drop(ranked[keep:], f"round {number} of the screen")
            alive, reserve = ranked[:keep], ranked[keep:] + reserve
        return reserve

    def verify(self, ranked: list[int]) -> Stage:
        """Whole verification, best first, until KEEP have passed."""
        passed: list[int] = []
        while ranked and len(passed) < KEEP:
            missing = KEEP - len(passed)
            batch, ranked = ranked[:missing], ranked[missing:]
            self.dropped = {a: v for a, v in self.dropped.items() if a not in batch}
            self.rng.shuffle(batch)
            yield from self._ask([Ask(WHOLE, a) for a in batch])
            passed += self._left(batch)
        self._drop(self._left(ranked), "last round of the screen")
        return sorted(passed)

    def confirm(self, finalists: list[int]) -> Stage:
        """Fresh samples until the planned end, which follows from spread and time, not from ratios.

        A finalist that surely does not clear the least gain is dropped on the way; a winner is
        declared at the end alone.
        """
        self.entered, self.rows, self.places = len(finalists), [], []
        budget_us = self.task.seconds * 1e6
        each_us = max(0.0, budget_us - self.spent_us) / (len(finalists) + 1)
        sample_us = max(SAMPLE_US, each_us / MANY)
        if self.task.sustained:
            self.regime = "sustained"
            stretches = (SIGMAS * math.sqrt(2) * self.spread / PRECISION) ** 2 / WORTH
            stretches = min(max(stretches, STRETCHES[0]), STRETCHES[1])
            sample_us = max(SAMPLE_US, min(each_us / stretches, STRETCH_US))
        look, wanted = PILOT, 0
        while finalists:
            finalists = yield from self.repeat(finalists, sample_us)
            done = len(self.rows)
            next_us = sum(max(sample_us, self.us[a]) for a in (0, *finalists))
            over = done >= MIN_CONFIRM and self.spent_us + next_us > budget_us
            if done < look and not over:
                continue
            for a in finalists:
                if self._interval(a, FUTILE).high < 1 + self.task.min_gain:
                    self._drop([a], "no gain when confirmed")
            finalists = self._left(finalists)
            # Half of an interval of 68 % is about a standard error.
            error = max((self._interval(a, 0.68).half_width for a in finalists), default=0.0)
            wanted = wanted or max(MIN_CONFIRM, math.ceil(done * (SIGMAS * error / PRECISION) ** 2))
            if over or done >= wanted:
                break
            look = min(wanted, done + max(PILOT, done // 4))
        self.finalists = finalists
        return finalists

    def repeat(self, algos: list[int], sample_us: float) -> Stage:
        """Time the default and each of `algos` once, in random order; those that are left."""
        order = [0, *algos]
        self.rng.shuffle(order)
        row, places = [math.nan] * self.count, [0] * self.count
        for place, a in enumerate(order):
            places[a] = place
        launches = {a: max(1, round(sample_us / self.us[a])) for a in order}
        if self.regime == "sustained":
            for a in order:
                times = yield from self._ask(_stretch(a, launches[a], sample_us))
                row[a] = trimmed_mean(times)
        else:
            times = yield from self._ask([Ask(TIME, a, launches[a]) for a in order])
            for a, us in zip(order, times, strict=True):
                row[a] = us
        self.rows.append(row)
        self.places.append(places)
        return self._left(algos)

    def verdicts(self) -> list[Verdict]:
        chosen = self._chosen()
        verdicts = []
        for a in range(self.count):
            if a == 0:
                times = [row[0] for row in self.rows]
                one = Interval(1.0, 1.0, 1.0)
                verdict = Verdict("default", "", trimmed_mean(times), one, len(times), self.regime)
            elif a in self.failed:
                verdict = Verdict("failed", self.failed[a])
            elif a in self.dropped:
                verdict = self.dropped[a]
            else:
                verdict = self._verdict(a, "winner" if a == chosen else "finalist")
            verdicts.append(verdict)
        return verdicts

    def _ask(self, asks: list[Ask]) -> Generator[list[Ask], list[Answer], list[float]]:
        answers = yield asks
        for ask, answer in zip(asks, answers, strict=True):
            reason = answer.reason
            if not reason and ask.kind != WHOLE and not 0 < answer.us < math.inf:
                reason = f"a time of {answer.us:g} microseconds cannot be"
            if reason and ask.algo == 0:
                raise BackendError(f"the default failed: {reason}")
            if reason:
                self.failed.setdefault(ask.algo, reason)
            elif ask.kind != WHOLE:
                self.spent_us += answer.us * (2 if ask.kind == CHECK else ask.launches + ask.settle)
        return [answer.us for answer in answers]

    def _left(self, algos: Iterable[int]) -> list[int]:
        return [a for a in algos if a not in self.failed and a not in self.dropped]

    def _rank(self, alive: Sequence[int]) -> list[int]:
        """Those that may be faster, the best first; of equals one in three goes by its index.

        Where several beat the default beyond doubt and the best of them does not clear the
        others, those of the lowest indices, one of which `choose` would take, get their third.
        """
        entrants = [0, *alive]
        logs, at = np.log(np.asarray(self.rows)[:, entrants]), np.asarray(self.places)[:, entrants]
        centres, self.spread = _effects(logs, np.argsort(at, axis=1))
        doubt = SIGMAS * self.spread * math.sqrt(2 / len(logs))
        gains = dict(zip(alive, (centres[0] - centres[1:]).tolist(), strict=True))
        least = math.log1p(self.task.min_gain)
        ranked = sorted((a for a in alive if gains[a] + doubt > least), key=lambda a: -gains[a])
        if not ranked:
            return []
        best = gains[ranked[0]]
        surely = [a for a in ranked if gains[a] - doubt > least]
        equal = sorted(a for a in surely if gains[a] + doubt + least >= best)
        order: list[int] = []
        for a in ranked:
            if a not in order:
                order.append(a)
            if len(order) % KEEP == KEEP - 1:
                order += [e for e in equal if e not in order][:1]
        return order

    def _interval(self, algo: int, confidence: float) -> Interval:
        return ratio_interval([row[0] / row[algo] for row in self.rows], confidence)

    def _verdict(self, algo: int, status: str, reason: str = "") -> Verdict:
        """By the repeats since the last stage began in which the algorithm took part."""
        confidence = 1 - (1 - CONFIDENCE) / max(self.entered, 1)
        time_us = trimmed_mean([row[algo] for row in self.rows])
        interval, samples = self._interval(algo, confidence), len(self.rows)
        return Verdict(status, reason, time_us, interval, samples, self.regime)

    def _drop(self, algos: Iterable[int], reason: str) -> None:
        self.dropped |= {a: self._verdict(a, "dropped", reason) for a in algos}

    def _chosen(self) -> int | None:
        confidence = 1 - (1 - CONFIDENCE) / max(self.entered, 1)
        intervals = {a: self._interval(a, confidence) for a in sorted(self.finalists)}
        return choose(intervals, self.task.min_gain)


def _effects(logs: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, float]:
    """Each column's typical logarithm against the machine's state, and the spread about it.

    `logs`: a row a repeat, a column an algorithm; `order`: the columns in the order in which they
    were timed. The state at a sample is the median of what its neighbours in time have over their
    own algorithms' typical values, and so follows a clock that drifts or falls within a repeat.
    """
    effects = trimmed_means(logs - np.median(logs, axis=1, keepdims=True))
    width = min(NEIGHBOURS, order.size - 1 + order.size % 2)
    for _ in range(2):
        rest = np.take_along_axis(logs - effects, order, axis=1).ravel()
        padded = np.pad(rest, width // 2, mode="edge")
        state = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
        level = np.empty_like(logs)
        np.put_along_axis(level, order, state.reshape(logs.shape), axis=1)
        effects = trimmed_means(logs - level)
    return effects, 1.4826 * float(np.median(np.abs(logs - level - effects)))


def _stretch(algo: int, launches: int, stretch_us: float) -> list[Ask]:
    """The asks of a stretch: chunks of the launches, settling before the first."""
    settle = launches // SETTLE
    counted = launches - settle
    longest = max(1, int(stretch_us * (1 - 1 / SETTLE) / (SAMPLE_US / 2)))
    chunks = min(CHUNKS, counted, longest)
    ends = [counted * i // chunks for i in range(chunks + 1)]
    sizes = [end - start for start, end in pairwise(ends)]
    return [Ask(TIME, algo, size, 0 if i else settle) for i, size in enumerate(sizes)]
