"""`gemmtune run` and `gemmtune env`: a job with a tuned table applied.

A table of ours is applied by gemmtune inside the job; one of Transformer Engine's dialects is
handed to Transformer Engine by its own variables.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import click

from gemmtune.cli.capture import JOB, note_elsewhere
from gemmtune.dialects import te
from gemmtune.dialects.te import ALGO_LOAD, ALGO_SAVE
from gemmtune.errors import JobError, UsageError
from gemmtune.table import Table, Tuned, parse, read_provenance
from gemmtune.textfile import read_text

ENTRY = "gemmtune.job.apply:start"
TE_ENTRY = "gemmtune.job.te_run:start"
# With these set, Transformer Engine tunes inside the job, or picks another index than the table's.
TE_TUNING = (
    "TE_HIPBLASLT_TUNING_RUN_COUNT",
    "TE_HIPBLASLT_TUNING_ALGO_COUNT",
    "TE_HIPBLASLT_ALGO_SELECTION",
)


def read_job_table(path: Path | None, command: str) -> tuple[Path, str, Table[Tuned] | None]:
    """A table's path, text and rows; no rows for a dialect of TE, which reads it itself.

    `command` is an example of what was meant, for the message where there is no table.
    """
    if path is None:
        raise UsageError(f"no table: write it first, as in: gemmtune {command}")
    if not path.is_file():
        raise UsageError(f"there is no table {path}: write it first, as in: gemmtune {command}")
    text = read_text(path)
    if te.detect(text) is not None:
        return path, text, None
    return path, text, parse(text, Tuned, str(path))


def check_job(job: tuple[str, ...], command: str) -> None:
    """Raise UsageError where there is no job; `command` is an example of what was meant."""
    if not job:
        raise UsageError(f"no job: write it after --, as in: gemmtune {command}")


def te_variables(path: Path) -> tuple[dict[str, str], list[str]]:
    """What makes Transformer Engine use a table of its dialect: variables to set, and to unset."""
    unset = list(TE_TUNING)
    save = os.environ.get(ALGO_SAVE)
    if save and os.path.realpath(save) == os.path.realpath(path):
        unset.append(ALGO_SAVE)  # it truncates the file at its start
    for name in unset:
        if name in os.environ:
            click.echo(f"gemmtune: {name}={os.environ[name]} is unset for this job", err=True)
    return {ALGO_LOAD: str(path.absolute())}, unset


def _options(path: Path, backend: str | None, strict: bool, quiet: bool) -> dict[str, Any]:
    return {"table": str(path.absolute()), "backend": backend, "strict": strict, "quiet": quiet}


def _preload(rows: Table[Tuned], backend: str | None) -> Path | None:
    """The library that jobs with this table are to start with."""
    from gemmtune.backends import base

    return base.preload(base.applying(rows.provenance, backend))


STRICT = click.option(
    "--strict",
    is_flag=True,
    help="End the job with 3 where the table cannot be applied as it was made.",
)
BACKEND = click.option("--backend", help="What applies the table: cpu.  [default: the table's]")
TUNED = click.argument("tuned", required=False, type=click.Path(path_type=Path))


@click.command(epilog="Example:  gemmtune run tuned.csv -- python train.py")
@TUNED
@JOB
@STRICT
@BACKEND
@click.pass_context
def run(
    ctx: click.Context,
    *,
    tuned: Path | None,
    job: tuple[str, ...],
    strict: bool,
    backend: str | None,
) -> None:
    """Run JOB with the table TUNED applied in all its processes.

    The job's output, arguments and exit code are its own; a line on stderr at the end says which
    rows were really launched. A table that was made on another processor or library build is left
    out, with one line that says so.
    """
    from gemmtune.job import launch
    from gemmtune.job.coverage import Use, summary

    example = "run tuned.csv -- python train.py"
    path, _, rows = read_job_table(tuned, example)
    check_job(job, example)
    if rows is None or applied_by_te(rows, backend):
        ctx.exit(_run_te(path, rows, job))
    with tempfile.TemporaryDirectory(prefix="gemmtune-run-") as out:
        options = _options(path, backend, strict, quiet=True)
        code = launch.run(job, ENTRY, options, out, _preload(rows, backend))
        try:
            records = launch.read_ranks(out)
        except JobError:
            records = []
    uses = [Use(**{k: v for k, v in r.items() if k in Use._fields}) for r in records]
    if uses or not (strict and code):
        click.echo(f"gemmtune: {summary(uses, len(rows.rows))}", err=True)
    if rows.rows and not uses:
        note_elsewhere(job)
    for line in sorted({line for use in uses for line in use.differences}):
        click.echo(f"gemmtune: note: {line}", err=True)
    ctx.exit(code)


def applied_by_te(rows: Table[Tuned], backend: str | None) -> bool:
    """Whether a table of ours is for Transformer Engine to read, once it is converted."""
    return (backend or rows.provenance.get("backend")) == "te"


def _settings_differ(made: dict[str, Any]) -> list[str]:
    """Settings that were others when the GEMMs were captured; TE's own are dealt with here."""
    from gemmtune import machine

    then, now = made.get("settings") or {}, machine.settings()
    return [
        f"{name}: {then.get(name, 'not set')} when the job was captured, {now.get(name, 'not set')}"
        " here"
        for name in machine.SETTINGS
        if "stage" in made and not name.startswith("TE_") and then.get(name) != now.get(name)
    ]


