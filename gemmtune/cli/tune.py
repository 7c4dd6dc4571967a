"""`gemmtune tune`: capture, sweep and replay in one command that can be resumed.

Each stage is the command of that name, run in turn with its files in one folder:
shapes.csv, swept.csv (what the sweep chose), trial.csv (what of it is under test), replay.json, and
tuned.csv, which holds only what made the step faster.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gemmtune.cli.capture import JOB, OPTIMIZER
from gemmtune.cli.run import BACKEND, check_job
from gemmtune.cli.sweep import duration, say, seconds
from gemmtune.errors import UsageError
from gemmtune.job import launch
from gemmtune.textfile import hold, set_aside

SWEEP_SHARE = 0.6  # of what a budget leaves after capture; the replay gets the rest
KINDS = ("faster", "no difference", "slower", "unknown")
LEAST_S = 2.0  # for a stage whose time is used up: it goes on with what it has


@click.command(epilog="Example:  gemmtune tune --budget 30s -- python train.py")
@JOB
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tune"),
    show_default=True,
    help="Folder for the tables; the one to use is tuned.csv in it.",
)
@click.option(
    "--budget",
    callback=seconds,
    metavar="TIME",
    help="For all of it: 90s, 10m, 1h30m. Time of an interrupted run counts.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Optimizer steps to capture; several where lengths vary from step to step.",
)
@click.option("--optimizer", metavar="CLASS", help=OPTIMIZER)
@BACKEND
@click.option("--fresh", is_flag=True, help="Start over; what was measured is kept in *.old.")
def tune(
    job: tuple[str, ...],
    output: Path,
    budget: float,
    steps: int,
    optimizer: str | None,
    backend: str | None,
    fresh: bool,
) -> None:
    """Capture the GEMMs of JOB, sweep them, and replay the job with what won.

    The job is started anew for each stage and ended when the stage has what it needs. Interrupt at
    any time: the same command goes on where it stopped. A table that makes the step slower loses
    the rows that do and is tried again; one that is not faster beyond doubt is not written to
    tuned.csv.

    Exit code: 0 done (whether anything was gained or not), else that of the stage that failed.
    """
    check_job(job, "tune -- python train.py")
    stages = Stages(output, job, budget, fresh)
    click.get_current_context().with_resource(hold(output))
    chosen = ["--optimizer", optimizer] if optimizer else []
    library = ["--backend", backend] if backend else []
    if not stages.captured():
        words = ["--stop", "--steps", str(steps), *chosen, *library]
        stages.run("capture", *words, "-o", stages.path("shapes.csv"), "--", *job)
    left = stages.limit((budget - stages.spent("capture")) * SWEEP_SHARE)
    shapes, swept = stages.path("shapes.csv"), stages.path("swept.csv")
    stages.run("sweep", shapes, "-o", swept, *left, *library)
    verdict = None
    while rows := stages.try_out():
        if (verdict := stages.judged(rows)) is None:
            left = stages.limit(budget - stages.spent(), stages.spent("capture"))
            words = [*left, *library, *chosen, "-o", stages.path("replay.json"), "--", *job]
            # 1 is a slower step: a result, which the rows are dropped for.
            stages.run("replay", stages.path("trial.csv"), *words, results=(0, 1))
            verdict = stages.judged(rows)
        if verdict is None or verdict["kind"] == "unknown":
            raise UsageError(f"nothing could be told of {stages.path('trial.csv')}: see above")
        if verdict["kind"] != "slower":
            break
        stages.drop(verdict["drop"])
        verdict = None
    stages.conclude(verdict)


class Stages:
    """The folder of a tuning, and the commands that fill it."""

    def __init__(self, folder: Path, job: Sequence[str], budget: float, fresh: bool) -> None:
        if fresh and folder.exists():
            if folder.resolve() == Path().resolve() or not folder.name:
                raise UsageError(f"--fresh would rename {folder}: name another folder with -o")
            with hold(folder):
                old = set_aside(folder)
            say(f"gemmtune: what was measured before is kept in {old}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"{folder}: {e.strerror}: name another folder with -o") from None
        self.folder, self.job, self.budget = folder, job, budget

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def spent(self, *stages: str) -> float:
        """Seconds that these stages have taken so far, in all runs; without names all of them."""
        times = self._times()
        return sum(s for stage, s in times.items() if not stages or stage in stages)

    def limit(self, seconds: float, start_s: float = 0.0) -> list[str]:
        """The option for what is left of the budget, less what starting the job takes."""
        return ["--budget", f"{max(seconds - start_s, LEAST_S):.0f}s"] if self.budget else []

    def captured(self) -> bool:
        """Whether the shapes are there. Raises UsageError where they are another job's."""
        from gemmtune.table import Shape, read

        if not (self.folder / "shapes.csv").exists():
            return False
        provenance = read(self.path("shapes.csv"), Shape).provenance
        made = provenance.get("command")
        if made != list(self.job):
            raise UsageError(
                f"{self.path('shapes.csv')} is of another job ({shlex.join(made or ['?'])}): name "
                "another folder with -o, or add --fresh"
            )
        return provenance.get("steps") != 0  # 0: cut off in the first step that was recorded

    def try_out(self) -> list[tuple[Any, str]]:
        """Write trial.csv: what the sweep chose less what lost; its rows' Gemms and algorithms."""
        from gemmtune.table import Tuned, read, write

        swept = read(self.path("swept.csv"), Tuned)
        lost = self._state().get("lost", [])
        rows = [r for r in swept.rows if [list(r.gemm), r.algo.config] not in lost]
        write(self.path("trial.csv"), rows, Tuned, swept.provenance)
        return [(row.gemm, row.algo.config) for row in rows]

    def judged(self, rows: list[tuple[Any, str]]) -> dict[str, Any] | None:
        """The verdict on exactly these rows, where there is one."""
        try:
            found = json.loads((self.folder / "replay.json").read_text())
            tried = [(row["gemm"], row["config"]) for row in found["rows"]]
            verdict: dict[str, Any] = found["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not (
            isinstance(verdict, dict)
            and verdict.get("kind") in KINDS
            and isinstance(verdict.get("text"), str)
            and isinstance(verdict.get("drop"), list)
        ):
            return None
        if tried != [(gemm._asdict(), config) for gemm, config in rows]:
            return None
        return None if verdict["kind"] == "unknown" else verdict

    def drop(self, lines: Sequence[int]) -> None:
        """Take the rows on these lines of trial.csv out of it for good; without lines all."""
        from gemmtune.table import Tuned, scan
        from gemmtune.textfile import read_text

        text = read_text(self.folder / "trial.csv")
        found = [(n, row) for n, row in scan(text, Tuned) if isinstance(row, Tuned)]
        lost = [[list(row.gemm), row.algo.config] for _, row in found]
        lost = [row for row, (n, _) in zip(lost, found, strict=True) if n in lines] or lost
        say(f"gemmtune: {len(lost)} of {len(found)} rows dropped: the step was slower with them")
        state = self._state()
        self._keep({**state, "lost": [*state.get("lost", []), *lost]})

    def conclude(self, verdict: dict[str, Any] | None) -> None:
        """Write tuned.csv, and say what was gained and what to do next."""
        from gemmtune.table import Tuned, read, write

        trial = read(self.path("trial.csv"), Tuned)
        faster = verdict is not None and verdict["kind"] == "faster"
        made = {**trial.provenance, "stage": "tune", "verdict": verdict and verdict["text"]}
        write(self.path("tuned.csv"), trial.rows if faster else [], Tuned, made)
        took = f"in {duration(self.spent())}"
        if faster and verdict is not None:
            click.echo(
                f"\nThe step is {verdict['text']}, with {len(trial.rows)} GEMMs tuned, {took}."
            )
            say("Next, train with the table:")
            say(f"  gemmtune run {shlex.quote(self.path('tuned.csv'))} -- {shlex.join(self.job)}")
            return
        text = (
            verdict["text"]
            if verdict
            else "no algorithm beat the default and kept it up in the step"
        )
        click.echo(f"\nNothing to apply, the library's default stays ({took}): {text}")
        say(f"{self.path('tuned.csv')} is empty; what was measured is in {self.folder}.")

    def run(self, *words: str, results: tuple[int, ...] = (0,)) -> None:
        """Run a command of gemmtune as a user would; its failure is ours."""
        say(f"\n$ gemmtune {shlex.join(words)}")
        began = time.monotonic()
        try:
            with launch.Signals() as signals:
                child = subprocess.Popen([sys.executable, "-m", "gemmtune", *words])
                signals.pass_on_to(child)
                code = child.wait()
        finally:
            times = self._times()
            times[words[0]] = times.get(words[0], 0.0) + time.monotonic() - began
            self._keep({**self._state(), "spent_s": times})
        if signals.came:
            say(f"gemmtune: interrupted in {words[0]}; the same command goes on there")
            click.get_current_context().exit(128 + signals.came)
        if code not in results:
            say(f"gemmtune: {words[0]} ended with exit code {code}; the same command goes on there")
            click.get_current_context().exit(code if code > 0 else 128 - code)

    def _times(self) -> dict[str, float]:
        return dict(self._state().get("spent_s", {}))

    def _state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.folder / "tune.json").read_text())
            times = {
                str(stage): float(s) for stage, s in state.get("spent_s", {}).items() if s >= 0
            }
            lost = [[gemm, config] for gemm, config in state.get("lost", [])]
        except (OSError, ValueError, TypeError, AttributeError, OverflowError):
            return {}
        return {"spent_s": times, "lost": lost}

    def _keep(self, state: dict[str, Any]) -> None:
        from gemmtune.textfile import write_text

        write_text(self.folder / "tune.json", json.dumps(state, indent=1) + "\n")
