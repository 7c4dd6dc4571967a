"""The schedule of a replay."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.errors import UsageError
from gemmtune.replay.plan import Plan, schedule

plans = st.builds(
    Plan,
    seed=st.integers(0, 2**31),
    warmup=st.integers(1, 20),
    block=st.integers(2, 12),
    pairs=st.integers(2, 30),
    aa_pairs=st.integers(0, 12),
    drop=st.integers(0, 1),
)


@given(plans)
def test_every_pair_is_two_adjacent_blocks_one_of_each_side(plan: Plan) -> None:
    blocks = schedule(plan)
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        assert first.pair == second.pair
        assert {first.side, second.side} == {"a", "b"}
        assert first.control == second.control


@given(plans)
def test_controls_come_first_and_never_use_the_table(plan: Plan) -> None:
    blocks = schedule(plan)
    assert [b.control for b in blocks] == [True] * 2 * plan.aa_pairs + [False] * 2 * plan.pairs
    assert not any(b.tuned for b in blocks if b.control)
    assert [b.tuned for b in blocks if not b.control].count(True) == plan.pairs


@given(plans)
def test_blocks_follow_on_one_another_from_the_warm_up_to_the_last_step(plan: Plan) -> None:
    blocks = schedule(plan)
    assert blocks[0].first == plan.warmup
    assert blocks[-1].last + 1 == plan.steps
    for before, after in pairwise(blocks):
        assert after.first == before.last + 1
    for block in blocks:
        assert list(block.steps) == list(range(block.first, block.last + 1))[plan.drop :]


@given(plans)
def test_each_order_is_as_frequent_as_the_other(plan: Plan) -> None:
    for control in (True, False):
        starts = [b.side for b in schedule(plan)[::2] if b.control == control]
        counts = Counter(starts)
        assert abs(counts["a"] - counts["b"]) <= 1


def test_the_order_is_random_but_the_same_in_every_process() -> None:
    code = (
        "from gemmtune.replay.plan import *;"
        "print(*(b.side for b in schedule(Plan(seed=7, pairs=12))))"
    )
    here = " ".join(b.side for b in schedule(Plan(seed=7, pairs=12)))
    there = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert there == here
    assert here != " ".join(b.side for b in schedule(Plan(seed=8, pairs=12)))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(block=1), "--block 1 leaves nothing to count: give 2 or more"),
        (Plan(pairs=1), "--pairs 1 is too few: give 2 or more"),
        (Plan(aa_pairs=-1), "--aa-pairs -1 is too few: give 0 or more"),
        (Plan(warmup=0), "--warmup 0 is too few: give 1 or more"),
    ],
)
def test_numbers_without_a_replay_are_refused(plan: Plan, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan.check()
