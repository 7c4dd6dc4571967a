"""`check`, `convert` and `merge`: read tuned CSVs; write findings, or one table."""

from __future__ import annotations

import json
import sys

import click

from gemmtune.dialects import DIALECTS, GEMMTUNE, OVERRIDE, TUNABLEOP, detect, hipblaslt, te
from gemmtune.dialects.convert import convert as convert_text
from gemmtune.dialects.convert import source_of, te_made
from gemmtune.dialects.finding import ERROR, Finding, has_errors
from gemmtune.dialects.lint import lint
from gemmtune.dialects.merge import merge as merge_texts
from gemmtune.errors import UsageError
from gemmtune.gemm import Gemm
from gemmtune.table import Shape, by_gemm, read, read_provenance
from gemmtune.textfile import decode, read_bytes, read_text, write_text


def _dev_cap(_: click.Context, __: click.Parameter, gpu: str | None) -> int | None:
    """TE's number of a GPU: 904 or gfx942 (major, minor, stepping) is 904."""
    if gpu is None or gpu.isdecimal():
        return None if gpu is None else int(gpu)
    if (cap := hipblaslt.dev_cap(gpu)) is None:
        raise click.BadParameter(f"{gpu!r} is neither an architecture (gfx942) nor a dev_cap (904)")
    return cap


_gpu = click.option(
    "--gpu",
    metavar="GPU",
    callback=_dev_cap,
    help="The machine's GPU, gfx942 or 904: rows of every other are errors.",
)
_output = click.option(
    "-o", "--output", metavar="FILE", help="Write here (atomically) instead of stdout."
)


@click.command(epilog="Example:  gemmtune check tuned.csv --dialect te-v1 --gpu gfx942")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--dialect",
    type=click.Choice(DIALECTS),
    help="What the TE in use speaks (line 1 of a file that it saved); `gemmtune` for a table that"
    " is not meant for TE. Default: that of line 1;"
    " a table of gemmtune's is then an error, since TE ignores it.",
)
@_gpu
@click.option("--json", "as_json", is_flag=True, help="Findings as a JSON list.")
def check(files: tuple[str, ...], dialect: str | None, gpu: int | None, as_json: bool) -> None:
    """Lint tuned CSVs: all that Transformer Engine would reject, ignore or misread.

    Exit code 0: every row is used as written (there may be warnings). 1: errors. 2: a file cannot
    be read.
    """
    findings: list[tuple[str, Finding]] = []
    unreadable = 0
    for file in files:
        try:
            data = read_bytes(file)
        except UsageError as e:
            click.echo(f"gemmtune: {e}", err=True)
            unreadable += 1
            continue
        findings += [(file, finding) for finding in lint(data, dialect, gpu)]
    if as_json:
        listed = [{"file": file, **finding._asdict()} for file, finding in findings]
        click.echo(json.dumps(listed, indent=1))
    else:
        for file, finding in findings:
            click.echo(f"{file}:{finding.line}: {_printable(str(finding))}")
    errors = sum(finding.severity == ERROR for _, finding in findings)
    click.echo(
        f"{_count(len(files) - unreadable, 'file')}: {_count(errors, 'error')},"
        f" {_count(len(findings) - errors, 'warning')}",
        err=True,
    )
    sys.exit(2 if unreadable else 1 if errors else 0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _sound(file: str, gpu: int | None) -> str:
    """The text of a table that has no errors; else the findings go to stderr and we exit with 1."""
    data = read_bytes(file)
    text = data.decode("utf-8", "surrogateescape")
    if source_of(text) in (OVERRIDE, TUNABLEOP):  # what is wrong with them is said row by row
        return decode(data, file)
    dialect = GEMMTUNE if detect(text) == GEMMTUNE else None
    _stop_on_errors(file, lint(data, dialect, gpu), "mend these first")
    return decode(data, file)


def _stop_on_errors(file: str, findings: list[Finding], what: str) -> None:
    if has_errors(findings):
        for finding in findings:
            if finding.severity == ERROR:
                click.echo(f"{file}:{finding.line}: {_printable(str(finding))}", err=True)
        click.echo(f"gemmtune: nothing written: {what}", err=True)
        sys.exit(1)


def _put(output: str | None, text: str) -> None:
    if output is None:
        click.echo(text.encode("utf-8"), nl=False)
    else:
        write_text(output, text)


@click.command(epilog="Example:  gemmtune convert tuned.csv --to te-v1 -o te.csv")
@click.argument("file", metavar="FILE")
@click.option(
    "--to",
    type=click.Choice((*DIALECTS, OVERRIDE, TUNABLEOP)),
    help="The dialect to write: TE's, hipBLASLt's tuning file, PyTorch's TunableOp results."
    "  [default: what the swept Transformer Engine speaks]",
)
@click.option("--drop", is_flag=True, help="Leave out the rows that the dialect cannot express.")
@click.option(
    "--shapes",
    metavar="SHAPES",
    help="shapes.csv: weighs GEMMs that TE cannot tell apart by their calls per step.",
)
@click.option(
    "--like",
    metavar="FILE",
    help="A file of that dialect from the job's machine: its build is written (override: line 1,"
    " if the table does not say it; tunableop: the Validator lines).",
)
@_gpu
@_output
def convert(
    file: str,
    *,
    to: str | None,
    drop: bool,
    shapes: str | None,
    like: str | None,
    gpu: int | None,
    output: str | None,
) -> None:
    """Write a tuned CSV in another dialect, comments and provenance with it.

    FILE may also be a tuning file of hipBLASLt's or a result file of TunableOp's. Refuses a table
    with errors, and rows that the dialect cannot express (a batch, float64, a row of a CPU, a scale
    mode): exit code 1, with the reason for each.
    """
    text = _sound(file, gpu)
    to = to or te_made(read_provenance(text)[0]).get("dialect")
    if to is None:
        raise UsageError(f"{file} does not say for which Transformer Engine it is: add --to te-v1")
    calls: dict[Gemm, float] = by_gemm(read(shapes, Shape).rows) if shapes else {}
    result = convert_text(text, to, calls, read_text(like) if like else "", gpu)
    if not drop:
        _stop_on_errors(file, result.findings, f"{to} cannot express these rows")
    for finding in result.findings:
        click.echo(f"{file}:{finding.line}: {finding}", err=True)
    if to in te.HEADERS:
        made = lint(result.text.encode("utf-8"), to, gpu)
        _stop_on_errors(output or "(converted)", made, "TE would not use this")
    _put(output, result.text)


@click.command(epilog="Example:  gemmtune merge tuned-rank*.csv -o tuned.csv")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--force", is_flag=True, help="Merge other dialects and library builds, too.")
@_gpu
@_output
def merge(files: tuple[str, ...], force: bool, gpu: int | None, output: str | None) -> None:
    """Merge tuned CSVs, as the ranks of a job write them, into one.

    Of two rows for one GEMM the faster is kept where both have a time, else the first. Rows that
    disagree are reported on stderr. Tables of different dialects, GPUs or library builds are
    refused (exit code 3).
    """
    result = merge_texts([(file, _sound(file, gpu)) for file in files], force)
    for note in (*result.notes, *result.conflicts):
        click.echo(note, err=True)
    conflicts = len(result.conflicts)
    click.echo(f"{_count(len(files), 'table')} merged, {_count(conflicts, 'conflict')}", err=True)
    _put(output, result.text)
