"""The sweep: shapes in; a journal, and from it candidates.csv and tuned.csv, whole at any time.

The journal (journal.py) gets every answer as it comes and is where an interrupted sweep goes on;
the two tables are written anew from it after every Gemm.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gemmtune import __version__, gpu, machine, regime, table, textfile
from gemmtune.backends import base
from gemmtune.backends.base import Backend
from gemmtune.dialects.te import te_row
from gemmtune.errors import BackendError, Incompatible, UsageError
from gemmtune.gemm import Gemm
from gemmtune.sweep import journal
from gemmtune.sweep.journal import Journal
from gemmtune.sweep.plan import Options, Plan, Purse, make_plan, matters
from gemmtune.sweep.results import (
    Diverged,
    Line,
    Summary,
    Unfinished,
    candidate_rows,
    conduct,
    failed_rows,
    line_of,
    rows_of,
    tuned_row,
)
from gemmtune.sweep.search import TIME, Answer, Ask, Task
from gemmtune.sweep.shared import agree
from gemmtune.sweep.worker import Workers
from gemmtune.table import Candidate, Shape, Table, Tuned

READ_S = 1.0  # between two readings of the GPU's clock and power, whose meters are no faster

PathLike = str | os.PathLike[str]


class Event(NamedTuple):
    """Where the sweep stands; `line` is set where a Gemm has just been done, `note` to say more."""

    done: int
    total: int
    gemm: Gemm
    seconds_left: float
    line: Line | None = None
    note: str = ""


class OutOfTime(Exception):
    """The budget is spent in the midst of a Gemm."""


def sweep(
    shapes: Table[Shape],
    backend: Backend,
    candidates_path: PathLike,
    tuned_path: PathLike,
    options: Options = Options(),  # noqa: B008  (immutable)
    progress: Callable[[Event], None] = lambda event: None,
) -> Summary:
    """Sweep the Gemms of `shapes`; no question that the journal has an answer to is asked again.

    Raises Incompatible where the journal is of another library, processor or thread count, or the
    shapes are a GPU's and the backend a CPU's; UsageError for what cannot be read or written, and
    where another sweep writes the same; WorkerError where no worker can be started.
    """
    _refuse_gpu_shapes(shapes, backend, options)
    threads = thread_count(shapes.provenance, options)
    uuid = gpu_uuid(backend)
    notes = _shared(uuid)  # before this process holds the GPU itself
    provenance = _provenance(shapes.provenance, backend, options, threads)
    path = _check_paths(candidates_path, tuned_path)
    if hasattr(backend, "given"):  # those whose calls show their algorithm
        backend.given = table.defaults(shapes.rows)
        captured = shapes.provenance.get("machine", {})
        if elsewhere := machine.incompatible(captured, provenance["machine"]):
            backend.given = {}
            notes.append(
                f"the shapes were captured elsewhere ({'; '.join(elsewhere)}): the default to beat"
                " is what the library here gives first"
            )
    plan = make_plan(shapes.rows, backend, options)
    if not path.exists() and Path(candidates_path).is_file():
        kept = textfile.set_aside(candidates_path)
        notes.append(f"{candidates_path} has no journal of its samples: kept as {kept}")
    with Journal(path, options.fresh) as kept_journal, _keeping(path):
        if kept_journal.aside:
            notes.append(f"what was measured before is kept as {kept_journal.aside}")
        if before := kept_journal.held.provenance:
            _refuse_another(path, before, provenance)
        kept_journal.start(json.loads(json.dumps(provenance)))  # as it will be read again
        running = _Sweep(kept_journal, plan, backend, threads, options, progress)
        running.paths, running.uuid = (candidates_path, tuned_path), uuid
        return running.run(notes)


def reanalyse(
    candidates_path: PathLike, tuned_path: PathLike, min_gain: float, te_direct: bool = False
) -> Summary:
    """Both tables anew from the journal, with another least gain; nothing is measured.

    Raises UsageError or TableError where there is no journal that can be read.
    """
    path = _check_paths(candidates_path, tuned_path)
    fd = journal.lock(path)
    try:
        held = journal.read(path)
        rows: dict[Gemm, list[Candidate]] = {}
        unswept: dict[Gemm, float] = {}
        for gemm, record in held.records.items():
            try:
                rows[gemm] = rows_of(record, min_gain, te_direct)
            except Unfinished:
                unswept[gemm] = record.share
            except Diverged:
                reason = "recorded by another version of gemmtune, which asked otherwise: sweep it"
                rows[gemm] = failed_rows(gemm, reason)
        made, rows = write_tables(held, rows, min_gain, candidates_path, tuned_path)
        lines = [line_of(g, held.records[g].calls, held.records[g].share, rows[g]) for g in rows]
        lines.sort(key=lambda line: -line.share)
        names = str(candidates_path), str(tuned_path), str(path)
        return Summary(lines, {}, {}, unswept, len(rows), held.spent_s, *names, made)
    finally:
        os.close(fd)


def _check_paths(candidates_path: PathLike, tuned_path: PathLike) -> Path:
    """The journal's path. Raises UsageError where there is no writing the tables."""
    path = journal.path_beside(candidates_path)
    textfile.check_apart(candidates_path, tuned_path, path)
    for written in (candidates_path, tuned_path):
        textfile.check_writable(written)
    return path


