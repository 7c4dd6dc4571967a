"""How often the sweep is wrong and what it finds, on a simulated clock (tests/clock.py).

Sweeps of a hundred candidates of 100 us, all equal or with one that gains, the target another one
each time. Worlds: quiet has spikes and autocorrelated noise; rough drifts and throttles as well.
Stages: sustained confirms in stretches, sampled (a Gemm that matters less) in samples. Prints how
many sweeps chose the candidate that gains, how many another (for no gain: any), the upper 95 %
limit of that rate (Clopper and Pearson), and the seconds and samples that the sweeps asked for.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import beta

from gemmtune.gemm import Gemm
from gemmtune.sweep.search import Task, search

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import clock

CANDIDATES = 100
GEMM = Gemm(64, 64, 64, "N", "N", "float32", "float32", "float32", "-", 64, 64, 64)
# Seconds of the task, true gain of one candidate, least gain for a winner, sweeps.
CASES = (
    (6.0, 0.0, 0.005, 1000),
    (6.0, 0.0, 0.0, 500),
    (6.0, 0.005, 0.005, 250),
    (6.0, 0.01, 0.005, 250),
    (6.0, 0.015, 0.005, 250),
    (3.0, 0.015, 0.005, 100),
    (3.0, 0.01, 0.005, 100),
    (20.0, 0.01, 0.005, 100),
)


def main() -> None:
    print(
        f"{'world':6} {'stage':9} {'s':>4} {'gain':>6} {'least':>7} {'sweeps':>6} {'found':>7}"
        f" {'wrong':>5} {'limit':>7} {'s used, mean':>12} {'most':>6}"
        f" {'samples, mean':>13} {'most':>6}"
    )
    worlds = {"quiet": clock.QUIET, "rough": clock.ROUGH}
    for case, (name, world), sustained in product(CASES, worlds.items(), (True, False)):
        seconds, gain, least, runs = case
        found = wrong = 0
        used, samples = [], []
        for seed in range(runs):
            us, target = [100.0] * CANDIDATES, 1 + seed % (CANDIDATES - 1)
            us[target] /= 1 + gain
            device = clock.Clock(us, seed, world)
            task = Task(GEMM, seconds, sustained, least, seed)
            verdicts = clock.run(search(CANDIDATES, task), device)
            won = [i for i, v in enumerate(verdicts) if v.status == "winner"]
            found += won == [target]
            wrong += bool(won) and (gain <= least or won != [target])
            used.append(device.seconds)
            samples.append(device.asked)
        limit = beta.ppf(0.95, wrong + 1, runs - wrong)
        right = f"{found / runs:7.1%}" if gain > least else f"{'-':>7}"
        print(
            f"{name:6} {'sustained' if sustained else 'sampled':9} {seconds:4.0f} {gain:6.1%}"
            f" {least:7.1%} {runs:6} {right} {wrong:5} {limit:7.2%}"
            f" {np.mean(used):12.2f} {max(used):6.2f} {np.mean(samples):13.0f} {max(samples):6}",
            flush=True,
        )


if __name__ == "__main__":
    main()