def _run_te(path: Path, rows: Table[Tuned] | None, job: tuple[str, ...]) -> int:
    """Run a job whose Transformer Engine loads the table, the same file in all ranks."""
    from gemmtune.capture import te_saved
    from gemmtune.dialects.convert import convert, te_made
    from gemmtune.job import launch
    from gemmtune.job.te_coverage import report

    with tempfile.TemporaryDirectory(prefix="gemmtune-run-") as out:
        for line in _settings_differ(read_provenance(read_text(path))[0]):
            click.echo(f"gemmtune: note: {line}", err=True)
        if rows is not None:
            dialect = te_made(rows.provenance).get("dialect", "te-v1")
            text = convert(read_text(path), dialect).text
            path = Path(out) / "tuned.csv"
            path.write_text(text, encoding="utf-8")
        table = te.read(read_text(path), str(path))  # better now than at the job's first GEMM
        variables, unset = te_variables(path)
        for name in unset:
            os.environ.pop(name, None)
        os.environ.update(variables)
        click.echo(f"gemmtune: {ALGO_LOAD}={variables[ALGO_LOAD]}", err=True)
        code = launch.run(job, TE_ENTRY, {"table": str(path)}, out)
        try:
            records = launch.read_ranks(out)
        except JobError:
            records = []
        saved = [read_text(p) for p in sorted(Path(out).glob(te_saved.FILES))]
        for line in report(table, records, saved):
            click.echo(f"gemmtune: {line}", err=True)
    if not records:
        note_elsewhere(job)
    return code


@click.command(epilog="Example:  gemmtune env tuned.csv")
@TUNED
@STRICT
@BACKEND
def env(tuned: Path | None, strict: bool, backend: str | None) -> None:
    """Print the exports that apply the table TUNED to every job of a shell.

    Where a job is started by something that `gemmtune run` cannot wrap. To set them:
    eval "$(gemmtune env tuned.csv)". Rank 0 says at its end which rows were launched.
    `unset GEMMTUNE_JOB` takes the table off again.
    """
    from gemmtune.job import launch

    path, _, rows = read_job_table(tuned, "env tuned.csv")
    unset: list[str] = []
    if rows is None:
        variables, unset = te_variables(path)
    elif applied_by_te(rows, backend):
        raise UsageError(
            f"{path} is for Transformer Engine: write it in its dialect first (gemmtune convert "
            f"{path} -o te.csv), then: gemmtune env te.csv"
        )
    else:
        options = _options(path, backend, strict, quiet=False)
        preload = _preload(rows, backend)
        variables = launch.environment(ENTRY, options, path.absolute().parent, preload=preload)
    for name in unset:
        click.echo(f"unset {name}")
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")
