"""`gemmtune replay`: is the training step faster with the table?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click

from gemmtune import table, textfile
from gemmtune.cli import compare
from gemmtune.cli.capture import JOB, OPTIMIZER, note_elsewhere
from gemmtune.cli.run import BACKEND, TUNED, read_job_table
from gemmtune.errors import Incompatible, UsageError
from gemmtune.replay.plan import Plan

ENTRY = "gemmtune.replay.arms:start"
DEFAULTS = Plan()


@click.command(epilog="Example:  gemmtune replay tuned.csv -- python train.py")
@TUNED
@JOB
@click.option(
    "--pairs", default=DEFAULTS.pairs, show_default=True, help="Pairs of blocks to compare."
)
@click.option(
    "--aa-pairs",
    default=DEFAULTS.aa_pairs,
    show_default=True,
    help="Control pairs before them, default against default.",
)
@click.option("--block", default=DEFAULTS.block, show_default=True, help="Steps in a block.")
@click.option(
    "--warmup", default=DEFAULTS.warmup, show_default=True, help="Steps before the first block."
)
@click.option("--seed", default=DEFAULTS.seed, show_default=True, help="Seed of the random order.")
@click.option("--no-stop", is_flag=True, help="Let the job run on when the last block is done.")
@click.option("--optimizer", metavar="CLASS", help=OPTIMIZER)
@BACKEND
@click.option(
    "-o", "--json", "output", type=click.Path(path_type=Path), help="Write all of it as JSON."
)
@compare.options
@click.pass_context
def replay(
    ctx: click.Context,
    *,
    tuned: Path | None,
    job: tuple[str, ...],
    pairs: int,
    aa_pairs: int,
    block: int,
    warmup: int,
    seed: int,
    no_stop: bool,
    optimizer: str | None,
    backend: str | None,
    output: Path | None,
) -> None:
    """Compare the default with the table TUNED inside the running JOB.

    All ranks alternate between the two in blocks of optimizer steps; the job ends with the last
    block. Exit code: 0 faster or no difference, 1 slower, 2 nothing could be said or the job
    failed, 3 the table was made on another machine.

    \b
    Two jobs, or two settings of one, are compared by processes in turn with --a and --b; what each
    showed is kept beside compare.json (or -o), and the same command goes on where it was stopped:
      gemmtune replay --a "python train.py" --b "VAR=1 python train.py --te"
    """
    if compare.asked(ctx):
        compare.compare(ctx)
    plan = Plan(seed, warmup, block, pairs, aa_pairs)
    plan.check()
    example = "replay tuned.csv -- python train.py"
    text, made = read_job_table(tuned, example)
    if not job:
        raise UsageError(f"no job: write it after --, as in: gemmtune {example}")
    assert tuned is not None
    if made is None:
        raise UsageError(
            f"{tuned} is in a dialect of Transformer Engine, which loads it once and for all: "
            f"replay takes tables of gemmtune"
        )
    if output is not None:
        textfile.check_writable(output)  # better now than after the job

    from gemmtune import machine
    from gemmtune.backends import base
    from gemmtune.job import apply, launch
    from gemmtune.replay import analyse, arms, verdict

    backend = apply.backend_of(made, backend)
    hard, _ = apply.compare(made, backend)
    if hard:
        raise Incompatible(f"{tuned} cannot be replayed here: {'; '.join(hard)}")
    options = {
        "table": str(tuned.absolute()),
        "backend": backend,
        "plan": plan._asdict(),
        "stop": not no_stop,
        "optimizer": optimizer,
    }
    code, ranks = 0, []
    if made.rows:
        with tempfile.TemporaryDirectory(prefix="gemmtune-replay-") as out:
            code = launch.run(job, ENTRY, options, out)
            ranks = arms.read_steps(out)
    rows = [
        (line, row.gemm, row.algo.config)
        for (line, _), row in zip(table.scan(text, table.Tuned), made.rows, strict=True)
    ]
    result = analyse.analyse(plan, ranks, rows)
    found = verdict.judge(result)
    for line in verdict.lines(result, found):
        click.echo(line)
    if made.rows and not ranks:
        note_elsewhere(job)
    if output is not None:
        values = {
            "verdict": found._asdict(),
            "table": str(tuned),
            "job": list(job),
            "job_exit_code": code,
            "machine": machine.fingerprint(base.get(backend)),
            **analyse.as_json(result),
        }
        textfile.write_text(output, json.dumps(values, indent=1) + "\n")
    if code:
        click.echo(f"gemmtune: the job ended with exit code {code}", err=True)
        # Once all is measured the job is ended from here, and how it goes is not its own doing.
        if no_stop or result.pairs < plan.pairs:
            ctx.exit(2)
    ctx.exit(verdict.EXIT[found.kind])
