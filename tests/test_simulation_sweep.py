"""The sweep on a simulated clock: how often it is wrong, and what it finds, for what price.

A hundred candidates, SECONDS of timing; the clock has spikes and autocorrelated noise and, where
the world is rough, drifts and throttles. bench/bench_sweep_simulation.py prints the whole table.
"""

from __future__ import annotations

import clock
import numpy as np
import pytest
import scripted
from scipy.stats import beta

from gemmtune.sweep.search import TIME, Ask, Task, search

SECONDS, SAMPLES = 6.0, 10_000  # for a Gemm: asked for, and samples that these may come to
CANDIDATES = 100


def upper_limit(events: int, runs: int) -> float:
    """Clopper and Pearson's upper 95 % limit of a rate."""
    return float(beta.ppf(0.95, events + 1, runs - events))


def outcomes(
    runs: int,
    world: clock.World,
    *,
    gain: float = 0.0,
    candidates: int = CANDIDATES,
    min_gain: float = 0.005,
    seconds: float = SECONDS,
) -> tuple[int, int]:
    """How many sweeps found the one candidate that gains, how many took another."""
    found = wrong = 0
    for seed in range(runs):
        us, target = [100.0] * candidates, 1 + seed % (candidates - 1)
        us[target] /= 1 + gain
        device = clock.Clock(us, seed, world)
        task = Task(scripted.gemm(31), seconds, bool(seed % 2), min_gain, seed)
        verdicts = clock.run(search(candidates, task), device)
        won = [i for i, v in enumerate(verdicts) if v.status == "winner"]
        found += gain > 0 and won == [target]
        wrong += bool(won) and (gain == 0 or won != [target])
        assert device.seconds <= 1.05 * seconds and device.asked <= SAMPLES
    return found, wrong


@pytest.mark.parametrize("world", [clock.QUIET, clock.ROUGH], ids=["quiet", "rough"])
def test_the_clock_has_the_quartiles_that_were_measured(world):
    ratios = []
    for seed in range(10):
        asks = [Ask(TIME, 0, 1)] * 4096
        times = np.array([a.us for a in clock.Clock([1.0], seed, world).answer(asks)])
        ratios.append(times[::2] / times[1::2])
    quartiles = np.quantile(np.concatenate(ratios), [0.25, 0.75])
    assert quartiles == pytest.approx([0.986, 1.015], abs=0.002)
    logs = np.clip(np.log(times / np.median(times)), -0.05, 0.05)  # spikes aside
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] > 0.2


@pytest.mark.slow
def test_sweeps_without_a_gain_keep_the_default():
    """bench/bench_sweep_simulation.py runs a thousand of each world."""
    _, wrong = outcomes(400, clock.ROUGH)
    assert wrong <= 2 and upper_limit(wrong, 400) <= 0.016


@pytest.mark.slow
@pytest.mark.parametrize("world", [clock.QUIET, clock.ROUGH], ids=["quiet", "rough"])
@pytest.mark.parametrize(("gain", "share"), [(0.015, 0.9), (0.01, 0.6)])
def test_small_gains_are_found_among_99_that_have_none(world, gain, share):
    found, wrong = outcomes(100, world, gain=gain)
    assert found >= share * 100 and wrong <= 1


@pytest.mark.slow
def test_without_a_least_gain_the_confidence_alone_keeps_the_default():
    """The hardest case: every candidate is exactly as good as what a winner has to beat."""
    _, wrong = outcomes(600, clock.ROUGH, candidates=12, min_gain=0.0, seconds=0.5)
    assert upper_limit(wrong, 600) <= 0.02  # half of 1 %, the side that favours a candidate


def test_the_interval_of_the_ratio_holds_under_drift_and_throttling():
    missed = 0
    for seed in range(600):
        device = clock.Clock([100.0, 98.0], seed, clock.ROUGH)
        task = Task(scripted.gemm(31), 0.4, bool(seed % 2), 0.005, seed)
        verdict = clock.run(search(2, task), device)[1]
        missed += not verdict.ratio.low <= 100 / 98 <= verdict.ratio.high
    assert upper_limit(missed, 600) <= 0.025  # an interval of 99 %


def test_two_sweeps_agree_on_which_of_equals_to_take():
    chosen = set()
    for seed in range(40):
        us = [100.0, 130.0, *[80.0] * 5, 100.0, *[90.0] * 4]
        task = Task(scripted.gemm(31), SECONDS, bool(seed % 2), 0.005, seed)
        verdicts = clock.run(search(12, task), clock.Clock(us, seed, clock.ROUGH))
        chosen.add(next(i for i, v in enumerate(verdicts) if v.status == "winner"))
    assert chosen == {2}