def write_tables(
    held: journal.Held,
    rows: Mapping[Gemm, Sequence[Candidate]],
    min_gain: float,
    candidates_path: PathLike,
    tuned_path: PathLike,
) -> tuple[dict[str, Any], dict[Gemm, list[Candidate]]]:
    """Write the tables of the Gemms that are done, in the journal's order.

    Returns their provenance, and the rows as a table of the sweep's backend can have them.
    """
    made = {**held.provenance, "min_gain": min_gain}
    found = {gemm: list(block) for gemm, block in rows.items()}
    read_by_te = made.get("backend") in base.PREFERRED["AMD"]
    if read_by_te:
        found = agree(found, {gemm: held.records[gemm].calls for gemm in found})
    done = [(record, found[gemm]) for gemm, record in list(held.records.items()) if gemm in found]
    machine_made = held.provenance.get("machine") or {}
    dev_cap = machine_made.get("dev_cap") or 0
    tuned = [row for record, block in done if (row := tuned_row(record, block, dev_cap))]
    if read_by_te:
        tuned = [te_row(row) for row in tuned]
    table.write(candidates_path, [row for _, block in done for row in block], Candidate, made)
    table.write(tuned_path, tuned, Tuned, made)
    return made, found


class _Sweep:
    """A sweep under way. `rows` holds the Gemms that are done."""

    paths: tuple[PathLike, PathLike]
    uuid = ""  # of the GPU; "" without one

    def __init__(
        self,
        kept: Journal,
        plan: Plan,
        backend: Backend,
        threads: int,
        options: Options,
        progress: Callable[[Event], None],
    ) -> None:
        self.journal, self.plan, self.backend = kept, plan, backend
        self.threads, self.options, self.progress = threads, options, progress
        # A copy of the backend for each GPU that the sweep may use, each with its own thread here.
        self.lanes: list[Backend] = getattr(backend, "lanes", lambda: [backend])()
        self.purse = Purse(plan, options, len(self.lanes))
        self._turn = threading.RLock()
        self._over = threading.Event()
        self.rows: dict[Gemm, list[Candidate]] = {}
        self.anew: set[Gemm] = set()
        self._read_at = 0.0

    def run(self, notes: list[str]) -> Summary:
        self._take_up()
        self._write()
        resumed = sum(gemm in self.rows for gemm in self.plan.gemms)
        todo = [gemm for gemm in self.plan.gemms if gemm not in self.rows]
        if todo and self.anew:
            count = len(self.anew)
            notes = [*notes, f"{count} Gemms are measured anew: the questions have changed"]
        if todo:
            for note in notes:
                self._tell(todo, note=note)
        waiting = list(todo)
        if len(self.lanes) == 1:
            self._sweep_on(self.backend, waiting, todo)
        else:
            self._sweep_on_all(waiting, todo)
        unswept = {gemm: self.plan.shares[gemm] for gemm in todo}
        made, self.rows = self._write(last=True)
        lines = [self._line(gemm) for gemm in self.plan.gemms if gemm in self.rows]
        beyond = {gemm: self.plan.shares[gemm] for gemm in self.plan.beyond}
        names = str(self.paths[0]), str(self.paths[1]), str(self.journal.path)
        spent = self.journal.spent_s
        return Summary(lines, self.plan.unsupported, beyond, unswept, resumed, spent, *names, made)

    def _sweep_on_all(self, waiting: list[Gemm], todo: list[Gemm]) -> None:
        """All lanes at once, each in a thread, until nothing waits or one fails."""
        failed: list[BaseException] = []

        def sweep_on(backend: Backend) -> None:
            try:
                self._sweep_on(backend, waiting, todo)
            except BaseException as e:
                failed.append(e)
                self._over.set()

        threads = [threading.Thread(target=sweep_on, args=(b,), daemon=True) for b in self.lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._over.set()  # after Ctrl-C, say: what a lane still hears goes nowhere
        if failed:
            raise failed[0]

    def _sweep_on(self, backend: Backend, waiting: list[Gemm], todo: list[Gemm]) -> None:
        """Take Gemms off `waiting`, and off `todo` once they are done."""
        while True:
            with self._turn:
                if not waiting or self._over.is_set():
                    return
                left = list(waiting)
                gemm = waiting.pop(0)
                self._tell(todo, gemm=gemm)
            begun = time.monotonic()
            try:
                found = self._measure(backend, gemm, left)
            except OutOfTime:
                waiting.clear()
                return
            with self._turn:
                self.rows[gemm] = found
                self.purse.took(time.monotonic() - begun, self._timing_s(gemm))
                todo.remove(gemm)
                self._write()
                self._tell(todo, self._line(gemm), gemm=gemm)

    def _take_up(self) -> None:
        """The rows of the Gemms that the journal holds to the end."""
        for gemm, record in self.journal.held.records.items():
            if record.task.seed != self.options.seed and gemm in self.plan.seconds:
                self.anew.add(gemm)
                continue
            try:
                self.rows[gemm] = rows_of(record, self.options.min_gain, self.options.te_direct)
            except Unfinished:
                pass
            except Diverged:
                self.anew.add(gemm)

    def _measure(self, backend: Backend, gemm: Gemm, todo: list[Gemm]) -> list[Candidate]:
        """The rows of one Gemm. Raises OutOfTime; what was answered until then is kept."""
        log, options = self.journal, self.options
        record = None if gemm in self.anew else log.held.records.get(gemm)
        seconds = self.purse.seconds(todo, log.spent_s)
        if not seconds or self.purse.over(log.spent_s):
            raise OutOfTime
        share = self.plan.shares[gemm]
        # Below the power cap an algorithm runs at full clocks, which it would not alone for long.
        sustained = matters(share) and regime.of(log.held.provenance) != regime.BELOW
        task = Task(gemm, seconds, sustained, options.min_gain, options.seed)
        more = (self.threads, options.timeout_s, lambda: self._tell(todo))
        with Workers(backend, gemm, options.seed, *more) as workers:
            try:
                choices = workers.choices()
                if record is not None and record.choices not in ([], choices):
                    self._tell(todo, note=f"{gemm} is measured anew: its algorithms have changed")
                if record is None or record.choices != choices:
                    record = log.begin(task, self.plan.calls[gemm], share, choices)
            except BackendError as e:
                record = log.begin(task, self.plan.calls[gemm], share, [])
                log.fail(record, str(e))
                return failed_rows(gemm, str(e))
            for ask, answer in record.answered:
                workers.learn(ask, answer)
            current = record

            def measured(number: int, asks: Sequence[Ask]) -> list[Answer]:
                found = []
                for asked, given in workers.answers(number, asks):
                    log.answer(current, asked, given)
                    found.append(given)
                    if backend is self.lanes[0]:
                        self._read_gpu(current)
                    if self.purse.over(log.spent_s) or self._over.is_set():
                        raise OutOfTime
                return found

            held = list(record.answered)
            try:
                configs = [choice.algo.config for choice in choices]
                verdicts = conduct(record.task, configs, held, measured)
            except BackendError as e:
                log.fail(record, str(e))
                return failed_rows(gemm, str(e))
            return candidate_rows(record, verdicts, options.min_gain, options.te_direct)

    def _read_gpu(self, record: journal.Record) -> None:
        now = time.monotonic()
        if self.uuid and now - self._read_at >= READ_S:
            self._read_at = now
            self.journal.reading(record, gpu.read(self.uuid)._asdict())

    def _timing_s(self, gemm: Gemm) -> float:
        """What the timing of a Gemm took, as far as its answers tell."""
        answered = self.journal.held.records[gemm].answered
        launches = (
            (ask.launches + ask.settle) * answer.us for ask, answer in answered if ask.kind == TIME
        )
        return sum(launches) / 1e6

    def _line(self, gemm: Gemm) -> Line:
        return line_of(gemm, self.plan.calls[gemm], self.plan.shares[gemm], self.rows[gemm])

    def _write(self, last: bool = False) -> tuple[dict[str, Any], dict[Gemm, list[Candidate]]]:
        """Write the tables. Into a pipe or a device nothing can be written twice."""
        self.journal.sync()
        candidates, tuned = self.paths
        if not last and textfile.is_special(tuned):
            tuned = os.devnull
        held = self.journal.held
        return write_tables(held, self.rows, self.options.min_gain, candidates, tuned)

    def _tell(
        self,
        todo: list[Gemm],
        line: Line | None = None,
        gemm: Gemm | None = None,
        note: str = "",
    ) -> None:
        total = len(self.plan.gemms)
        with self._turn:
            left = self.purse.left_s(todo, self.journal.spent_s)
            about = gemm or todo[0]
            self.progress(Event(total - len(todo), total, about, left, line, note))


@contextmanager
def _keeping(path: Path) -> Iterator[None]:
    """Say of what cannot be written that what was measured is kept."""
    try:
        yield
    except UsageError as e:
        raise UsageError(
            f"{e}; what was measured is kept in {path}: the same command goes on from there"
        ) from None


def gpu_uuid(backend: Backend) -> str:
    """The GPU that the backend uses, as the driver names it; "" where it uses none."""
    found = machine.gpus() if backend.device != "cpu" else []
    return found[0].uuid if found else ""


def _shared(uuid: str) -> list[str]:
    """Who else is on the GPU, asked before any worker of this sweep is."""
    others = gpu.read(uuid).others if uuid else ()
    if not others:
        return []
    pids = ", ".join(map(str, others))
    return [f"the GPU is shared with process {pids}: its work is in every time measured here"]


def thread_count(captured: Mapping[str, Any], options: Options) -> int:
    """Threads that a rank of the job has: as asked for, as captured, else torch's own number."""
    import torch

    return int(options.threads or captured.get("threads") or torch.get_num_threads())


def _refuse_gpu_shapes(shapes: Table[Shape], backend: Backend, options: Options) -> None:
    """A CPU says nothing about a GPU's algorithms."""
    if backend.dev_cap() or options.force:
        return
    device = shapes.provenance.get("device", "cpu")
    made = shapes.provenance.get("machine") or {}
    apis = {row.gemm.api for row in shapes.rows if row.gemm.seen}
    if device != "cpu" or made.get("dev_cap") or apis:
        signs = [f"device {device}"] * (device != "cpu") + [f"api {api}" for api in sorted(apis)]
        where = made.get("arch") or f"a GPU ({', '.join(signs)})"
        raise Incompatible(
            f"these shapes were captured on {where}, and this would tune a CPU: sweep them on "
            "such a GPU, or add --backend cpu --force to try the workflow here"
        )


def _provenance(
    captured: Mapping[str, Any], backend: Backend, options: Options, threads: int
) -> dict[str, Any]:
    """What both tables say of their making; what capture knows of the job is passed on."""
    own = ("stage", "version", "machine", "threads", "profile")
    job = {k: v for k, v in captured.items() if k not in own}
    return {
        **job,
        "stage": "sweep",
        "version": __version__,
        "backend": backend.name,
        "numerics": backend.numerics,
        **getattr(backend, "about", dict)(),
        "machine": {**machine.fingerprint(backend), "threads": threads},
        "threads": threads,
        "seconds_per_shape": options.seconds_per_shape,
        "min_gain": options.min_gain,
        "seed": options.seed,
    }


def _refuse_another(path: Path, made: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Samples of two machines or settings do not go into one journal."""
    before = made.get("machine")
    if not isinstance(before, dict):
        differs = ["it does not say on what machine it was made"]
    else:
        differs = machine.incompatible(before, now["machine"])
        differs += [
            f"{name}: {made.get(name)} when it was made, {now[name]} here"
            for name in ("threads", "numerics")
            if made.get(name) != now[name]
        ]
    if differs:
        raise Incompatible(
            f"{path} is of another sweep ({'; '.join(differs)}): name another --candidates and -o, "
            "or add --fresh to measure all anew"
        )
