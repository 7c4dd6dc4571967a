"""The protocol of a replay: rounds, blocks and when it ends."""

import subprocess
import sys
from itertools import pairwise

import clock_steps
import numpy as np
import pytest
from clock_steps import Job, Noise
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.errors import UsageError
from gemmtune.replay.decide import following, ratios, settling
from gemmtune.replay.plan import (
    COMPARE,
    CONTROL,
    END,
    MIN_COUNTED,
    MIN_PAIRS,
    PROBE,
    WARMUP,
    Plan,
    Round,
    beginning,
    blocks,
    pairs_of,
)
from gemmtune.stats import bootstrap_interval

plans = st.builds(
    Plan,
    seed=st.integers(0, 2**31),
    warmup=st.integers(1, 20),
    block=st.none() | st.integers(2, 12),
    pairs=st.none() | st.integers(2, 30),
    aa_pairs=st.integers(0, 12),
    precision=st.floats(0.1, 2),
    max_pairs=st.integers(8, 60),
    seconds=st.just(0.0),
)


def replayed(
    plan: Plan, noise: Noise | None = None, **job: float
) -> tuple[list[Round], np.ndarray]:
    return clock_steps.replay(plan, Job(noise or Noise(), 0.01, plan.seed, **job))


@settings(max_examples=40, deadline=None)
@given(plans)
def test_rounds_follow_on_one_another_in_the_order_of_the_protocol(plan: Plan) -> None:
    rounds, us = replayed(plan)
    kinds = [entry.kind for entry in rounds]
    expected = [WARMUP, *[PROBE] * (plan.block is None), *[CONTROL] * bool(plan.aa_pairs)]
    assert kinds[: len(expected)] == expected
    assert set(kinds[len(expected) : -1]) == {COMPARE} and kinds[-1] == END
    assert rounds[0].first == 0 and rounds[0].end == plan.warmup
    for before, after in pairwise(rounds):
        assert after.first == before.end
    assert rounds[-1].first == len(us) >= plan.steps


@settings(max_examples=40, deadline=None)
@given(plans)
def test_every_pair_is_two_adjacent_blocks_one_of_each_side(plan: Plan) -> None:
    rounds, _ = replayed(plan)
    found = blocks(rounds)
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first.pair == second.pair and first.control == second.control
        assert {first.side, second.side} == {"a", "b"}
        assert second.first == first.last + 1
    assert len({b.pair for b in found}) == len(found) / 2
    for block in found:
        assert block.first < block.counted <= block.last
        entry = next(r for r in rounds if r.first <= block.first < r.end)
        assert {entry.tuned(i) for i in range(block.first, block.last + 1)} == {block.tuned}


@settings(max_examples=40, deadline=None)
@given(plans)
def test_the_numbers_given_are_kept(plan: Plan) -> None:
    rounds, _ = replayed(plan)
    assert pairs_of(rounds, CONTROL) == plan.aa_pairs
    done = pairs_of(rounds, COMPARE)
    if plan.pairs is not None:
        assert done == plan.pairs
    else:
        assert min(MIN_PAIRS, plan.max_pairs) <= done <= plan.max_pairs
    if plan.block is not None:
        assert {r.block for r in rounds if r.kind in (CONTROL, COMPARE)} == {plan.block}
    for entry in rounds:
        turns = [order for order in entry.orders if entry.kind != PROBE]
        assert abs(turns.count("ab") - turns.count("ba")) <= 1


def test_controls_and_warm_up_never_use_the_table() -> None:
    control = Round(CONTROL, 10, 2, 1, ("ab", "ba"))
    assert not any(control.tuned(i) for i in range(10, control.end))
    assert not any(beginning(Plan()).tuned(i) for i in range(3))
    assert [Round(PROBE, 3, 2, 0, ("ba",)).tuned(i) for i in range(3, 7)] == [True] * 2 + [
        False
    ] * 2


def test_it_goes_on_until_the_interval_is_narrow_enough() -> None:
    for seed in range(10):
        rounds, us = replayed(Plan(seed=seed, precision=0.5))
        assert 100 * bootstrap_interval(ratios(rounds, us, COMPARE)).precision <= 0.5
    noisy, us = replayed(Plan(precision=0.05, max_pairs=60))
    assert pairs_of(noisy, COMPARE) == 60


