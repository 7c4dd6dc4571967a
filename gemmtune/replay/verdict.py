"""The verdict of a replay in plain words, and the text around it. Pure: reads a Result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gemmtune.replay.analyse import Result, Row, more_pairs
from gemmtune.replay.plan import COMPARE, PROBE
from gemmtune.replay.power import words
from gemmtune.stats import Interval
from gemmtune.table import format_ranks

EXIT = {"faster": 0, "no difference": 0, "slower": 1, "unknown": 2}


GRAPHS = (
    "the job's GEMMs are in CUDA graphs, which keep the algorithms that they were captured with, "
    "so default and tuned cannot take turns inside them: replay the job without CUDA graphs, or "
    "compare two jobs: gemmtune replay --a 'python train.py' "
    "--b 'gemmtune run tuned.csv -- python train.py'"
)


class Verdict(NamedTuple):
    """`kind` is a key of EXIT; `drop` are the lines of rows that made the step slower."""

    kind: str
    text: str
    drop: tuple[int, ...] = ()


def percent(ratio: float) -> float:
    """How much faster, in percent of steps per second, a ratio of default to tuned time is."""
    return 100 * (ratio - 1)


def judge(result: Result) -> Verdict:
    """Draw the verdict. A difference counts beyond doubt only, and beyond the control's."""
    if not result.rows:
        return Verdict(
            "no difference", "no difference: the table has no rows, so the default stays everywhere"
        )
    if not result.ranks:
        return Verdict("unknown", "nothing was compared: no process of the job reached a step")
    if result.graphed and not any(row.ranks for row in result.rows):
        return Verdict("unknown", f"nothing was compared: {GRAPHS}")
    if result.pairs < 2:
        return Verdict("unknown", _too_short(result))
    if not any(row.ranks for row in result.rows):
        rows, met = _rows(len(result.rows)), any(row.met for row in result.rows)
        mend = "" if met else "; capture and sweep this job itself"
        return Verdict(
            "unknown",
            f"nothing was compared: none of the table's {rows} was launched{mend}",
        )
    effect = result.effect
    if _differs(result.sure) and not _within_noise(result):
        if effect.ratio > 1:
            return Verdict("faster", f"faster by {_span(effect)}")
        slow = _slow_rows(result.rows)
        drop = (
            "drop these rows: " + ", ".join(f"line {row.line}" for row in slow)
            if slow
            else "no row's own calls are slower, so drop the whole table"
        )
        return Verdict(
            "slower", f"slower by {_span(effect)}: {drop}", tuple(row.line for row in slow)
        )
    return Verdict("no difference", f"no difference shown: {_signed(effect)}: {_advice(result)}")


