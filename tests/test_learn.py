"""The search where there are more algorithms than it looks at: it learns from what it timed."""

from __future__ import annotations

import itertools
import random

import pytest

from gemmtune.gemm import Gemm
from gemmtune.sweep import search
from gemmtune.sweep.learn import Guide
from gemmtune.sweep.search import CHECK, Answer, Task

GEMM = Gemm(64, 64, 64, "T", "N", *("bfloat16",) * 3, "-", 64, 64, 64, api="lt")
SPACE = {"tile": range(20), "cluster": range(9), "custom": range(8), "splitk": range(1, 4)}
BEST = {"tile": 13, "cluster": 4, "custom": 6, "splitk": 1}


def pool(size: int = 1000, seed: int = 0) -> list[dict[str, int]]:
    every = [dict(zip(SPACE, v, strict=True)) for v in itertools.product(*SPACE.values())]
    return random.Random(seed).sample(every, size)


def spell(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def us(config: dict[str, int]) -> float:
    """A landscape: every setting has its own cost, tile and cluster suit each other or do not."""
    rng = random.Random(f"{config['tile']} {config['cluster']}")
    slower = 1.0
    for name, weight in (("tile", 0.5), ("cluster", 0.1), ("custom", 0.1), ("splitk", 0.3)):
        own = random.Random(f"{name}{config[name]}").random() if config[name] != BEST[name] else 0
        slower += weight * own
    return 100 * slower * (1 + 0.02 * rng.random())


def run(configs: list[dict[str, int]], seed: int = 0, broken: set[int] = frozenset()):
    """The verdicts, and which were looked at; the clock is exact."""
    task = Task(GEMM, 3.0, False, 0.005, seed)
    questions = search.search(len(configs), task, [spell(c) for c in configs])
    seen, given = set(), None
    while True:
        try:
            asks = next(questions) if given is None else questions.send(given)
        except StopIteration as stop:
            return stop.value, seen
        seen |= {ask.algo for ask in asks if ask.kind == CHECK}
        given = [
            Answer(0.0, "broken") if ask.algo in broken else Answer(us(configs[ask.algo]))
            for ask in asks
        ]


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_nearly_the_best_of_a_thousand_by_looking_at_a_third(seed):
    configs = pool(seed=seed)
    verdicts, seen = run(configs, seed)
    assert search.FEW < len(seen) <= search.MOST
    won = next(i for i, v in enumerate(verdicts) if v.status == "winner")
    ranks = sorted(range(len(configs)), key=lambda i: us(configs[i]))
    assert us(configs[won]) <= 1.01 * us(configs[ranks[0]])


def test_it_learns_more_than_chance_would_find():
    better = 0
    for seed in range(6):
        configs = pool(seed=seed)
        _, seen = run(configs, seed)
        drawn = random.Random(seed).sample(range(len(configs)), len(seen))
        better += min(us(configs[i]) for i in seen) < min(us(configs[i]) for i in drawn)
    assert better >= 4


def test_the_same_seed_asks_the_same():
    configs = pool()
    assert run(configs, 1) == run(configs, 1)
    assert run(configs, 1)[1] != run(configs, 2)[1]


def test_the_librarys_own_choices_are_always_looked_at():
    _, seen = run(pool())
    assert seen >= set(range(search.HEAD))


def test_what_fails_is_out_and_its_like_is_left_alone():
    configs = pool()
    broken = {i for i, c in enumerate(configs) if c["tile"] == BEST["tile"] and i}
    verdicts, seen = run(configs, broken=broken)
    assert {verdicts[i].status for i in broken & seen} == {"failed"}
    assert len(broken & seen) < len(seen) / 10


def test_what_was_not_looked_at_is_untried_and_the_rest_is_not():
    verdicts, seen = run(pool())
    assert {i for i, v in enumerate(verdicts) if v.status != "untried"} == seen


def test_a_short_list_is_looked_at_in_full():
    verdicts, seen = run(pool(search.FEW))
    assert seen == set(range(search.FEW)) and "untried" not in {v.status for v in verdicts}


def test_a_guide_proposes_what_is_left_once_each():
    configs = [spell(c) for c in pool(40)]
    guide, us, rng = Guide(configs), {0: 1.0}, random.Random(0)
    while proposed := guide.next(us, 7, rng):
        assert len(set(proposed)) == len(proposed) and not set(proposed) & set(us)
        us |= dict.fromkeys(proposed, 2.0)
    assert set(us) == set(range(40))
