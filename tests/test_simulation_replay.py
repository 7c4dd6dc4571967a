"""The whole protocol on simulated clocks: its intervals cover the truth, its width is reached.

bench/bench_replay_simulation.py runs the same with 2,000 replays of each kind.
"""

import math

import numpy as np
import pytest
from clock_steps import SCENARIOS, Job, claims, replay

from gemmtune.replay.decide import ratios
from gemmtune.replay.plan import COMPARE, Plan, pairs_of
from gemmtune.stats import bootstrap_interval

RUNS = 200


@pytest.mark.parametrize("name", SCENARIOS)
def test_intervals_cover_the_true_ratio_and_come_to_the_width_asked_for(name: str) -> None:
    covered = reached = 0
    for seed in range(RUNS):
        plan = Plan(seed=seed)
        rounds, us = replay(plan, Job(SCENARIOS[name], 0.01, seed))
        interval = bootstrap_interval(ratios(rounds, us, COMPARE))
        covered += interval.low <= 1.01 <= interval.high
        narrow = 100 * interval.precision <= plan.precision
        assert narrow or pairs_of(rounds, COMPARE) == plan.max_pairs
        reached += narrow
    # Between 93 and 97 %, and three standard deviations of as many runs.
    slack = 3 * math.sqrt(0.95 * 0.05 / RUNS)
    assert 0.93 - slack <= covered / RUNS <= 0.97 + slack
    assert reached >= 0.9 * RUNS


def test_a_table_of_defaults_is_seldom_called_a_difference() -> None:
    names = ("clean", "long memory", "all")
    claimed = sum(claims(SCENARIOS[name], seed) for name in names for seed in range(RUNS))
    runs = RUNS * len(names)
    assert 0 < claimed <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)


def test_the_noise_model_has_the_quartiles_that_were_measured() -> None:
    us = Job(SCENARIOS["clean"]._replace(memory=0.0), 0.0, 1).run(np.zeros(20_000))
    low, high = np.quantile(us[::2] / us[1::2], (0.25, 0.75))
    assert low == pytest.approx(0.986, abs=0.001) and high == pytest.approx(1.015, abs=0.001)


def test_a_bootstrap_interval_is_repeatable_and_widens_with_resemblance() -> None:
    shocks = np.random.default_rng(1).normal(0, 0.01, 60)
    walk = np.exp(np.repeat(shocks[:15], 4))  # each value four times in a row
    mixed = np.random.default_rng(2).permutation(walk)
    assert bootstrap_interval(walk) == bootstrap_interval(walk.tolist())
    assert bootstrap_interval(walk).half_width > 1.15 * bootstrap_interval(mixed).half_width
    assert bootstrap_interval([1.0] * 9) == (1.0, 1.0, 1.0)
