"""The search: what it asks, what it makes of the answers; nothing is launched, no clock is read."""

from __future__ import annotations

import math
import random

import clock
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.errors import BackendError
from gemmtune.stats import Interval, ratio_interval
from gemmtune.sweep import search as searching
from gemmtune.sweep.search import CHECK, KEEP, TIME, WHOLE, Answer, Ask, Task, choose, search


def task(seconds: float = 0.2, sustained: bool = True, min_gain: float = 0.005, seed: int = 0):
    return Task(scripted.gemm(31), seconds, sustained, min_gain, seed)


def played(us: list[float], given_task: Task, world=clock.QUIET, bad=lambda number, ask: ""):
    """The verdicts, the batches asked and their answers; `bad` says why an ask fails."""
    device = clock.Clock(us, given_task.seed, world)
    asks, batches, answers = search(len(us), given_task), [], []
    batch, number = next(asks), 0
    while True:
        batches.append(batch)
        sent = device.answer(batch)
        for i, ask in enumerate(batch):
            reason = bad(number, ask)
            sent[i] = Answer(0.0, reason) if reason else sent[i]
            number += 1
        answers.append(sent)
        try:
            batch = asks.send(sent)
        except StopIteration as end:
            return end.value, batches, answers


def flat(batches: list[list[Ask]]) -> list[Ask]:
    return [ask for batch in batches for ask in batch]


@pytest.mark.parametrize("sustained", [True, False])
def test_a_planted_faster_algorithm_is_chosen(sustained):
    us = [100.0, 80.0, 100.0, 150.0, 900.0, *[101.0] * 10]
    verdicts, _, _ = played(us, task(1.0, sustained), clock.ROUGH)
    won = verdicts[1]
    assert (won.status, won.regime) == ("winner", "sustained" if sustained else "screen")
    assert 1.2 < won.ratio.low < 1.25 < won.ratio.high < 1.3 and won.samples >= 12
    assert verdicts[0].status == "default" and verdicts[0].ratio == (1, 1, 1)
    assert verdicts[4].status == "dropped" and "first sight" in verdicts[4].reason
    assert verdicts[4].ratio.high == math.inf and verdicts[4].samples == 1
    assert verdicts[3].status == "dropped" and verdicts[3].reason == "no gain in the screen"
    assert verdicts[3].ratio.ratio == pytest.approx(1 / 1.5, rel=0.05)


def test_a_gain_below_the_least_keeps_the_default():
    for seed in range(10):
        verdicts, _, _ = played([100.0, 100.0, 99.8], task(seed=seed))
        assert {v.status for v in verdicts} <= {"default", "finalist", "dropped"}
    verdicts, _, _ = played([100.0, 80.0], task(min_gain=0.3))
    assert verdicts[1].status != "winner"


def test_the_questions_come_in_stages():
    _, batches, _ = played([100.0] * 7 + [90.0] * 5, task())
    kinds = [{ask.kind for ask in batch} for batch in batches]
    assert kinds[0] == {CHECK} and sorted(a.algo for a in batches[0]) == list(range(12))
    whole = kinds.index({WHOLE})
    assert kinds.count({WHOLE}) == 1 and len(batches[whole]) == KEEP
    assert all(not ask.settle for ask in flat(batches[:whole]))
    finalists = {ask.algo for ask in batches[whole]}
    assert {ask.algo for ask in flat(batches[whole + 1 :])} == {0, *finalists}
    for stretch in batches[whole + 1 :]:
        launches = sum(ask.launches for ask in stretch)
        assert len({ask.algo for ask in stretch}) == 1
        assert [ask.settle > 0 for ask in stretch] == [True] + [False] * (len(stretch) - 1)
        assert stretch[0].settle == pytest.approx(launches / 4, abs=1)


def test_every_repeat_times_all_once_in_an_order_of_its_own_that_the_seed_gives():
    orders = []
    for seed in (0, 0, 1):
        _, batches, _ = played([100.0] * 9, task(sustained=False, seed=seed))
        repeats = [[ask.algo for ask in batch] for batch in batches if batch[0].kind == TIME]
        assert all(len(set(r)) == len(r) and 0 in r for r in repeats)
        first = [tuple(r) for r in repeats if len(r) == 9]
        assert len(first) >= 5 and len(set(first)) == len(first)
        orders.append(repeats)
    assert orders[0] == orders[1] != orders[2]


def test_samples_are_as_long_as_the_measured_time_asks_for():
    _, batches, _ = played([100.0, 250.0, 20.0, 5000.0], task(0.01, False))
    screen = [ask for ask in flat(batches) if ask.kind == TIME and ask.algo == 2]
    assert all(800 <= ask.launches * 20 <= 1200 for ask in screen)
    assert all(a.launches == 1 for a in flat(batches) if a.algo == 3 and a.kind == TIME)


def test_no_algorithms_but_the_default_give_its_time():
    verdicts, batches, _ = played([100.0], task())
    assert [v.status for v in verdicts] == ["default"] and len(batches) > 3
    assert verdicts[0].time_us == pytest.approx(100, rel=0.1)
    verdicts, _, _ = played([100.0, 900.0], task())
    assert [v.status for v in verdicts] == ["default", "dropped"]


def test_a_default_that_fails_is_an_error_whenever_it_does():
    _, batches, _ = played([100.0, 90.0], task())
    numbers = [i for i, ask in enumerate(flat(batches)) if ask.algo == 0]
    for at in (numbers[0], numbers[3], numbers[-1]):
        with pytest.raises(BackendError, match="default failed: killed by SIGSEGV"):
            played([100.0, 90.0], task(), bad=lambda i, a, at=at: "killed by SIGSEGV" * (i == at))


