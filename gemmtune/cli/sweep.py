"""`gemmtune sweep`: reads shapes.csv; writes candidates.csv, tuned.csv, and a summary."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from gemmtune.gemm import Gemm
    from gemmtune.sweep.plan import Options
    from gemmtune.sweep.results import Line, Summary
    from gemmtune.sweep.run import Event


def percent(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """A percentage, with or without its sign, as a fraction: 0.5% is 0.005."""
    try:
        number = float(value.strip().removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise click.BadParameter(f"{value!r} is not a percentage such as 0.5%")
    return number / 100


def a_number(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """A number within its range, which click takes nan to be."""
    if math.isnan(value):
        raise click.BadParameter("nan is no number")
    return value


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float:
    """A duration such as 90s, 10m or 1h30m, in seconds; 0 where there is none."""
    from gemmtune.sweep.budget import parse_duration

    try:
        return parse_duration(value) if value is not None else 0.0
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


@click.command(epilog="Example:  gemmtune sweep shapes.csv -o tuned.csv --seconds-per-shape 2")
@click.argument("shapes", type=click.Path(dir_okay=False), required=False)
@click.option("-o", "--output", default="tuned.csv", show_default=True, help="The tuned table.")
@click.option(
    "--candidates",
    help="What became of every algorithm; NAME.samples.jsonl beside it keeps every sample, and an "
    "interrupted sweep goes on from there.  [default: candidates.csv beside the tuned table]",
)
@click.option(
    "--backend",
    default="auto",
    show_default=True,
    help="auto: what fits this machine; or one of gemmtune doctor's.",
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
    type=click.FloatRange(0.01, 86400),
    callback=a_number,
    default=3.0,
    show_default=True,
    help="Timing for each GEMM of 2 % of the GEMM time or more; the others get a third.",
)
@click.option(
    "--budget",
    callback=seconds,
    metavar="TIME",
    help="For the whole sweep, in place of --seconds-per-shape: 90s, 10m, 1h30m. Shared out by "
    "each GEMM's share of the step's GEMM time; an interrupted sweep's time counts.",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Only the N GEMMs that take the most time.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1 << 16),
    help="CPU threads.  [default: as captured in the job]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
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
@click.option("--fresh", is_flag=True, help="Measure all anew; the old samples are kept as *.old.")
@click.option(
    "--reanalyse",
    is_flag=True,
    help="Measure nothing: both tables anew from the samples kept, e.g. with another --min-gain.",
)
@click.option(
    "--te-direct",
    is_flag=True,
    help="AMD: also algorithms that hipBLASLt does not list, for a Transformer Engine that takes "
    "their ids directly.",
)
@click.option(
    "--run-count",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="AMD: launches for each algorithm that Transformer Engine's own tuner tries.",
)
@click.option(
    "--algo-count",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="AMD: algorithms that Transformer Engine's own tuner tries.",
)
@click.option("--force", is_flag=True, help="Sweep a GPU's shapes on a CPU (with --backend cpu).")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
def sweep(
    shapes: str | None,
    output: str,
    candidates: str | None,
    backend: str,
    min_gain: float,
    seconds_per_shape: float,
    budget: float,
    top: int,
    threads: int | None,
    seed: int,
    numerics: str,
    fresh: bool,
    reanalyse: bool,
    te_direct: bool,
    run_count: int,
    algo_count: int,
    force: bool,
    as_json: bool,
) -> None:
    """Time the algorithms of each GEMM in SHAPES; keep those that beat the default beyond doubt.

    Every algorithm is checked against float64 before it is timed. Interrupt at any time: the same
    command goes on where it stopped.
    """
    from gemmtune import textfile
    from gemmtune.sweep import plan, run

    beside = Path() if textfile.is_special(output) else Path(output).parent
    path = candidates or str(beside / "candidates.csv")
    if reanalyse:
        summary = run.reanalyse(path, output, min_gain, te_direct)
    elif shapes is None:
        raise click.UsageError("Missing argument 'SHAPES' (only --reanalyse goes without).")
    else:
        options = plan.Options(
            min_gain=min_gain,
            seconds_per_shape=seconds_per_shape,
            top=top,
            threads=threads,
            seed=seed,
            fresh=fresh,
            te_direct=te_direct,
            force=force and backend == "cpu",
            budget_s=budget,
        )
        asked = {"numerics": numerics, "run_count": run_count, "algo_count": algo_count}
        summary = measure(shapes, backend, asked, path, output, options)
    if as_json:
        click.echo(json.dumps(as_dict(summary), indent=1))
    else:
        print_summary(summary)


def measure(
    shapes: str,
    backend: str,
    asked: Mapping[str, Any],
    candidates: str,
    output: str,
    options: Options,
) -> Summary:
    """Say how long it will take, then sweep, with a bar. `asked`: attributes of the backend, of
    which each has those that mean something to it."""
    from gemmtune import table, textfile
    from gemmtune.backends import base
    from gemmtune.sweep import run
    from gemmtune.sweep.journal import path_beside
    from gemmtune.sweep.plan import make_plan

    samples = path_beside(candidates)
    textfile.check_apart(shapes, candidates, output, samples)
    read = table.read(shapes, table.Shape)
    chosen = base.get(base.detect() if backend == "auto" else backend)
    for name, value in asked.items():
        if hasattr(chosen, name):
            setattr(chosen, name, value)
    plan = make_plan(read.rows, chosen, options)
    count = run.thread_count(read.provenance, options)
    swept = [gemm for gemm in plan.gemms if plan.seconds[gemm]]
    say(
        f"{len(swept)} GEMM{'s' * (len(swept) != 1)} on {chosen.name}, "
        f"{count} thread{'s' * (count != 1)}: about {duration(plan.total_s)} "
        f"(less what {samples} already holds)"
    )
    for gemm, reason in plan.unsupported.items():
        say(f"left out: {gemm}: {reason}")
    if plan.beyond:
        say(f"left out: {left_out(plan.beyond, plan.share(plan.beyond))}: --top {options.top}")
    short = [gemm for gemm in plan.gemms if not plan.seconds[gemm]]
    if short:
        say(f"will hardly be reached: {left_out(short, plan.share(short))}: a longer --budget")
    with (
        stoppable(samples),
        show(plan.total_s, len(plan.gemms)) as progress,
    ):
        return run.sweep(read, chosen, candidates, output, options, progress)


def left_out(gemms: Collection[Gemm], share: float) -> str:
    """How many GEMMs, and what they stand for."""
    return f"{len(gemms)} GEMM{'s' * (len(gemms) != 1)} with {100 * share:.2g}% of the GEMM time"


@contextmanager
def stoppable(samples: Path) -> Iterator[None]:
    """End at Ctrl-C or SIGTERM with one line: what is kept, and the command that goes on."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as e:
        words = [word for word in sys.argv[1:] if word != "--fresh"]
        say(
            f"gemmtune: interrupted; what was measured is kept in {samples}; to go on: "
            f"{shlex.join(('gemmtune', *words))}"
        )
        code = signal.SIGTERM if isinstance(e, Terminated) else signal.SIGINT
        click.get_current_context().exit(128 + code)
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminated(BaseException):
    """SIGTERM has come."""


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
        if event.note:
            say(event.note)
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
            if event.note:
                bar.console.print(escape(event.note))
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
    """How it was measured, where things are, what is missing, and what to do next."""
    from gemmtune import regime

    if said := regime.of(summary.provenance):
        how = {regime.AT_CAP: "sustained runs", regime.BELOW: "call time, by short runs in turn"}
        yield f"The job ran {said}: what matters most was confirmed by {how[said]}."
    if summary.resumed:
        yield f"{summary.resumed} GEMMs were held by {summary.journal} and not measured again."
    if summary.beyond:
        share = sum(summary.beyond.values())
        yield f"{left_out(summary.beyond, share)} were not swept: raise --top for them."
    if summary.unswept:
        share = sum(summary.unswept.values())
        yield f"{left_out(summary.unswept, share)} are not done: the same command, with a longer "
        yield "--budget where it has one, goes on with"
        yield from (f"  {gemm}  {100 * part:.2g}%" for gemm, part in summary.unswept.items())
    if summary.failed:
        yield f"{len(summary.failed)} GEMMs could not be measured; --fresh tries them again."
    if summary.unsupported:
        yield f"{len(summary.unsupported)} GEMMs were left out: this backend cannot run them."
    yield f"Wrote {summary.tuned} and {summary.candidates} in {duration(summary.seconds)}."
    if any(line.gain for line in summary.lines):
        from gemmtune.replay.plan import Plan

        command = summary.provenance.get("command") or "python train.py"
        words = command if isinstance(command, str) else shlex.join(command)
        yield "Next, see whether the job's step is faster:"
        if summary.provenance.get("backend") == "te":  # keeps an algorithm to a process's end
            yield f"  gemmtune convert {shlex.quote(summary.tuned)} -o te.csv"
            loading = shlex.quote(f"TE_HIPBLASLT_ALGO_LOAD=te.csv {words}")
            yield f"  gemmtune replay --a {shlex.quote(words)} --b {loading}"
            return
        yield f"  gemmtune replay {shlex.quote(summary.tuned)} -- {words}"
        yield (
            f"The job has to run for {Plan().steps} steps at least, or fewer with --pairs,"
            " --aa-pairs and --block: the replay ends it when it is done."
        )


def listed(left: Mapping[Gemm, float]) -> list[dict[str, Any]]:
    return [{"gemm": gemm._asdict(), "share": share} for gemm, share in left.items()]


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values."""
    return {
        "before_us": summary.before_us,
        "after_us": summary.after_us,
        "tuned": summary.tuned,
        "candidates": summary.candidates,
        "resumed": summary.resumed,
        "journal": summary.journal,
        "seconds": summary.seconds,
        "beyond_top": listed(summary.beyond),
        "not_done": listed(summary.unswept),
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
