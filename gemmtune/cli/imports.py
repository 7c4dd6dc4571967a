"""`gemmtune import`: read the logs and tables of other tools; write shapes.csv."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gemmtune import __version__, table, textfile
from gemmtune.capture.logs import KINDS, Reader
from gemmtune.cli.capture import OUTPUT
from gemmtune.table import Shape


@click.command("import", epilog="Example:  gemmtune import hipblaslt.log -o shapes.csv --steps 10")
@click.argument("logs", nargs=-1, required=True, metavar="LOG...")
@OUTPUT
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Optimizer steps that the logs cover, times the ranks: calls are divided by it.",
)
def import_(logs: tuple[str, ...], output: Path, steps: int) -> None:
    """Make a shape table of logs and tables that other tools wrote.

    Read are trace lines of cuBLASLt (CUBLASLT_LOG_LEVEL=2) and hipBLASLt, hipblaslt-bench command
    lines (HIPBLASLT_LOG_MASK=32) and YAML (64), hipBLASLt tuning files, NVTE_LOG_GEMM_CONFIG=1
    lines, results and untuned lists of PyTorch's TunableOp, and Transformer Engine's algorithm
    CSVs, each known by its lines: files may be mixed and rotated. Lines that cannot be read are
    counted, the first of them shown. A row's pass is given only where its call leaves no doubt.
    """
    textfile.check_writable(output)
    textfile.check_apart(*logs, output)
    reader = Reader()
    for log in logs:
        reader.read(log)
    for unread in reader.shown:
        click.echo(_printable(str(unread)), err=True)
    if reader.unread > len(reader.shown):
        click.echo(f"and {reader.unread - len(reader.shown)} more lines not read", err=True)
    rows = reader.shapes(steps)
    if not rows:
        click.echo(f"gemmtune: no GEMM in these files. What is known: {KINDS}", err=True)
        sys.exit(1)
    provenance = {"stage": "import", "version": __version__, "files": list(logs), "steps": steps}
    table.write(output, rows, Shape, provenance)
    calls = sum(row.calls for row in rows)
    kinds = ", ".join(f"{count} {kind}s" for kind, count in reader.kinds.items())
    click.echo(
        f"{output}: {len(rows)} row{'s' * (len(rows) != 1)}, {calls:.6g} calls per step, of"
        f" {reader.lines} lines: {kinds}; {reader.other} without a GEMM, {reader.unread} not read",
        err=True,
    )
    if reader.uncounted:
        click.echo(
            f"{reader.uncounted} rows are of tables, which say no number of calls: 1 each", err=True
        )


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
