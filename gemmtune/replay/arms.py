"""The replay inside the job: switches the arms at step boundaries, times the steps.

Reads a tuned table. Writes `steps-<host>-<pid>.jsonl` into the folder given, a line at a time so
that a killed job leaves all its steps: who the process is, then each round as it is decided, each
step as it ends, and the machine's readings, its GPU's with them, at the end of each block.
"""

from __future__ import annotations

import array
import json
import os
import socket
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from gemmtune.job import files, readings
from gemmtune.job.apply import Applier, backend_of, compare, open_applier
from gemmtune.job.coverage import first_rows
from gemmtune.replay.agree import TIMEOUT_S, Lost, agree
from gemmtune.replay.analyse import Calls, Rank, Step
from gemmtune.replay.decide import following
from gemmtune.replay.plan import END, Plan, Round, beginning
from gemmtune.table import Table, Tuned, read

FILES = "steps-*.jsonl"


class Arms:
    """One process's part of a replay. `stop` ends the job with the last round."""

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
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        from gemmtune.job import steps

        self._plan = plan
        self._index = first_rows(tuned.rows)
        self._choices = {gemm: tuned.rows[i].algo for gemm, i in self._index.items()}
        self._applier = applier
        self._out = out
        self._stop = stop
        self._timeout_s = timeout_s
        self._differences = differences
        self._rounds = [beginning(plan)]
        self._us = array.array("d")  # of each step, nan where nothing says when it began
        self._tuned = False
        self._in_graphs = False  # the last step: none of its calls could be chosen for
        self._lost = False
        self._began: float | None = None
        self._log: Any = None
        self._pid = 0
        self._meter: readings.Meter | None = None
        self._stop_job = steps.stop_job
        self._handle = steps.on_step(self._stepped, optimizer)

    def _stepped(self, step: int) -> None:
        """Close step `step` and set the arm of the next one."""
        now = perf_counter()
        if self._pid != os.getpid():  # a fork's records are its own
            self._open()
        us = (now - self._began) * 1e6 if self._began is not None else float("nan")
        self._us.extend([float("nan")] * (step - len(self._us)) + [us])
        launched = self._applier.drain()
        if self._began is not None:
            rows, fallbacks = self._rows(launched), self._applier.fallbacks()
            graphed = self._applier.graphed()
            record = {"step": step, "us": us, "rows": rows, "fallbacks": fallbacks}
            self._in_graphs = bool(graphed) and not rows
            self._write({**record, "graphed": graphed} if graphed else record)
        if not self._lost:
            self._turn(step + 1)
        self._began = perf_counter()

    def _turn(self, step: int) -> None:
        """Set the arm of `step`, the next one; at the end of a round learn the following one."""
        now = self._rounds[-1]
        if (step - now.first) % now.block == 0:
            gpu = self._meter.block() if self._meter is not None else {}
            self._write({"block": step, "readings": readings.read() | gpu})
        if step == now.end:
            try:
                now = agree(len(self._rounds), self._decide, self._timeout_s)
            except Lost as error:
                self._lost = True
                self._write({"lost": str(error), "from": step})
                self._choose(False)
                return
            self._add(now)
        if now.kind == END:
            self._end()
        else:
            self._choose(now.tuned(step))

    def _decide(self) -> Round:
        # What cannot be recorded is not to be measured, and graphs know no arms.
        if self._log is None or self._in_graphs:
            return Round(END, self._rounds[-1].end)
        try:
            return following(self._plan, self._rounds, np.array(self._us))
        except Exception as error:  # the other ranks wait for a word
            files.complain("the replay ends here", error)
            return Round(END, self._rounds[-1].end)

    def _choose(self, tuned: bool) -> None:
        if tuned != self._tuned:
            self._tuned = tuned
            self._applier.choose(self._choices if tuned else {})

    def _add(self, entry: Round) -> None:
        self._rounds.append(entry)
        self._write({"round": entry})

    def _end(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._meter is not None:
            self._meter.close()
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
        self._pid = os.getpid()
        self._began = None
        self._meter = readings.meter()
        name = f"steps-{socket.gethostname()}-{self._pid}.jsonl"
        try:
            self._log = open(os.path.join(self._out, name), "w")  # noqa: SIM115
        except OSError as error:
            self._failed(error)
        rank, world = files.rank()
        self._write(
            {
                "rank": rank,
                "world": world,
                "host": socket.gethostname(),
                "plan": self._plan._asdict(),
                "gemms": [str(gemm) for gemm in self._index],
                "differences": self._differences,
            }
        )
        for entry in self._rounds:
            self._write({"round": entry})

    def _write(self, record: dict[str, Any]) -> None:
        """Add a line; where that fails this process goes on with the others, unrecorded."""
        if self._log is None:
            return
        try:
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._log = None
        files.complain(f"cannot record steps in {self._out}", error)


def start(options: dict[str, Any], out: str) -> None:
    """Entry in the job: replay `options["table"]` by `options["plan"]`, the fields of a Plan.

    Other options: `backend` (name or None), `stop` (end the job with the last round), `optimizer`
    (class whose steps count, or None), `timeout_s` (wait for rank 0 this long; may be missing).
    """
    tuned = read(options["table"], Tuned)
    backend = backend_of(tuned, options["backend"])
    _, soft = compare(tuned, backend)
    applier = open_applier(backend, timed=True)
    plan = Plan(**options["plan"])
    asked = {n: options[n] for n in ("stop", "optimizer", "timeout_s") if n in options}
    Arms(plan, tuned, applier, differences=soft, out=out, **asked)


def read_steps(out: str | Path) -> list[Rank]:
    """What the processes of a job left in `out`, those that stepped; a torn last line is left out.

    Raises nothing for want of files: a job that never stepped leaves none.
    """
    ranks = []
    for path in sorted(Path(out).glob(FILES)):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        steps = [
            Step(r["step"], r["us"], {int(i): Calls(*cells) for i, cells in r["rows"].items()})
            for r in records
            if "step" in r
        ]
        if not steps:
            continue
        about = records[0]
        ranks.append(
            Rank(
                about["rank"],
                steps,
                [Round.read(r["round"]) for r in records if "round" in r],
                about["world"],
                fallbacks=[r for r in records if "step" in r][-1]["fallbacks"],
                graphed=max(r.get("graphed", 0) for r in records),
                differences=about["differences"],
                host=about["host"],
                readings={r["block"]: r["readings"] for r in records if "block" in r},
                lost=next((f"{r['lost']} (step {r['from']})" for r in records if "lost" in r), ""),
                plan=Plan(**about["plan"]),
                gemms=about["gemms"],
            )
        )
    return sorted(ranks, key=lambda r: r.rank)
