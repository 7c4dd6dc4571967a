"""A simulated device: it answers the sweep's questions with the noise that devices have.

A sample's time is the algorithm's true time, times the machine's state, times its own noise. The
state wanders (autocorrelated of first order), and in a rough world it drifts, too, and falls to
lower clocks for a while. Now and then a sample is 10 to 100 % longer. The ratio of two neighbouring
samples of one algorithm has the quartiles 0.986 and 1.015, as steps of a job on an H200 had.

An answer depends on the seed, the question and its number alone: who replays the first n answers
gets the same ones from there on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from gemmtune.sweep.search import CHECK, WHOLE, Answer, Ask, Verdict

BLOCK = 4096  # samples drawn at a time


class World(NamedTuple):
    """How the times of a device vary."""

    own: float = 0.0111  # standard deviation of a sample's own noise, of log times
    state: float = 0.0135  # of the machine's state
    memory: float = 0.7  # correlation of the state with that of the sample before
    spikes: float = 0.02  # share of samples that are 10 to 100 % longer
    drift: float = 0.0  # of the state over 10,000 samples, there and back
    throttled: float = 0.0  # share of the time at lower clocks
    clocks: float = 0.75  # the lower clocks, as a share


QUIET = World()
ROUGH = World(drift=0.05, throttled=0.2)
THROTTLED_SAMPLES = 150  # how long lower clocks last, on average


class Clock:
    """Answers asks in their order. `us`: each algorithm's true time; `asked`: samples so far."""

    def __init__(self, us: Sequence[float], seed: int, world: World = QUIET) -> None:
        self.us, self.world, self.asked, self.seconds = us, world, 0, 0.0
        self._seed, self._factors = seed, []
        self._state, self._low = 0.0, False

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Answer:
        if ask.kind == WHOLE:
            return Answer()
        if self.asked >= len(self._factors):
            self._factors += self._draw(len(self._factors) // BLOCK)
        us = self.us[ask.algo] * self._factors[self.asked]
        self.asked += 1
        self.seconds += us * (2 if ask.kind == CHECK else ask.launches + ask.settle) / 1e6
        return Answer(us)

    def _draw(self, block: int) -> list[float]:
        w, rng = self.world, np.random.default_rng([self._seed, block])
        steps = rng.normal(0, w.state * np.sqrt(1 - w.memory**2), BLOCK).tolist()
        logs = rng.normal(0, w.own, BLOCK)
        spiked = rng.random(BLOCK) < w.spikes
        logs[spiked] += np.log(rng.uniform(1.1, 2.0, int(spiked.sum())))
        if not block:
            self._state = rng.normal(0, w.state)
            self._low = rng.random() < w.throttled
        state = np.empty(BLOCK)
        now = self._state
        for i, step in enumerate(steps):
            now = w.memory * now + step
            state[i] = now
        self._state = now
        if w.throttled:
            state -= np.log(w.clocks) * self._periods(rng)
        if w.drift:
            numbers = np.arange(block * BLOCK, (block + 1) * BLOCK)
            state += w.drift / 2 * np.sin(np.pi * numbers / 1e4 + self._seed)
        return np.exp(logs + state).tolist()

    def _periods(self, rng: np.random.Generator) -> np.ndarray:
        low = np.zeros(BLOCK, bool)
        at = 0
        while at < BLOCK:
            mean = THROTTLED_SAMPLES * (1 if self._low else 1 / self.world.throttled - 1)
            last = at + 1 + int(rng.exponential(mean))
            low[at:last] = self._low
            if last <= BLOCK:
                self._low = not self._low
            at = last
        return low


def run(asks: Generator[list[Ask], list[Answer], list[Verdict]], clock: Clock) -> list[Verdict]:
    """The verdicts of a search whose questions the clock answers."""
    batch = next(asks)
    while True:
        try:
            batch = asks.send(clock.answer(batch))
        except StopIteration as end:
            return end.value
