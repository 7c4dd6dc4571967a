"""`gemmtune replay`: is the training step faster with the table?"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmtune import regime, table, textfile
from gemmtune.cli import compare
from gemmtune.cli.capture import JOB, OPTIMIZER, note_elsewhere
from gemmtune.cli.run import BACKEND, TUNED, check_job, read_job_table
from gemmtune.cli.sweep import seconds
from gemmtune.errors import Incompatible, UsageError
from gemmtune.replay.plan import Plan

if TYPE_CHECKING:
    from gemmtune.replay.analyse import Rank

ENTRY = "gemmtune.replay.arms:start"
DEFAULTS = Plan()


@click.command(epilog="Example:  gemmtune replay tuned.csv -- python train.py")
@TUNED
@JOB
@click.option(
    "--precision",
    default=DEFAULTS.precision,
    show_default=True,
    metavar="PERCENT",
    help="Half-width of the interval to come to.",
)
@click.option(
    "--max-pairs",
    default=DEFAULTS.max_pairs,
    show_default=True,
    help="Pairs of blocks to compare at most for it.",
)
@click.option(
    "--budget",
    callback=seconds,
    metavar="TIME",
    help="For the steps of the replay: 90s, 10m. It ends there with the pairs it has.",
)
@click.option(
    "--pairs", type=int, help="Pairs to compare.  [default: as many as the precision takes]"
)
@click.option(
    "--aa-pairs",
    default=DEFAULTS.aa_pairs,
    show_default=True,
    help="Control pairs before them, default against default.",
)
@click.option(
    "--block", type=int, help="Steps in a block.  [default: by how fast the step time settles]"
)
@click.option(
    "--warmup", default=DEFAULTS.warmup, show_default=True, help="Steps before all of these."
)
@click.option("--seed", default=DEFAULTS.seed, show_default=True, help="Seed of the random order.")
@click.option("--no-stop", is_flag=True, help="Let the job run on when the last block is done.")
@click.option("--optimizer", metavar="CLASS", help=OPTIMIZER)
@BACKEND
@click.option(
    "-o",
    "--json",
    "output",
    type=click.Path(path_type=Path),
    help="Write all of it as JSON, and keep each step beside it (replay.steps).",
)
@click.option(
    "--reanalyse",
    is_flag=True,
    help="Run no job: judge the steps kept beside -o again, as after a kill.",
)
@compare.options
@click.pass_context
def replay(
    ctx: click.Context,
    *,
    tuned: Path | None,
    job: tuple[str, ...],
    precision: float,
    max_pairs: int,
    budget: float,
    pairs: int | None,
    aa_pairs: int,
    block: int | None,
    warmup: int,
    seed: int,
    no_stop: bool,
    optimizer: str | None,
    backend: str | None,
    output: Path | None,
    reanalyse: bool,
) -> None:
    """Compare the default with the table TUNED inside the running JOB.

    All ranks alternate between the two in blocks of optimizer steps: first a control, default
    against default, from whose spread the number of pairs is planned, then default against TUNED
    until the interval is narrow enough. The job is ended with the last block.

    Exit code: 0 faster or no difference, 1 slower, 2 nothing could be said or the job failed, 3 the
    table was made on another machine.

    \b
    Two jobs, or two settings of one, are compared by processes in turn with --a and --b; what each
    showed is kept beside compare.json (or -o), and the same command goes on where it was stopped:
      gemmtune replay --a "python train.py" --b "VAR=1 python train.py --te"
    """
    if compare.asked(ctx):
        compare.compare(ctx)
    plan = Plan(seed, warmup, block, pairs, aa_pairs, precision, max_pairs, budget)
    plan.check()
    example = "replay tuned.csv -- python train.py"
    path, text, made = read_job_table(tuned, example)
    if made is None:
        raise UsageError(
            f"{path} is in a dialect of Transformer Engine, which loads it once and for all: "
            f"replay takes tables of gemmtune"
        )
    if not reanalyse:
        check_job(job, example)
    elif job or output is None:
        raise UsageError(
            "--reanalyse runs no job and reads the steps beside -o, as in: "
            "gemmtune replay tuned.csv --reanalyse -o replay.json"
        )
    if output is not None:
        textfile.check_writable(output)  # better now than after the job
        textfile.check_apart(path, output)

    from gemmtune.job import coverage
    from gemmtune.replay import analyse, logs, verdict

    code: int | None = None
    if reanalyse and output is not None:
        gemms = [str(gemm) for gemm in coverage.first_rows(made.rows)]
        about, ranks = logs.reread(output, gemms)
        plan = ranks[0].plan
    else:
        options = {
            "table": str(path.absolute()),
            "plan": plan._asdict(),
            "stop": not no_stop,
            "optimizer": optimizer,
        }
        about, code, ranks = _run(made, path, job, backend, options, output)
    rows = [
        (line, row.gemm, row.algo.config)
        for (line, _), row in zip(table.scan(text, table.Tuned), made.rows, strict=True)
    ]
    result = analyse.analyse(plan, ranks, rows, regime.of(made.provenance))
    found = verdict.judge(result)
    if output is not None:
        values = {
            "verdict": found._asdict(),
            **about,
            "job_exit_code": code,
            **analyse.as_json(result),
        }
        textfile.write_text(output, json.dumps(values, indent=1) + "\n")
    for line in verdict.lines(result, found):
        click.echo(line)
    if made.rows and job and not ranks:
        note_elsewhere(job)
    if code:
        click.echo(f"gemmtune: the job ended with exit code {code}", err=True)
        # Once all is measured the job is ended from here, and how it goes is not its own doing.
        if no_stop or not result.done:
            ctx.exit(2)
    ctx.exit(verdict.EXIT[found.kind])


def _run(
    made: table.Table[table.Tuned],
    path: Path,
    job: tuple[str, ...],
    backend: str | None,
    options: dict[str, Any],
    output: Path | None,
) -> tuple[dict[str, Any], int, list[Rank]]:
    """Run the job: what the replay is about, the job's exit code, its ranks' records."""
    from gemmtune import machine
    from gemmtune.backends import base
    from gemmtune.job import apply, launch
    from gemmtune.replay import arms

    backend = apply.backend_of(made, backend)
    hard, _ = apply.compare(made, backend)
    if hard:
        raise Incompatible(f"{path} cannot be replayed here: {'; '.join(hard)}")
    fingerprint = machine.fingerprint(base.get(backend))
    about = {"table": str(path), "job": list(job), "machine": fingerprint}
    if not made.rows:
        return about, 0, []
    with _logs(output, about) as folder:
        preload = base.preload(backend)
        code = launch.run(job, ENTRY, {**options, "backend": backend}, folder, preload)
        return about, code, arms.read_steps(folder)


@contextlib.contextmanager
def _logs(output: Path | None, about: dict[str, Any]) -> Iterator[Path]:
    """The folder for the ranks' step logs: beside the output, or one for the time being."""
    from gemmtune.replay import logs

    if output is not None and (output.is_file() or not output.exists()):
        earlier = logs.folder(output)
        with textfile.hold(earlier) if earlier.is_dir() else contextlib.nullcontext():
            made, kept = logs.prepare(output, about)
        if kept is not None:
            click.echo(
                f"gemmtune: the steps of a replay that was cut short are in {kept}", err=True
            )
        with textfile.hold(made):
            yield made
    else:
        with tempfile.TemporaryDirectory(prefix="gemmtune-replay-") as folder:
            yield Path(folder)
