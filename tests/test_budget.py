"""The budget: what each Gemm gets of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.sweep import budget

shares = st.lists(st.floats(0, 1), min_size=1, max_size=80).map(
    lambda values: sorted(values, reverse=True)
)
seconds = st.floats(-10, 1e5)
overheads = st.floats(0, 30)


@given(shares, seconds, overheads)
def test_all_that_can_be_used_is_used_and_no_more(parts, total, overhead):
    given_s = budget.allot(parts, total, overhead)
    swept = [s for s in given_s if s]
    assert len(given_s) == len(parts)
    if swept:
        assert sum(swept) + len(swept) * overhead == pytest.approx(total, rel=1e-6)
    else:
        assert total < overhead + budget.FLOOR_S


@given(shares, seconds, overheads)
def test_each_gets_between_floor_and_cap_and_not_less_than_a_smaller_one(parts, total, overhead):
    given_s = budget.allot(parts, total, overhead)
    swept = [s for s in given_s if s]
    assert given_s == [*swept, *[0.0] * (len(parts) - len(swept))]
    assert sorted(swept, reverse=True) == swept
    for s in swept:
        assert s >= budget.FLOOR_S * (1 - 1e-9)
        assert s <= max(budget.FLOOR_S, budget.CAP * sum(swept) / len(swept)) * (1 + 1e-6)


@given(shares, st.floats(1, 1e4), overheads, st.floats(1, 1e3))
def test_a_longer_budget_leaves_no_more_out(parts, total, overhead, more):
    few = sum(s > 0 for s in budget.allot(parts, total, overhead))
    many = sum(s > 0 for s in budget.allot(parts, total + more, overhead))
    assert few <= many


def test_shares_are_kept_where_neither_floor_nor_cap_is_met():
    assert budget.allot([0.5, 0.3, 0.2], 13, 1) == pytest.approx([5, 3, 2])
    assert budget.allot([0.9, 0.05, 0.05], 3.9, 1)[1:] == pytest.approx([0.3, 0.3])
    assert budget.allot([0.5, 0.5], 0, 0) == [0, 0]


def test_a_purse_shares_out_anew_what_was_left():
    from gemmtune.sweep import plan

    gemms = ["a", "b", "c", "d"]
    made = plan.Plan(
        *({}, dict.fromkeys(gemms, 0.25), gemms, dict.fromkeys(gemms, 1.0)),
        unsupported={},
        beyond=[],
    )
    purse = plan.Purse(made, plan.Options(budget_s=20))
    assert purse.seconds(gemms, 0) == pytest.approx(20 / 4 - plan.START_S)
    purse.took(wall_s=2.5, timing_s=2.0)  # half a second beside the timing, and less than given
    assert purse.seconds(gemms[1:], 2.5) == pytest.approx(17.5 / 3 - 0.5)
    assert purse.seconds(gemms[3:], 19.5) == 0
    assert not purse.over(20.5) and purse.over(20.7)
    steady = plan.Purse(made, plan.Options())
    assert steady.seconds(gemms, 1e9) == 1.0 and not steady.over(1e9)


@pytest.mark.parametrize(
    ("text", "s"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2h", 7200), ("1m5s", 65), (" 3M ", 180)],
)
def test_durations(text, s):
    assert budget.parse_duration(text) == s


@pytest.mark.parametrize("text", ["", "10", "m", "0s", "-5m", "1.5h", "5m1h", "1e3s", "ten", "٣s"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration such as 90s, 10m or 1h30m"):
        budget.parse_duration(text)
