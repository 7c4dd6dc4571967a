"""`gemmtune sweep`: reads shapes.csv; writes candidates.csv, tuned.csv, and a summary."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmtune.sweep.run import Event, Line, Summary


def percent(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """A percentage, with or without its sign, as a fraction: 0.5% is 0.005."""
    try:
        number = float(value.strip().removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise click.BadParameter(f"{value!r} is not a percentage such as 0.5%")
    return number / 100


@click.command(epilog="Example:  gemmtune sweep shapes.csv -o tuned.csv --seconds-per-shape 2")
@click.argument("shapes", type=click.Path(dir_okay=False))
@click.option("-o", "--output", default="tuned.csv", show_default=True, help="The tuned table.")
@click.option(
    "--candidates",
    help="Everything that was measured; an interrupted sweep goes on from it.  "
    "[default: candidates.csv beside the tuned table]",
)
@click.option(
    "--backend", default="auto", show_default=True, help="auto: what fits this machine; or cpu."
)
@click.option(
    "--min-gain",
    callback=percent,
    metavar="PERCENT",
    default="0.5%",
    show_default=True,
    help="The default stays unless an algorithm is faster by more than this, beyond doubt.",
)
@click.option(
    "--seconds-per-shape",
    type=click.FloatRange(0.01),
    default=3.0,
    show_default=True,
    help="Timing for each GEMM of 2 % of the GEMM time or more; the others get a third.",
)
@click.option("--top", type=click.IntRange(1), help="Only the N GEMMs that take the most time.")
@click.option(
    "--threads", type=click.IntRange(1), help="CPU threads.  [default: as captured in the job]"
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the operands and of the random orders.",
)
@click.option(
    "--numerics",
    type=click.Choice(["type", "any"]),
    default="type",
    show_default=True,
    help="any: also algorithms that compute in a wider type, which changes the numbers.",
)
@click.option("--fresh", is_flag=True, help="Measure all anew; candidates are overwritten.")
@click.option("--force", is_flag=True, help="Sweep a GPU's shapes on a CPU (with --backend cpu).")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
def sweep(
    shapes: str,
    output: str,
    candidates: str | None,
    backend: str,
    min_gain: float,
    seconds_per_shape: float,
    top: int | None,
    threads: int | None,
    seed: int,
    numerics: str,
    fresh: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Time the algorithms of each GEMM in SHAPES; keep those that beat the default beyond doubt.

    Every algorithm is checked against float64 before it is timed. Interrupt at any time: the same
    command goes on where it stopped.
    """
    from gemmtune import table
    from gemmtune.backends import base
    from gemmtune.sweep import run

    read = table.read(shapes, table.Shape)
    chosen = base.get(base.detect() if backend == "auto" else backend)
    chosen.numerics = numerics
    path = candidates or str(Path(output).with_name("candidates.csv"))
    options = run.Options(
        min_gain=min_gain,
        seconds_per_shape=seconds_per_shape,
        top=top or 0,
        threads=threads,
        seed=seed,
        fresh=fresh,
        force=force and backend == "cpu",
    )
    plan = run.make_plan(read.rows, chosen, options)
    count = run.thread_count(read.provenance, options)
    say(
        f"{len(plan.tasks)} GEMM{'s' * (len(plan.tasks) != 1)} on {chosen.name}, "
        f"{count} thread{'s' * (count != 1)}: about {duration(plan.seconds)} "
        f"(less what {path} already holds)"
    )
    for gemm, reason in plan.unsupported.items():
        say(f"left out: {gemm}: {reason}")
    with show(plan.seconds, len(plan.tasks)) as progress:
        summary = run.sweep(read, chosen, path, output, options, progress)
    if as_json:
        click.echo(json.dumps(as_dict(summary), indent=1))
    else:
        print_summary(summary)


