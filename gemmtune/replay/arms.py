"""The replay inside the job: switches the arms at step boundaries, times the steps.

Reads a tuned table. Writes `steps-<host>-<pid>.jsonl` into the folder given: a line that says who
the process is, then one for each step as it ends, so that a killed job leaves all its steps.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from time import perf_counter
from typing import Any

from gemmtune.job.apply import Applier, backend_of, compare, open_applier
from gemmtune.job.coverage import first_rows
from gemmtune.replay.analyse import Calls, Rank, Step
from gemmtune.replay.plan import Plan, schedule
from gemmtune.table import Table, Tuned, read


class Arms:
    """One process's part of a replay. `stop` ends the job with the schedule."""

    def __init__(
        self,
        plan: Plan,
        tuned: Table[Tuned],
        applier: Applier,
        *,
        differences: list[str],
        out: str,
        stop: bool,
        optimizer: str | None = None,
    ) -> None:
        from gemmtune.job import steps

        self._plan = plan
        self._index = first_rows(tuned.rows)
        self._choices = {gemm: tuned.rows[i].algo for gemm, i in self._index.items()}
        self._starts = {block.first: block.tuned for block in schedule(plan)}
        self._applier = applier
        self._out = out
        self._stop = stop
        self._began: float | None = None
        self._log: Any = None
        self._pid = 0
        self._differences = differences
        self._stop_job = steps.stop_job
        self._handle = steps.on_step(self._stepped, optimizer)

    def _stepped(self, step: int) -> None:
        """Close step `step` and set the arm of the next one."""
        now = perf_counter()
        if self._pid != os.getpid():  # a fork's records are its own
            self._open()
        launched = self._applier.drain()
        if self._began is not None:
            self._write(
                {
                    "step": step,
                    "us": (now - self._began) * 1e6,
                    "rows": self._rows(launched),
                    "fallbacks": self._applier.fallbacks(),
                }
            )
        following = step + 1
        if following in self._starts:
            self._applier.choose(self._choices if self._starts[following] else {})
        elif following >= self._plan.steps:
            self._end()
        self._began = perf_counter()

    def _end(self) -> None:
        self._log.close()
        self._handle.remove()
        self._applier.close()
        if self._stop:
            self._stop_job()

    def _rows(self, launched: Any) -> dict[int, list[float]]:
        """Calls and times of the table's rows: native, tuned (see analyse.Calls)."""
        rows: dict[int, list[float]] = {}
        for (gemm, algo), (calls, us) in launched.items():
            if gemm in self._index:
                cells = rows.setdefault(self._index[gemm], [0, 0.0, 0, 0.0])
                place = 0 if algo is None else 2
                cells[place] += calls
                cells[place + 1] += round(us, 2)
        return rows

    def _open(self) -> None:
        from gemmtune.job import files

        self._pid = os.getpid()
        self._began = None
        name = f"steps-{socket.gethostname()}-{self._pid}.jsonl"
        self._log = open(os.path.join(self._out, name), "w")  # noqa: SIM115
        rank, world = files.rank()
        self._write({"rank": rank, "world": world, "differences": self._differences})

    def _write(self, record: dict[str, Any]) -> None:
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


def start(options: dict[str, Any], out: str) -> None:
    """Entry in the job: replay `options["table"]` by `options["plan"]`, the fields of a Plan.

    Other options: `backend` (name or None), `stop` (end the job with the schedule), `optimizer`
    (class whose steps count, or None).
    """
    tuned = read(options["table"], Tuned)
    backend = backend_of(tuned, options["backend"])
    _, soft = compare(tuned, backend)
    applier = open_applier(backend, timed=True)
    plan = Plan(**options["plan"])
    asked = {name: options[name] for name in ("stop", "optimizer")}
    Arms(plan, tuned, applier, differences=soft, out=out, **asked)


def read_steps(out: str | Path) -> list[Rank]:
    """What the processes of a job left in `out`, those that stepped; a torn last line is left out.

    Raises nothing for want of files: a job that never stepped leaves none.
    """
    ranks = []
    for path in sorted(Path(out).glob("steps-*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        if len(records) < 2:
            continue
        about, *records = records
        steps = [
            Step(r["step"], r["us"], {int(i): Calls(*cells) for i, cells in r["rows"].items()})
            for r in records
        ]
        fallbacks = records[-1]["fallbacks"]
        ranks.append(Rank(about["rank"], steps, about["world"], fallbacks, about["differences"]))
    return sorted(ranks, key=lambda r: r.rank)
