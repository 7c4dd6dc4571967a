"""A simulated job: step times with the noise of real ones, for the replay's protocol to run on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.signal import lfilter

from gemmtune.gemm import Gemm
from gemmtune.replay.analyse import Calls, Rank, Step, analyse
from gemmtune.replay.decide import following, ratios
from gemmtune.replay.plan import COMPARE, END, Plan, Round, beginning
from gemmtune.replay.verdict import judge
from gemmtune.stats import bootstrap_interval

GEMM = Gemm(256, 64, 128, "T", "N", *["float32"] * 3, "-", 128, 128, 256)


class Noise(NamedTuple):
    """What disturbs the steps, as shares of a step's time.

    `sd` and `memory` are an autoregressive noise's: its standard deviation, and how much of a
    step's deviation the next one keeps. With 1.5 % and none, the ratio of two adjacent steps has
    quartiles of 0.986 and 1.014, as was measured on an H200. `drift` is the rise over 1,000 steps.
    A throttling comes with the chance `throttle` at each step, and slows all by `throttled` until
    the next one. `outlier` is the chance of a step that takes up to `outlying` times as long.
    After a switch the difference of the arms comes in over about `lag` steps.
    """

    sd: float = 0.015
    memory: float = 0.5
    drift: float = 0.0
    throttle: float = 0.0
    throttled: float = 0.06
    outlier: float = 0.0
    outlying: float = 2.0
    lag: float = 0.0


SCENARIOS = {
    "clean": Noise(),
    "long memory": Noise(memory=0.95),
    "drift": Noise(drift=0.08),
    "throttling": Noise(throttle=1 / 300),
    "outliers": Noise(outlier=0.02),
    "slow settling": Noise(lag=1.0),
    "all": Noise(memory=0.8, drift=0.04, throttle=1 / 300, outlier=0.02, lag=1.0),
}


class Job:
    """A job whose steps take `step_us`, and `gain` less of it with the table on."""

    def __init__(self, noise: Noise, gain: float, seed: int, step_us: float = 60_000) -> None:
        self._noise = noise
        self._gain = math.log1p(gain)
        self._random = np.random.default_rng(seed)
        self._us = step_us
        self._state = self._random.normal(0, noise.sd)
        self._slow = 0.0
        self._arm = 0.0
        self.steps = 0

    def run(self, tuned: Sequence[bool] | np.ndarray) -> np.ndarray:
        """The times of the next steps, in microseconds, of these arms."""
        noise, random = self._noise, self._random
        n = len(tuned)
        shocks = random.normal(0, noise.sd * math.sqrt(1 - noise.memory**2), n)
        logs, (state,) = lfilter([1], [1, -noise.memory], shocks, zi=[noise.memory * self._state])
        self._state = state / noise.memory if noise.memory else 0.0
        arm = np.asarray(tuned, dtype=float)
        if noise.lag:
            keep = math.exp(-1 / noise.lag)
            arm, (state,) = lfilter([1 - keep], [1, -keep], arm, zi=[keep * self._arm])
            self._arm = state / keep
        logs -= self._gain * arm
        logs += noise.drift / 1000 * (self.steps + np.arange(n))
        if noise.throttle:
            turns = np.cumsum(random.random(n) < noise.throttle) + (self._slow > 0)
            slow = noise.throttled * (turns % 2)
            logs += slow
            self._slow = slow[-1]
        if noise.outlier:
            hit = random.random(n) < noise.outlier
            logs += hit * np.log(random.uniform(1.1, noise.outlying, n))
        self.steps += n
        return self._us * np.exp(logs)


def replay(plan: Plan, job: Job) -> tuple[list[Round], np.ndarray]:
    """Run the protocol on a simulated job: its rounds, and the time of each step by its index."""
    rounds = [beginning(plan)]
    parts: list[np.ndarray] = []
    while rounds[-1].kind != END:
        now = rounds[-1]
        tuned = np.repeat([s == "b" for s in now.sides] or [False], now.block)
        if now.kind == "control":
            tuned[:] = False
        parts.append(job.run(tuned))
        us = np.concatenate(parts)
        us[0] = np.nan  # nothing says when the first step began
        rounds.append(following(plan, rounds, us))
    return rounds, us


def claims(noise: Noise, seed: int) -> bool:
    """Whether the replay of a table of defaults ends in a difference."""
    rounds, us = replay(Plan(seed=seed), Job(noise, 0.0, seed))
    interval = bootstrap_interval(ratios(rounds, us, COMPARE))
    if interval.low <= 1 <= interval.high:
        return False  # no claim follows from it: the full analysis, which takes long, is spared
    rows = {0: Calls(0, 0.0, 1, 5.0)}
    tuned = {i for r in rounds if r.kind == COMPARE for i in range(r.first, r.end) if r.tuned(i)}
    steps = [Step(i, float(t), rows if i in tuned else {}) for i, t in enumerate(us) if i]
    found = analyse(Plan(), [Rank(0, steps, rounds)], [(2, GEMM, "aten")])
    return judge(found).kind in ("faster", "slower")
