"""`gemmtune replay --a CMD --b CMD`: two jobs compared by alternated processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gemmtune.cli.capture import note_elsewhere
from gemmtune.errors import UsageError
from gemmtune.replay.turns import ARMS, Plan, parse_command

if TYPE_CHECKING:
    from gemmtune.replay.compare import Outcome

DEFAULTS = Plan()
OUTPUT = Path("compare.json")
_KEY = "gemmtune.compare"
# The options of replay that a comparison takes too.
_SHARED = ("warmup", "seed", "no_stop", "optimizer", "output")


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        ctx.meta.setdefault(_KEY, {})[param.name] = value


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a comparison to `gemmtune replay`, which need not know them."""
    for names, more in reversed(
        (
            (("--a",), {"metavar": "CMD", "help": "Compare this job, VAR=value before it, …"}),
            (("--b",), {"metavar": "CMD", "help": "… with this one, process by process."}),
            (
                ("--runs",),
                {
                    "type": int,
                    "metavar": "N",
                    "help": f"With --a and --b: processes of each.  [default: {DEFAULTS.runs}]",
                },
            ),
            (
                ("--steps",),
                {
                    "type": int,
                    "metavar": "N",
                    "help": "With --a and --b: steps counted in each process.  "
                    f"[default: {DEFAULTS.steps}]",
                },
            ),
            (
                ("--tokens-per-step",),
                {
                    "type": click.FloatRange(0, min_open=True),
                    "metavar": "N",
                    "help": "With --a and --b: tokens of a step of all ranks, for tokens/s, where "
                    "the job does not call gemmtune.work().",
                },
            ),
            (("--fresh",), {"is_flag": True, "help": "With --a and --b: keep no earlier process."}),
        )
    ):
        command = click.option(*names, **more, expose_value=False, callback=_keep)(command)
    return command


def asked(ctx: click.Context) -> bool:
    """Whether this call of replay is a comparison of two jobs. Raises UsageError if it is half."""
    given = ctx.meta.get(_KEY, {})
    if "a" in given and "b" in given:
        return True
    if given:
        first = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(
            f"{first} compares two jobs, and both are to be named, as in: gemmtune replay "
            f'--a "python train.py" --b "python train.py --te"'
        )
    return False


def compare(ctx: click.Context) -> None:
    """Carry out the comparison that the command line asks for, and exit."""
    given = ctx.meta[_KEY]
    own = {
        name: ctx.params[name]
        for name in ctx.params
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        and ctx.params[name] not in (None, ())
    }
    for param in ctx.command.params:
        if param.name in own and param.name not in _SHARED:
            name = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(ctx)
            raise UsageError(f"{name} has no meaning with --a and --b, which name whole jobs")

    from gemmtune import textfile
    from gemmtune.replay import compare as comparison
    from gemmtune.replay import processes

    plan = Plan(
        given.get("runs", DEFAULTS.runs),
        own.get("warmup", DEFAULTS.warmup),
        given.get("steps", DEFAULTS.steps),
        own.get("seed", DEFAULTS.seed),
    )
    plan.check()
    output = own.get("output", OUTPUT)
    textfile.check_writable(output)  # better now than after the jobs
    plain = output.is_file() or not output.exists()
    folder = (output if plain else OUTPUT).with_suffix(".runs")
    commands = {arm: parse_command(f"--{arm}", given[arm]) for arm in ARMS}

    def tell(outcome: Outcome, left: float) -> None:
        click.echo(comparison.progress(plan, outcome, left), err=True)

    outcomes = processes.compare(
        commands,
        plan,
        folder,
        stop=not own.get("no_stop", False),
        optimizer=own.get("optimizer"),
        fresh=given.get("fresh", False),
        tell=tell,
    )
    result = comparison.analyse(plan, outcomes, given.get("tokens_per_step"))
    verdict = comparison.judge(result)
    values = {
        "verdict": verdict._asdict(),
        "commands": {arm: command.text for arm, command in commands.items()},
        **comparison.as_json(result, outcomes),
    }
    textfile.write_text(output, json.dumps(values, indent=1) + "\n")
    for line in comparison.lines(result, verdict):
        click.echo(line)
    for arm in result.arms:
        if arm.ended is not None and arm.ended.at == 1:
            note_elsewhere(tuple(commands[arm.name].words))
    click.echo(f"gemmtune: all of it in {output}, the jobs' output in {folder}", err=True)
    ctx.exit(comparison.EXIT[verdict.kind])
