"""`gemmtune doctor`."""

from __future__ import annotations

import json

import click

from gemmtune import __version__


@click.command(epilog="Example:  gemmtune doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show what is here, which backends work, and the next step for what is missing.

    Every backend is tried on a small GEMM. Exits with 0 if one of them works, else with 1.
    """
    from gemmtune.doctor import examine

    report = examine()
    if as_json:
        answer = {
            "gemmtune": __version__,
            "default": report.default,
            "here": [fact._asdict() for fact in report.facts],
            "backends": [status._asdict() for status in report.backends],
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(f"gemmtune {__version__}\n\nHere")
        for fact in report.facts:
            click.echo(f"  {fact.name:<20}{fact.value}")
            if fact.next:
                click.echo(f"  {'':<20}next: {fact.next}")
        click.echo("\nBackends")
        for status in report.backends:
            verdict = "works" if status.works else "no"
            click.echo(f"  {status.backend:<12}{verdict:<8}{status.detail}")
            if status.next:
                click.echo(f"  {'':<20}next: {status.next}")
        default = report.default or "none: a sweep has to be told which, as in --backend cpu"
        click.echo(f"\nBackend for this machine: {default}")
        if report.default:
            click.echo("Next, for a training job: gemmtune capture -- python train.py")
    ctx.exit(0 if any(status.works for status in report.backends) else 1)