def test_an_answer_that_is_missing_or_no_time_is_not_taken():
    asks = search(2, task())
    next(asks)
    with pytest.raises(ValueError, match="shorter"):
        asks.send([Answer(1.0)])
    for us in (0.0, -3.0, math.nan, math.inf):
        asks = search(2, task())
        batch = next(asks)
        asks.send([Answer(us) if ask.algo else Answer(1.0) for ask in batch])
        with pytest.raises(BackendError, match="cannot be"):
            asks.send([Answer(us)])


def test_the_next_best_takes_the_place_of_a_finalist_that_is_wrong():
    us = [100.0, *[70.0] * 3, *[80.0] * 2, *[100.0] * 2]
    verdicts, _, _ = played(
        us, task(), bad=lambda i, a: "not repeatable" if a.kind == WHOLE and a.algo < 4 else ""
    )
    assert [v.status for v in verdicts[1:4]] == ["failed"] * 3
    assert all(v.reason == "not repeatable" and v.time_us == 0 for v in verdicts[1:4])
    assert verdicts[4].status == "winner"


def test_a_finalist_that_cannot_win_is_given_up():
    for seed in range(10):
        verdicts, batches, _ = played([100.0, 70.0, 99.0], task(1.0, seed=seed), clock.QUIET)
        times = [a.algo for a in flat(batches) if a.settle]
        if verdicts[2].regime == "sustained":
            assert verdicts[2].status in ("dropped", "finalist")
            assert times.count(2) <= times.count(1)
        assert verdicts[1].status == "winner"


def test_choose_takes_the_first_that_the_best_does_not_beat_beyond_doubt():
    a, b, c = Interval(1.3, 1.0, 1.6), Interval(1.1, 1.08, 1.12), Interval(1.123, 1.11, 1.136)
    assert choose({"a": a, "b": b, "c": c}, 0.005) == "b"
    assert choose({"c": c, "b": b}, 0.005) == "c"
    assert choose({"b": b, "d": Interval(1.2, 1.19, 1.21)}, 0.005) == "d"
    assert choose({"a": a}, 0.005) is None and choose({"b": b}, 0.08) is None
    assert choose({}, 0.0) is None


@pytest.mark.parametrize(("n", "least"), [(12, 0.935), (20, 0.937), (100, 0.94)])
def test_the_interval_covers_the_truth_as_often_as_it_says(n, least):
    rng = random.Random(n)
    runs = 3000
    covered = 0
    for _ in range(runs):
        spikes = (rng.choice([0] * 19 + [0.3]) * rng.choice([-1, 1]) for _ in range(n))
        interval = ratio_interval([math.exp(rng.gauss(0, 0.02) + spike) for spike in spikes])
        covered += interval.low <= 1 <= interval.high
    assert least <= covered / runs <= 0.965


TIMES = st.lists(st.floats(50, 600), min_size=1, max_size=20)
TASKS = st.builds(
    task, st.sampled_from([0.0, 0.05, 0.3]), st.booleans(), st.just(0.005), st.integers(0, 99)
)


@settings(max_examples=60, deadline=None)
@given(TIMES, TASKS, st.integers(0, 2**32), st.sampled_from([0.0, 0.001, 0.02, 0.5]))
def test_whatever_fails_the_search_ends_with_a_verdict_each_and_follows_from_the_answers(
    us, given_task, seed, rate
):
    def bad(number: int, ask: Ask) -> str:
        return "broke" if ask.algo and random.Random(seed + number).random() < rate else ""

    verdicts, batches, answers = played(us, given_task, clock.ROUGH, bad)
    assert len(verdicts) == len(us) and verdicts[0].status == "default"
    assert sum(v.status == "winner" for v in verdicts) <= 1
    dead: set[int] = set()
    for batch, sent in zip(batches, answers, strict=True):
        assert not dead & {ask.algo for ask in batch}
        dead |= {ask.algo for ask, answer in zip(batch, sent, strict=True) if answer.reason}
    assert {i for i, v in enumerate(verdicts) if v.status == "failed"} == dead
    assert all(v.reason for v in verdicts if v.status in ("failed", "dropped"))
    assert all(v.time_us > 0 for v in verdicts if v.status != "failed")
    again = search(len(us), given_task)
    batch = next(again)
    for expected, sent in zip(batches, answers, strict=True):
        assert batch == expected
        try:
            batch = again.send(sent)
        except StopIteration as end:
            assert end.value == verdicts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(20, 400), min_size=2, max_size=40), st.booleans(), st.integers(0, 99))
def test_the_time_is_kept_where_the_least_fits_in(us, sustained, seed):
    device = clock.Clock(us, seed, clock.ROUGH)
    clock.run(search(len(us), task(2.0, sustained, seed=seed)), device)
    assert device.seconds <= 2.0 * 1.05


def test_with_no_time_at_all_the_least_is_asked_for():
    device = clock.Clock([100.0] * 3 + [90.0] * 9, 0)
    clock.run(search(12, task(0.0)), device)
    rounds, samples = 2, searching.MIN_REPEATS * (13 + 7)
    assert device.seconds <= (samples + searching.MIN_CONFIRM * (KEEP + 1)) * 1.3e-3 + rounds * 1e-3