def say(text: str) -> None:
    click.echo(text, err=True)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 40 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def time(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"


def gain(line: Line) -> str:
    if line.reason:
        return f"failed: {line.reason}"
    if line.gain is None:
        return "default stays"
    low, high = 100 * (line.gain.low - 1), 100 * (line.gain.high - 1)
    return f"{100 * (line.gain.ratio - 1):+.1f}% [{low:+.1f}, {high:+.1f}]"


def name(line: Line) -> str:
    return line.algo.config if line.algo else ""


@contextmanager
def show(seconds: float, total: int) -> Iterator[Callable[[Event], None]]:
    """A live bar with the time left; where stderr is no terminal, a line for each GEMM."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    def plain(event: Event) -> None:
        if event.line:
            left = duration(event.seconds_left)
            text = f"{event.gemm}  {gain(event.line)} {name(event.line)}".rstrip()
            say(f"[{event.done}/{event.total}] {text}; {left} left")

    console = Console(stderr=True)
    if not console.is_terminal:
        yield plain
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[left]} left  {task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, left=duration(seconds))

        def live(event: Event) -> None:
            left = duration(event.seconds_left)
            text = escape(str(event.gemm))
            bar.update(task, completed=event.done, left=left, description=text)
            if event.line and (event.line.gain or event.line.reason):
                bar.console.print(f"{text}  {escape(gain(event.line))} {name(event.line)}")

        yield live


def print_summary(summary: Summary) -> None:
    """The table of GEMMs and the sum to stdout, what to do next to stderr."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in (
        *(("GEMM (m x n x k)", "left"), ("calls", "right"), ("share", "right")),
        *(("default", "right"), ("best", "right"), ("gain", "left"), ("algorithm", "left")),
    ):
        grid.add_column(title, justify=side, overflow="fold")  # type: ignore[arg-type]
    for line in summary.lines:
        best = line.default_us / line.gain.ratio if line.gain else line.default_us
        times = ("", "") if line.reason else (time(line.default_us), time(best))
        cells = (str(line.gemm), f"{line.calls:g}", f"{100 * line.share:.1f}%")
        grid.add_row(*cells, *times, gain(line), name(line))
    console.print(grid)
    console.print(verdict(summary), markup=False, soft_wrap=True)
    for text in remarks(summary):
        say(text)


def verdict(summary: Summary) -> str:
    """What the sweep came to, in one line."""
    if not summary.lines:
        return "No GEMM to sweep: none of the table's can be run by this backend."
    won = sum(line.gain is not None for line in summary.lines)
    before, after = time(summary.before_us), time(summary.after_us)
    if not won:
        return (
            f"\nNothing gained: for all {len(summary.lines)} GEMMs the default stays "
            f"({before} of GEMMs per step). That is a result: there is nothing to tune here."
        )
    less = 100 * (1 - summary.after_us / summary.before_us)
    return (
        f"\nGEMM time per step {before} -> {after} ({less:.1f}% less) with {won} of "
        f"{len(summary.lines)} GEMMs tuned, measured outside the job."
    )


def remarks(summary: Summary) -> Iterator[str]:
    """Where things are, what is missing, and what to do next."""
    if summary.resumed:
        yield f"{summary.resumed} GEMMs were held by {summary.candidates} and not measured again."
    if summary.skipped:
        yield f"{summary.skipped} smaller GEMMs were not swept (--top)."
    if summary.failed:
        yield f"{len(summary.failed)} GEMMs could not be measured; --fresh tries them again."
    if summary.unsupported:
        yield f"{len(summary.unsupported)} GEMMs were left out: this backend cannot run them."
    yield f"Wrote {summary.tuned} and {summary.candidates}."
    if any(line.gain for line in summary.lines):
        from gemmtune.replay.plan import Plan

        command = summary.provenance.get("command") or "python train.py"
        words = command if isinstance(command, str) else shlex.join(command)
        yield "Next, see whether the job's step is faster:"
        yield f"  gemmtune replay {shlex.quote(summary.tuned)} -- {words}"
        yield (
            f"The job has to run {Plan().steps} steps for it, or fewer with --pairs, --aa-pairs and"
            " --block: the replay ends it then."
        )


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values."""
    return {
        "before_us": summary.before_us,
        "after_us": summary.after_us,
        "tuned": summary.tuned,
        "candidates": summary.candidates,
        "resumed": summary.resumed,
        "skipped": summary.skipped,
        "unsupported": [
            {"gemm": gemm._asdict(), "reason": reason}
            for gemm, reason in summary.unsupported.items()
        ],
        "gemms": [
            {
                "gemm": line.gemm._asdict(),
                "calls": line.calls,
                "share": line.share,
                "default_us": line.default_us,
                "algorithm": name(line) or None,
                "ratio": line.gain._asdict() if line.gain else None,
                "failed": line.reason or None,
            }
            for line in summary.lines
        ],
        "provenance": summary.provenance,
    }
