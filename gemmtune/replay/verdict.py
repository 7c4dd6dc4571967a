"""The verdict of a replay in plain words, and the text around it. Pure: reads a Result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gemmtune.replay.analyse import Result, Row, more_pairs
from gemmtune.stats import Interval
from gemmtune.table import format_ranks

EXIT = {"faster": 0, "no difference": 0, "slower": 1, "unknown": 2}


class Verdict(NamedTuple):
    """`kind` is a key of EXIT; `drop` are the lines of rows that made the step slower."""

    kind: str
    text: str
    drop: tuple[int, ...] = ()


def percent(ratio: float) -> float:
    """How much faster, in percent of steps per second, a ratio of default to tuned time is."""
    return 100 * (ratio - 1)


def judge(result: Result) -> Verdict:
    """Draw the verdict. A difference counts when its interval leaves 1 out, and the control's."""
    if not result.rows:
        return Verdict(
            "no difference", "no difference: the table has no rows, so the default stays everywhere"
        )
    if not result.ranks:
        return Verdict("unknown", "nothing was compared: no process of the job reached a step")
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
    if _differs(effect) and not _within_noise(result):
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
    text = f"no difference shown: {_signed(effect)}"
    if more := more_pairs(effect, result.pairs):
        text += f"; {more[0]} more pairs would show a difference of {more[1]:g} %"
    return Verdict("no difference", text)


def warnings(result: Result) -> list[str]:
    """What makes the verdict doubtful, with what helps."""
    lines = []
    if result.aa_pairs > 1 and _differs(result.control):
        lines.append(
            f"this machine is too noisy: default against default differs by "
            f"{_signed(result.control)}; nothing smaller counts. Stop other work on it, or raise "
            f"--block and --pairs"
        )
    if result.rows and result.pairs < result.plan.pairs:
        lines.append(
            f"the job ended early: {result.pairs} of {result.plan.pairs} pairs are whole "
            f"({result.steps_seen} of {result.plan.steps} steps)"
        )
    for reason, count in sorted(result.fallbacks.items()):
        lines.append(f"{count} calls went through as the job made them: {reason}")
    return lines + result.notes


def lines(result: Result, verdict: Verdict) -> Iterator[str]:
    """The report, line by line; the verdict is the last."""
    plan = result.plan
    if result.pairs:
        yield (
            f"{_rows(result.pairs, 'pair')} of blocks of {plan.block} steps ({plan.drop} of each "
            f"not counted), rank {format_ranks(result.ranks)}: default "
            f"{result.default_us / 1000:.2f} ms a step, tuned {result.tuned_us / 1000:.2f} ms"
        )
    if result.aa_pairs > 1:
        yield f"control, default against default: {_signed(result.control)}"
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
    needed = result.plan.steps
    return (
        f"nothing can be said: {_rows(result.pairs, 'whole pair')} in {result.steps_seen} steps, "
        f"and the schedule takes {needed}: let the job run longer, or lower --pairs, --aa-pairs or "
        f"--block"
    )


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
    return f"{abs(percent(interval.ratio)):.1f} % [{ends[0]:.1f}, {ends[1]:.1f}]"


def _signed(interval: Interval) -> str:
    low, centre, high = (percent(r) for r in (interval.low, interval.ratio, interval.high))
    return f"{centre:+.1f} % [{low:+.1f}, {high:+.1f}]"