def warnings(result: Result) -> list[str]:
    """What makes the verdict doubtful, with what helps."""
    lines = []
    if result.aa_pairs > 1 and _differs(result.control):
        lines.append(
            f"this machine is too noisy: default against default differs by "
            f"{_signed(result.control)}; nothing smaller counts. Stop other work on it, or raise "
            f"--block and --aa-pairs"
        )
    if result.rows and not result.done:
        lines.append(
            f"the job ended early: {result.pairs} of {result.planned} pairs are whole "
            f"({result.steps_seen} of {result.needed} steps)"
        )
    elif result.pairs > 1 and result.plan.pairs is None and not _narrow(result):
        lines.append(
            f"the interval did not come to +-{result.plan.precision:g} % within "
            f"{_rows(result.pairs, 'pair')}: raise --max-pairs or --budget, or --precision"
        )
    probe = next((entry for entry in result.rounds if entry.kind == PROBE), None)
    if probe is not None and any(e.drop >= probe.block // 2 for e in result.rounds):
        lines.append(
            f"the step time had not settled {probe.block // 2} steps after a switch: give a --block"
            f" of many more steps than it takes"
        )
    lines += result.noise
    for reason, count in sorted(result.fallbacks.items()):
        lines.append(f"{count} calls went through as the job made them: {reason}")
    if result.graphed and any(row.ranks for row in result.rows):
        lines.append(
            f"{_rows(result.graphed, 'call')} went into CUDA graphs, where default and tuned "
            "cannot take turns: what is compared is the rest of the step"
        )
    return lines + result.notes


def lines(result: Result, verdict: Verdict) -> Iterator[str]:
    """The report, line by line; the verdict is the last."""
    if result.pairs:
        compared = next(r for r in result.rounds if r.kind == COMPARE)
        yield (
            f"{_rows(result.pairs, 'pair')} of blocks of {compared.block} steps "
            f"({compared.drop} of each not counted), rank {format_ranks(result.ranks)}: default "
            f"{result.default_us / 1000:.2f} ms a step, tuned {result.tuned_us / 1000:.2f} ms"
        )
    if result.aa_pairs > 1:
        yield f"control, default against default: {_signed(result.control)}"
    if result.power:
        regime = next(iter(result.power.values())).regime
        told = "; ".join(f"{arm} {words(drawn)}" for arm, drawn in result.power.items())
        yield f"GPU: {told}" + (f": the job runs {regime}" if regime else "")
    launched = [row for row in result.rows if row.ranks]
    if result.rows:
        yield f"{len(launched)} of {_rows(len(result.rows))} launched"
    if launched:
        yield from _columns(launched, result)
    for row in result.rows:
        if not row.met:
            yield f"never met: line {row.line}, {row.gemm}"
        elif not row.ranks and result.pairs:
            yield f"met, but never launched as the row says: line {row.line}, {row.gemm}"
    for warning in warnings(result):
        yield f"warning: {warning}"
    yield verdict.text


def _columns(rows: Sequence[Row], result: Result) -> Iterator[str]:
    table: list[tuple[str, ...]] = [
        ("line", "gemm", "config", "calls/step", "default us", "tuned us", "faster by")
    ]
    for row in rows:
        ranks = "" if row.ranks == result.ranks else f"  on rank {format_ranks(row.ranks)} only"
        gain = _signed(row.ratio) if row.ratio else "-"
        times = (f"{us:.1f}" if us > 0 else "-" for us in (row.default_us, row.tuned_us))
        cells = (str(row.line), str(row.gemm), row.config, f"{row.calls:g}", *times, gain + ranks)
        table.append(cells)
    widths = [max(len(cells[i]) for cells in table) for i in range(len(table[0]) - 1)]
    for cells in table:
        left = "  ".join(
            cell.ljust(width) if i in (1, 2) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
        )
        yield f"  {left}  {cells[-1]}"


def _too_short(result: Result) -> str:
    return (
        f"nothing can be said: {_rows(result.pairs, 'whole pair')} in {result.steps_seen} steps, "
        f"and this replay takes {result.needed} or more: let the job run longer, or lower --pairs, "
        f"--aa-pairs or --block"
    )


def _narrow(result: Result) -> bool:
    return 100 * result.effect.precision <= result.plan.precision


def _advice(result: Result) -> str:
    """What to do where no difference was shown."""
    effect = result.effect
    bound = max(abs(percent(effect.low)), abs(percent(effect.high)))
    if _narrow(result):
        return f"whatever there is is below {bound:.1f} %, so leave the table off"
    text = "leave the table off"
    if more := more_pairs(effect, result.pairs):
        text += f", or show a difference of {more[1]:g} % with --pairs {result.pairs + more[0]}"
    return text


def _rows(count: int, word: str = "row") -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _differs(interval: Interval) -> bool:
    return interval.low > 1 or interval.high < 1


def _within_noise(result: Result) -> bool:
    """Whether the control claims a difference as large as the table's."""
    return _differs(result.control) and abs(math.log(result.effect.ratio)) <= abs(
        math.log(result.control.ratio)
    )


def _slow_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows whose calls were slower than the default's, those beyond doubt where there are any."""
    slower = [row for row in rows if row.ratio and row.ratio.ratio < 1]
    certain = [row for row in slower if row.ratio and row.ratio.high < 1]
    return sorted(certain or slower, key=lambda row: -row.lost_us)


def _span(interval: Interval) -> str:
    """Size of a difference without its sign: "3.0 % [2.1, 3.9]"."""
    ends = sorted(abs(percent(r)) for r in (interval.low, interval.high))
    centre, low, high = (_number(x, interval) for x in (abs(percent(interval.ratio)), *ends))
    return f"{centre} % [{low}, {high}]"


def _signed(interval: Interval) -> str:
    ends = (interval.low, interval.ratio, interval.high)
    low, centre, high = (_number(percent(r), interval, "+") for r in ends)
    return f"{centre} % [{low}, {high}]"


def _number(value: float, interval: Interval, sign: str = "") -> str:
    """With a second decimal where the interval is narrow."""
    return f"{value:{sign}.{2 if interval.half_width < 0.005 else 1}f}"
