"""One Gemm measured from beginning to end: verify, screen, confirm. Writes rows, no files.

The backend launches and holds the clock; what to launch, and what the times mean, is decided here
and in search.py.
"""

from __future__ import annotations

import gc
import math
import random
from typing import NamedTuple

from gemmtune.backends.base import Backend, Launch, Operands
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm
from gemmtune.stats import Interval
from gemmtune.sweep import operands, search
from gemmtune.sweep.verify import Checker
from gemmtune.table import Candidate

# What a launch may raise when an algorithm does not fit; anything else is a fault of gemmtune.
LAUNCH_ERRORS = (BackendError, RuntimeError, ValueError, TypeError, MemoryError)


class Task(NamedTuple):
    """What is asked for one Gemm."""

    gemm: Gemm
    seconds: float  # of timing
    sustained: bool  # whether it matters enough to be confirmed alone, at its own clocks
    min_gain: float
    seed: int


class Timer:
    """Times the launches of a backend, each call starting at the next set of operands."""

    def __init__(self, backend: Backend, sets: list[Operands]) -> None:
        self.backend, self.sets, self.next = backend, sets, 0
        self.launches: dict[Algo, Launch] = {}

    def __call__(self, algo: Algo, count: int) -> float:
        """Mean microseconds per launch, above 0."""
        turned = self.sets[self.next :] + self.sets[: self.next]
        self.next = (self.next + count) % len(self.sets)
        return max(self.backend.time_us(self.launches[algo], turned, count), 1e-3)


def measure(backend: Backend, task: Task) -> list[Candidate]:
    """The rows of one Gemm, the default's last.

    Raises BackendError where the default itself cannot be launched or is wrong.
    """
    gemm, rng = task.gemm, random.Random(task.seed)
    algos = list(backend.algos(gemm))
    default = algos[0]
    first = operands.draw(gemm, task.seed, backend.device)
    count = operands.rotation(gemm, operands.cache_bytes(backend.device))
    timer = Timer(backend, [first])
    try:
        timer.launches[default] = backend.launcher(gemm, default)
        checker = Checker(gemm, timer.launches[default], first, task.seed)
        reason = checker.quick(timer.launches[default])
    except LAUNCH_ERRORS as e:
        raise BackendError(f"the default cannot be launched: {_line(e)}") from e
    if reason:
        raise BackendError(f"the default is wrong: {reason}")
    rows: list[Candidate] = []
    first_us = {default: _at_first_sight(timer, default)}
    for algo in algos[1:]:
        try:
            timer.launches[algo] = backend.launcher(gemm, algo)
            reason = checker.quick(timer.launches[algo])
        except LAUNCH_ERRORS as e:
            reason = f"cannot be launched: {_line(e)}"
        if reason:
            rows.append(Candidate(gemm, algo, "failed", reason))
        else:
            first_us[algo] = _at_first_sight(timer, algo)
    timer.sets = operands.copies(first, count)
    gc.collect()
    gc.disable()  # a collection in the midst of a sample would be counted as the algorithm's
    try:
        return rows + _compare(checker, timer, first_us, task, rng)
    finally:
        gc.enable()


def _compare(
    checker: Checker,
    timer: Timer,
    first_us: dict[Algo, float],
    task: Task,
    rng: random.Random,
) -> list[Candidate]:
    """Screen, verify whole, confirm; the rows of all that could be launched."""
    gemm, default = task.gemm, next(iter(first_us))
    budget_us = task.seconds * 1e6
    screen_us = budget_us * (search.SCREEN_SHARE if task.sustained else 1.0)
    if len(first_us) == 1:  # nothing to choose from: its time is still wanted
        launches = max(1, round(min(screen_us, 1e5) / search.MIN_REPEATS / first_us[default]))
        raced = search.race(
            default, [], timer, {default: launches}, repeats=search.MIN_REPEATS, rng=rng
        )
        return [_default_row(gemm, default, raced, "screen")]
    screened = search.screen(default, first_us, timer, screen_us, rng)
    rows = [
        _row(gemm, a, "dropped", reason, raced=raced, interval=_point(raced, a), regime="screen")
        for a, (reason, raced) in screened.dropped.items()
    ]
    finalists: list[Algo] = []
    for algo in screened.finalists:
        try:
            reason = checker.whole(timer.launches[algo])
        except LAUNCH_ERRORS as e:
            reason = f"cannot be launched: {_line(e)}"
        if reason:
            rows.append(Candidate(gemm, algo, "failed", reason))
        else:
            finalists.append(algo)
    raced, regime = screened.last, "screen"
    rivals = len(screened.finalists)
    if task.sustained and finalists:
        hopeful = [a for a in finalists if raced.interval(a, rivals).high > 1 + task.min_gain]
        for algo in finalists:
            if algo not in hopeful:
                interval = raced.interval(algo, rivals)
                row = _row(
                    *(gemm, algo, "dropped", "no gain in the screen"),
                    raced=raced,
                    interval=interval,
                    regime="screen",
                )
                rows.append(row)
        finalists = hopeful
        if finalists:
            times = {a: raced.time_us(a) for a in (default, *finalists)}
            left_us = budget_us - screen_us
            raced = search.confirm(default, finalists, timer, times, budget_us=left_us, rng=rng)
            regime, rivals = "sustained", len(finalists)
    intervals = {a: raced.interval(a, rivals) for a in finalists}
    winner = search.choose(intervals, task.min_gain)
    for algo in finalists:
        status = "winner" if algo == winner else "finalist"
        rows.append(
            _row(gemm, algo, status, "", raced=raced, interval=intervals[algo], regime=regime)
        )
    return [*rows, _default_row(gemm, default, raced, regime)]


def _row(
    gemm: Gemm,
    algo: Algo,
    status: str,
    reason: str,
    *,
    raced: search.Raced,
    interval: Interval,
    regime: str,
) -> Candidate:
    bounds = interval[1:] if math.isfinite(interval.high) else (0.0, 0.0)  # 0: not known
    time_us, samples = raced.time_us(algo), len(raced.ratios[algo])
    return Candidate(
        *(gemm, algo, status, reason, time_us),
        *(interval.ratio, *bounds, samples, regime),
    )


def _default_row(gemm: Gemm, algo: Algo, raced: search.Raced, regime: str) -> Candidate:
    samples = len(raced.times_us[algo])
    return Candidate(
        *(gemm, algo, "default", "", raced.time_us(algo), 1.0, 1.0, 1.0, samples, regime)
    )


def _point(raced: search.Raced, algo: Algo) -> Interval:
    return raced.interval(algo, len(raced.ratios))


def _at_first_sight(timer: Timer, algo: Algo) -> float:
    """The better of two launches: the first one also pays for what is built once."""
    return min(timer(algo, 1), timer(algo, 1))


def _line(e: BaseException) -> str:
    text = str(e).strip() or type(e).__name__
    return text.splitlines()[0][:200]
