"""Disturbances of a replay, noticed and named; clean replays raise no alarm."""

import numpy as np
import pytest
from clock_steps import SCENARIOS, Job, Noise, replay

from gemmtune.replay import noise
from gemmtune.replay.analyse import Rank, Result, Step, analyse
from gemmtune.replay.plan import Plan

PLAN = Plan(block=9, pairs=60)


def analysed(model: Noise, seed: int, gain: float = 0.02) -> Result:
    rounds, us = replay(PLAN._replace(seed=seed), Job(model, gain, seed))
    steps = [Step(i, float(t), {}) for i, t in enumerate(us) if i]
    return analyse(PLAN, [Rank(0, steps, rounds)], [])


@pytest.mark.parametrize("name", ["clean", "long memory", "slow settling"])
def test_at_most_one_clean_replay_in_twenty_raises_an_alarm(name: str) -> None:
    alarms = [lines for s in range(100) if (lines := analysed(SCENARIOS[name], s).noise)]
    assert len(alarms) <= 5, alarms


def test_a_drift_is_noticed_and_named() -> None:
    for seed, rise in enumerate((0.06, -0.06) * 5):
        (line,) = analysed(Noise(drift=rise), seed).noise
        assert f"the step time {'rose' if rise > 0 else 'fell'} by " in line
        assert "(drift)" in line and "--warmup 50" in line


def test_a_changed_clock_is_noticed_and_the_step_named() -> None:
    found = analysed(Noise(), 1)
    firsts = [b.block.first for b in found.blocks]
    for place, size in ((40, 0.08), (90, -0.08)):
        values = np.array([b.value_us for b in found.blocks])
        values[place:] *= 1 + size
        tuned = [b.block.tuned for b in found.blocks]
        readings = {f: {"mhz": 3000.0 - 300 * (f > firsts[place])} for f in firsts}
        (line,) = noise.describe(firsts, values, tuned, [], {"here": [readings]})
        assert f"by {'+' if size > 0 else '-'}" in line and "changed clock" in line
        step = int(line.split("at step ")[1].split(",")[0])
        assert abs(firsts.index(step) - place) <= 3
        if size > 0:
            assert "as the clock went from 3000 to 2700 MHz" in line


def test_throttling_is_noticed_more_often_than_not() -> None:
    model = Noise(throttle=1 / 400, throttled=0.1)
    assert sum(any("clock" in x for x in analysed(model, s).noise) for s in range(20)) >= 14


def test_a_noisy_neighbour_is_noticed_and_named_with_what_is_known_of_it() -> None:
    found = analysed(Noise(outlier=0.05), 3)
    (line,) = found.noise
    assert "of the steps took more than 1.3 times as long" in line and "neighbour" in line
    steps = [b.steps_us for b in found.blocks]
    used = {0: {"all_s": 0.0, "busy_s": 0.0, "steal_s": 0.0, "cpu_s": 0.0}}
    used[9] = {"all_s": 100.0, "busy_s": 80.0, "steal_s": 5.0, "cpu_s": 20.0}
    ranks = [used, {i: {**r, "cpu_s": r["cpu_s"] / 2} for i, r in used.items()}]
    stolen, others = noise.describe([], [], [], steps, {"node7": ranks})
    assert stolen.startswith("other virtual machines took 5 % of the processor time of node7")
    assert "processes other than the ranks took 50 % of node7" in others


def test_a_large_effect_of_the_table_is_no_disturbance() -> None:
    assert analysed(Noise(), 5, gain=0.5).noise == []
    assert analysed(Noise(), 5, gain=-0.3).noise == []


def test_nothing_is_read_into_a_few_blocks() -> None:
    assert noise.describe([3, 8], [100.0, 150.0], [False, True], [[100.0], [150.0]], {}) == []
    assert noise.describe([], [], [], [], {}) == []