@settings(max_examples=40, deadline=None)
@given(plans, st.floats(20, 120))
def test_a_limited_time_is_kept_to(plan: Plan, seconds: float) -> None:
    rounds, us = replayed(plan._replace(block=None, precision=0.01, seconds=seconds))
    first = rounds[2]  # after warm-up and probe: two controls and two pairs at least
    least = np.nansum(us[: first.first + 8 * first.block])
    assert np.nansum(us) <= 1.05 * max(seconds * 1e6, least)
    assert pairs_of(rounds, COMPARE) >= 2
    assert rounds[-1].kind == END


def test_when_it_ends_does_not_depend_on_what_it_shows() -> None:
    plan = Plan(block=9, precision=0.5)
    for seed in range(5):
        same = [clock_steps.replay(plan, Job(Noise(), gain, seed))[0] for gain in (0.0, 0.2, -0.3)]
        assert same[0] == same[1] == same[2]


def test_the_steps_of_a_block_grow_with_what_settling_takes() -> None:
    stretch = np.full(60, 100.0) + np.random.default_rng(0).normal(0, 0.5, 60)
    assert settling(stretch) == 0
    for steps in (3, 8, 20):
        slow = stretch.copy()
        slow[:steps] *= 1.1
        assert 0.75 * steps - 1 <= settling(slow) <= 1.5 * steps
    never = stretch.copy()
    never[:35] *= 1.1
    assert settling(never) == 30
    quick, slow = (replayed(Plan(), step_us=us)[0][-2] for us in (1e6, 2e3))
    assert quick.block - quick.drop >= MIN_COUNTED
    assert slow.block >= 240  # half a second


@pytest.mark.parametrize("lag", [4.0, 8.0])
def test_a_step_that_settles_slowly_after_a_switch_is_measured_without_bias(lag: float) -> None:
    noise, gain = Noise(sd=0.002, lag=lag), 0.1
    effects = []
    for seed in range(10):
        rounds, us = clock_steps.replay(Plan(seed=seed), Job(noise, gain, seed, 100_000))
        effects.append(bootstrap_interval(ratios(rounds, us, COMPARE)).ratio)
    assert abs(np.mean(effects) - 1.1) < 0.002


def test_a_step_twice_as_long_in_each_block_does_not_count() -> None:
    entry = Round(COMPARE, 0, 6, 1, ("ab", "ba"))
    us = np.where([entry.tuned(i) for i in range(24)], 100.0, 110.0)
    us[[3, 10, 14]] *= 2
    assert ratios([entry], us, COMPARE) == pytest.approx([1.1, 1.1])


def test_pairs_that_are_not_whole_are_left_out() -> None:
    entry = Round(COMPARE, 2, 3, 1, ("ab", "ab", "ab"))
    us = np.full(18, 5.0)  # the last pair ends at step 19
    us[4] = np.nan
    assert list(ratios([entry], us, COMPARE)) == [1.0]
    assert list(ratios([entry], us[:0], COMPARE)) == []


def test_the_decisions_are_the_same_in_every_process() -> None:
    code = (
        "from gemmtune.replay.decide import *; p = Plan(seed=7, block=5);"
        "print(*following(p, [Round(WARMUP, 0, 3)], np.array([np.nan, 5.0, 6.0])).orders)"
    )
    there = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    us = np.array([np.nan, 5.0, 6.0])
    orders = [
        list(following(p, [beginning(p)], us).orders) for s in (7, 8) for p in [Plan(s, block=5)]
    ]
    assert there == orders[0] != orders[1]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(block=1), "--block 1 is too few: give 2 or more"),
        (Plan(pairs=1), "--pairs 1 is too few: give 2 or more"),
        (Plan(aa_pairs=-1), "--aa-pairs -1 is too few: give 0 or more"),
        (Plan(warmup=0), "--warmup 0 is too few: give 1 or more"),
        (Plan(max_pairs=7), "--max-pairs 7 is too few: give 8 or more"),
        (Plan(precision=0), "--precision 0 is no width"),
        (Plan(precision=float("nan")), "--precision nan is no width"),
    ],
)
def test_numbers_without_a_replay_are_refused(plan: Plan, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan.check()
