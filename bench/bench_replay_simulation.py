"""Replays of simulated jobs: how often the interval covers the true ratio, and what it takes.

Prints a table; the noise is that of tests/clock_steps.py. Coverage is of a table that makes the
step 1 % faster, claims are of a table of defaults, judged as a replay's report does.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from clock_steps import SCENARIOS, Job, claims, replay

from gemmtune.replay.decide import ratios
from gemmtune.replay.plan import COMPARE, Plan, pairs_of
from gemmtune.stats import bootstrap_interval

RUNS = 2000
SEEDS = 100_000  # from here on: none that the protocol was made with
GAIN = 0.01


def main() -> None:
    plan = Plan()
    print(
        f"{RUNS} replays of each kind: steps of 60 ms, table {100 * GAIN:g} % faster, precision"
        f" {plan.precision:g} %, at most {plan.max_pairs} pairs; A/A: a table of defaults"
    )
    print(
        f"{'scenario':15}{'covered %':>10}{'width %':>9}{'reached %':>11}{'pairs':>7}{'steps':>7}"
        f"{'A/A claims %':>14}"
    )
    for name, noise in SCENARIOS.items():
        covered, claimed, widths, pairs, steps = 0, 0, [], [], []
        for seed in range(SEEDS, SEEDS + RUNS):
            rounds, us = replay(plan._replace(seed=seed), Job(noise, GAIN, seed))
            interval = bootstrap_interval(ratios(rounds, us, COMPARE))
            covered += interval.low <= 1 + GAIN <= interval.high
            widths.append(100 * interval.precision)
            pairs.append(pairs_of(rounds, COMPARE))
            steps.append(len(us))
            claimed += claims(noise, RUNS + seed)
        reached = np.mean(np.array(widths) <= plan.precision)
        print(
            f"{name:15}{100 * covered / RUNS:10.1f}{np.median(widths):9.2f}{100 * reached:11.1f}"
            f"{np.median(pairs):7.0f}{np.median(steps):7.0f}{100 * claimed / RUNS:14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
