"""The command line: one command per verb, loaded only when it is used.

Only this package prints and exits. Data goes to stdout or the file named by -o, the rest to stderr.
Exit codes: 0 done, 1 a finding or a failure, 2 the request or its input is wrong, 3 incompatible,
130 interrupted (what was measured is kept). Commands that run a job pass on its exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
from keyword import iskeyword
from typing import Any

import click

from gemmtune import __version__
from gemmtune.errors import GemmtuneError

# name: (module in gemmtune.cli, one line for the overview). The order is the workflow's.
COMMANDS = {
    "tune": ("tune", "Capture, sweep and replay in one command: tuned.csv, if the step gains."),
    "capture": ("capture", "Record the GEMMs of a training job: shapes.csv."),
    "import": ("imports", "Make a shape table of other tools' logs and tables."),
    "sweep": ("sweep", "Time the algorithms of each GEMM: candidates.csv and tuned.csv."),
    "replay": ("replay", "Compare the default with a tuned table inside the running job."),
    "run": ("run", "Run a job with a tuned table applied."),
    "env": ("run", "Print the exports that apply a tuned table to a job."),
    "check": ("tables", "Lint a tuned CSV: what Transformer Engine would reject or ignore."),
    "convert": ("tables", "Write a tuned CSV in another dialect."),
    "merge": ("tables", "Merge tuned CSVs, the faster row kept."),
    "doctor": ("doctor", "What is here, what works, and how to get what is missing."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when called, so that --help needs click alone."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gemmtune.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name + "_" * iskeyword(cmd_name))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, *args: Any, **more: Any) -> Any:
        _open_streams()
        return super().main(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        # Exported by `gemmtune env` for the user's job, not for gemmtune's own processes.
        os.environ.pop("GEMMTUNE_JOB", None)
        try:
            return super().invoke(ctx)
        except GemmtuneError as e:
            click.echo(f"gemmtune: {e}", err=True)
            ctx.exit(e.exit_code)
        except KeyboardInterrupt:
            click.echo("gemmtune: interrupted; what was measured is kept", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(0)
        except OSError as e:  # a standard output on a full disk, as a rule
            place = e.filename or "standard output"
            click.echo(f"gemmtune: {place}: {e.strerror or e}", err=True)
            # What is still in its buffer would fail again as Python ends, and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(1)


def _open_streams() -> None:
    """Stand-ins for the standard streams that were closed when this process was started.

    Without them the next files that are opened would be the standard streams of the jobs.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start here:  gemmtune capture -- python train.py",
)
@click.version_option(__version__, message="gemmtune %(version)s")
def main() -> None:
    """Find faster GEMM algorithms for your training job, and prove it in that job.

    \b
      gemmtune tune -- python train.py                      all of these in turn:
      gemmtune capture -o shapes.csv -- python train.py     what the job runs
      gemmtune sweep shapes.csv                             what would be faster
      gemmtune replay tuned.csv -- python train.py          is the step faster?
      gemmtune run tuned.csv -- python train.py             use it
    """
