"""Analysis and verdict on planted step times."""

import json
import math
import random

import pytest

from gemmtune import regime
from gemmtune.gemm import Gemm
from gemmtune.replay.analyse import Calls, Rank, Result, Step, analyse, as_json, more_pairs
from gemmtune.replay.plan import COMPARE, CONTROL, END, Block, Plan, Round, beginning, blocks
from gemmtune.replay.verdict import judge, lines, percent
from gemmtune.stats import Interval, bootstrap_interval, trimmed_mean

PLAN = Plan(seed=3, pairs=20, aa_pairs=6, block=5)


def rounds_of(plan: Plan) -> list[Round]:
    """The rounds of a plan with all its numbers given."""
    assert plan.block and plan.pairs
    control = Round(CONTROL, plan.warmup, plan.block, 1, ("ab", "ba") * (plan.aa_pairs // 2))
    orders = ("ba", "ab") * (plan.pairs // 2) + ("ab",) * (plan.pairs % 2)
    compare = Round(COMPARE, control.end, plan.block, 1, orders)
    return [beginning(plan), control, compare, Round(END, compare.end)]


def schedule(plan: Plan) -> list[Block]:
    return blocks(rounds_of(plan))


FAST = Gemm(256, 64, 128, "T", "N", *["float32"] * 3, "-", 128, 128, 256)
SLOW = FAST._replace(m=512, ldd=512)
OTHER = FAST._replace(k=99, lda=99, ldb=99)
ROWS = [(3, FAST, "transposed"), (4, SLOW, "onednn"), (6, OTHER, "openblas")]


def planted(
    plan: Plan = PLAN,
    *,
    gain: float = 0.03,
    noise: float = 0.01,
    seed: int = 0,
    drift: float = 0.0,
    call_gain: tuple[float, float] = (0.2, -0.1),
) -> list[Step]:
    """Steps of 10 ms of one rank; the table makes them faster by `gain`, its rows' calls too."""
    values = random.Random(seed)
    tuned = {i: b.tuned for b in schedule(plan) for i in range(b.first, b.last + 1)}
    steps = []
    for i in range(1, plan.steps):
        arm = tuned.get(i, False)
        us = 10_000 * (1 + drift * i) * math.exp(values.gauss(0, noise)) / (1 + gain * arm)
        rows = {}
        for index, (calls, base) in enumerate(((6, 100.0), (2, 300.0))):
            call = base * math.exp(values.gauss(0, 0.02)) / (1 + call_gain[index] * arm)
            rows[index] = Calls(0, 0.0, calls, calls * call) if arm else Calls(calls, calls * call)
        steps.append(Step(i, us, rows))
    return steps


def result(*ranks: list[Step], plan: Plan = PLAN) -> Result:
    records = []
    for number, steps in enumerate(ranks):
        seen = [r for r in rounds_of(plan) if r.first <= steps[-1].step + 1]
        records.append(Rank(number, steps, seen, len(ranks)))
    return analyse(plan, records, ROWS)


def test_a_planted_gain_is_found_and_its_interval_covers_it() -> None:
    covered = 0
    for seed in range(40):
        found = result(planted(seed=seed))
        assert judge(found).kind == "faster"
        covered += found.effect.low <= 1.03 <= found.effect.high
    assert covered >= 34  # 38 are expected of 95 % intervals


def test_no_gain_is_seldom_called_one() -> None:
    kinds = [judge(result(planted(gain=0, seed=seed))).kind for seed in range(40)]
    assert kinds.count("no difference") >= 34


def test_a_drift_of_the_machine_is_no_gain() -> None:
    found = result(planted(gain=0, noise=0.002, drift=0.002))
    assert abs(percent(found.effect.ratio)) < 1


def test_a_slower_table_names_the_rows_whose_calls_were_slower() -> None:
    verdict = judge(result(planted(gain=-0.04)))
    assert verdict.kind == "slower"
    assert verdict.drop == (4,)
    assert verdict.text.endswith("drop these rows: line 4")


def test_a_slower_step_without_a_slower_call_drops_the_whole_table() -> None:
    verdict = judge(result(planted(gain=-0.04, call_gain=(0.2, 0.1))))
    assert verdict.kind == "slower" and verdict.drop == ()
    assert "drop the whole table" in verdict.text


def test_outlier_steps_do_not_hide_the_gain() -> None:
    steps = planted()
    for place in (40, 97, 141):
        steps[place] = steps[place]._replace(us=steps[place].us * 8)
    found = result(steps)
    assert judge(found).kind == "faster"
    assert found.effect.low <= 1.03 <= found.effect.high


def test_the_slowest_rank_is_what_counts() -> None:
    fast, slow = planted(gain=0.2), planted(gain=0.03, seed=1)
    slow = [s._replace(us=s.us * 1.5) for s in slow]
    both, alone = result(fast, slow), result(slow)
    assert both.effect == alone.effect
    assert both.default_us == alone.default_us > 14_000


def test_a_step_that_one_rank_lacks_is_not_counted() -> None:
    steps = planted()
    found = result(steps, steps[:150])
    assert found.steps_seen == 151
    whole = [b for b in schedule(PLAN) if b.last <= 150]
    assert [t.block for t in found.blocks] == whole


def test_a_job_that_ended_early_is_judged_by_its_whole_pairs() -> None:
    cut = schedule(PLAN)[2 * PLAN.aa_pairs + 2 * 9].first + 2  # two steps into the tenth pair
    found = result(planted()[:cut])
    assert found.pairs == 9
    assert judge(found).kind == "faster"
    assert any("9 of 20 pairs are whole" in line for line in lines(found, judge(found)))


def test_too_few_pairs_say_nothing() -> None:
    found = result(planted()[: schedule(PLAN)[2 * PLAN.aa_pairs + 2].first - 1])
    assert found.pairs == 1
    assert judge(found).kind == "unknown"
    assert "1 whole pair in 73 steps, and this replay takes 263 or more" in judge(found).text


def test_a_job_without_a_step_says_nothing() -> None:
    found = analyse(PLAN, [], ROWS)
    assert judge(found) == (
        "unknown",
        "nothing was compared: no process of the job reached a step",
        (),
    )
    assert json.loads(json.dumps(as_json(found)))["effect"]["ratio"] is None


def test_a_gain_without_a_launched_row_is_no_gain() -> None:
    steps = [s._replace(rows={}) for s in planted()]
    assert judge(result(steps)).kind == "unknown"


def test_a_control_that_claims_a_difference_is_said_and_sets_the_bar() -> None:
    sides = {i: b for b in schedule(PLAN) for i in b.steps}
    steps = [
        s._replace(us=s.us * 1.1) if s.step in sides and sides[s.step].side == "a" else s
        for s in planted(gain=0, noise=0.001)
    ]
    found = result([s for s in steps if s.step])
    noisy = found._replace(control=Interval(1.12, 1.11, 1.13))
    assert found.control.low > 1
    assert judge(noisy).kind == "no difference"
    assert any(
        "too noisy: default against default differs by +12.0 % [+11.0, +13.0]" in line
        for line in lines(noisy, judge(noisy))
    )


def test_coverage_is_what_was_launched() -> None:
    steps = planted()
    native = [
        s._replace(
            rows={
                **s.rows,
                1: Calls(
                    s.rows[1].native + s.rows[1].tuned, s.rows[1].native_us + s.rows[1].tuned_us
                ),
            }
        )
        for s in steps
    ]
    found = result(steps, native)
    fast, slow, other = found.rows
    assert fast.ranks == (0, 1) and fast.calls == 6 and fast.ratio is not None
    assert fast.ratio.low < 1.2 < fast.ratio.high
    assert slow.ranks == (0,) and slow.calls == 2
    assert not other.met and other.ratio is None
    text = "\n".join(lines(found, judge(found)))
    assert f"never met: line 6, {OTHER}" in text
    assert "on rank 0 only" in text


def test_the_json_is_enough_to_compute_the_effect_again() -> None:
    found = result(planted())
    values = json.loads(json.dumps(as_json(found)))
    sides: dict[int, dict[str, float]] = {}
    for block in values["blocks"]:
        if not block["block"]["control"]:
            value = trimmed_mean(block["steps_us"])
            assert value == block["value_us"]
            sides.setdefault(block["block"]["pair"], {})[block["block"]["side"]] = value
    again = bootstrap_interval([s["a"] / s["b"] for s in sides.values()])
    assert again == pytest.approx(found.effect)
    assert values["effect"] == pytest.approx(again._asdict(), rel=1e-12)


def test_a_restarted_rank_counts_once() -> None:
    found = analyse(
        PLAN, [Rank(0, planted()[:20], rounds_of(PLAN)), Rank(0, planted(), rounds_of(PLAN))], ROWS
    )
    assert found.ranks == (0,) and found.pairs == PLAN.pairs
    assert any("1 more processes" in note for note in found.notes)


def test_missing_ranks_are_said() -> None:
    found = analyse(PLAN, [Rank(0, planted(), rounds_of(PLAN), world=4)], ROWS)
    assert "only 1 of 4 ranks left records here: they alone count" in found.notes


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_as_many_pairs_as_were_asked_for_show_the_difference_named(noise: float) -> None:
    plan = PLAN._replace(pairs=12)
    first = result(planted(plan, gain=0, noise=noise), plan=plan)
    planned = more_pairs(first.effect, plan.pairs)
    assert planned is not None
    more, goal = planned
    assert 100 * first.effect.half_width * 1.43 > goal
    longer = plan._replace(pairs=plan.pairs + more)
    shown = sum(
        judge(result(planted(longer, gain=goal / 100, noise=noise, seed=s), plan=longer)).kind
        == "faster"
        for s in range(20)
    )
    assert shown >= 11  # 16 are expected of a power of 80 %


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (Interval(1.030, 1.021, 1.039), "faster by 3.0 % [2.1, 3.9]"),
        (Interval(0.960, 0.950, 0.970), "slower by 4.0 % [3.0, 5.0]: drop these rows: line 4"),
        (
            Interval(1.003, 0.995, 1.011),
            "no difference shown: +0.3 % [-0.5, +1.1]: leave the table off, or show a difference "
            "of 1 % with --pairs 27",
        ),
        (
            Interval(1.001, 0.9985, 1.0035),
            "no difference shown: +0.10 % [-0.15, +0.35]: whatever there is is below 0.4 %, so "
            "leave the table off",
        ),
    ],
)
def test_verdict_texts(effect: Interval, words: str) -> None:
    found = result(planted())._replace(
        effect=effect, sure=effect, control=Interval(1.0, 0.99, 1.01)
    )
    assert judge(found).text == words


def test_report_text() -> None:
    row = (
        result(planted())
        .rows[0]
        ._replace(calls=6, default_us=120.04, tuned_us=100.26, ratio=Interval(1.197, 1.18, 1.21))
    )
    missing = result(planted()).rows[2]
    found = result(planted())._replace(
        effect=Interval(1.030, 1.021, 1.039),
        control=Interval(0.999, 0.99, 1.008),
        default_us=12_410,
        tuned_us=12_050,
        rows=[row, missing],
        ranks=(0, 1),
        fallbacks={"split-k4 does not fit": 12},
    )
    found = found._replace(rows=[row._replace(ranks=(0, 1)), missing])
    assert list(lines(found, judge(found))) == [
        "20 pairs of blocks of 5 steps (1 of each not counted), rank 0-1: "
        "default 12.41 ms a step, tuned 12.05 ms",
        "control, default against default: -0.1 % [-1.0, +0.8]",
        "1 of 2 rows launched",
        "  line  gemm                   config      calls/step  default us  tuned us  faster by",
        "     3  256x64x128 TN float32  transposed           6       120.0     100.3  "
        "+19.7 % [+18.0, +21.0]",
        "never met: line 6, 256x64x99 TN float32",
        "warning: 12 calls went through as the job made them: split-k4 does not fit",
        "faster by 3.0 % [2.1, 3.9]",
    ]


def test_a_rank_that_lost_touch_ends_what_counts_and_is_named() -> None:
    rounds = rounds_of(PLAN)
    first = Round(COMPARE, rounds[1].end, PLAN.block or 0, 1, ("ab",) * 8)
    rest = rounds[2]._replace(first=first.end, orders=("ba",) * 12)
    every = [*rounds[:2], first, rest, rounds[3]]
    lost = Rank(1, planted(seed=1), every[:3], 2, lost="timed out (step 143)")
    found = analyse(PLAN, [Rank(0, planted(), every, 2), lost], ROWS)
    assert found.pairs == 8 and not found.done and found.ranks == (0, 1)
    assert "rank 1 went on with the default alone: timed out (step 143)" in found.notes


def test_ranks_that_decided_alone_are_not_compared() -> None:
    other = [*rounds_of(PLAN)[:2], Round(COMPARE, 63, 5, 1, ("ab",) * 20)]
    ranks = [Rank(0, planted(), rounds_of(PLAN), 2), Rank(1, planted(gain=2), other, 2)]
    found = analyse(PLAN, ranks, ROWS)
    assert found.ranks == (0,) and found.effect == result(planted()).effect
    assert any("1 of 2 ranks switched at other steps" in note for note in found.notes)


def test_a_replay_that_did_not_come_to_its_precision_says_so() -> None:
    found = result(planted(noise=0.1))._replace(plan=PLAN._replace(pairs=None))
    assert "did not come to +-0.3 % within 20 pairs: raise --max-pairs" in " ".join(
        lines(found, judge(found))
    )


def metered(block_s: float, watts: tuple[float, float], capped: float = 1.0) -> Rank:
    """The planted rank with its GPU's readings at the ends of its blocks; watts by arm."""
    rounds = rounds_of(PLAN)
    at, joules, taken = 100.0, 5e6, {}
    for entry in rounds[1:-1]:
        for step in range(entry.first, entry.end + 1, entry.block):
            drew = watts[entry.tuned(step - 1)] if step > entry.first else 0.0
            if step > entry.first:
                at, joules = at + block_s, joules + block_s * drew
            taken[step] = {"gpu_s": at, "energy_j": joules, "capped": capped, "power_cap_w": 700.0}
            taken[step] |= {"power_w": drew, "sm_mhz": 1400.0}
    return Rank(0, planted(gain=0, noise=1e-6), rounds, readings=taken)


def test_power_clocks_and_energy_are_told_for_each_arm() -> None:
    found = analyse(PLAN, [metered(2.0, (690.0, 660.0))], ROWS, regime.AT_CAP)
    default, tuned = found.power["default"], found.power["tuned"]
    assert (default.power_w, tuned.power_w, tuned.sm_mhz) == (690.0, 660.0, 1400.0)
    assert default.energy_j == pytest.approx(690 * 0.010, rel=1e-3)  # steps of 10 ms
    assert tuned.energy_j == pytest.approx(660 * 0.010, rel=1e-3)
    assert found.notes == []
    (line,) = [x for x in lines(found, judge(found)) if x.startswith("GPU: ")]
    assert line == (
        "GPU: default 690 W, SM clock 1,400 MHz, 6.9 J a step; tuned 660 W, SM clock 1,400 MHz,"
        " 6.6 J a step: the job runs at the power cap"
    )
    assert as_json(found)["power"]["tuned"]["power_w"] == 660.0


def test_a_job_replayed_in_another_regime_than_it_was_captured_in_is_named() -> None:
    (note,) = analyse(PLAN, [metered(2.0, (400.0, 400.0), 0.0)], ROWS, regime.AT_CAP).notes
    assert "captured at the power cap and runs below the power cap here" in note


def test_blocks_too_short_for_the_meters_tell_nothing_of_power() -> None:
    found = analyse(PLAN, [metered(0.5, (690.0, 660.0))], ROWS, regime.BELOW)
    assert found.power == {} and found.notes == []
