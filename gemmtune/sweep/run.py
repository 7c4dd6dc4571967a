"""The sweep: shapes in; candidates.csv and tuned.csv out, both whole after every Gemm.

candidates.csv is appended Gemm by Gemm and is where an interrupted sweep goes on; tuned.csv is
written anew from it each time. A Gemm's block of rows in candidates.csv is whole once it holds the
default's row, or the one row of a Gemm that failed: these are written last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gemmtune import __version__, machine, table
from gemmtune.backends.base import Backend
from gemmtune.errors import Incompatible
from gemmtune.gemm import Algo, Gemm
from gemmtune.stats import Interval
from gemmtune.sweep.measure import Task
from gemmtune.sweep.search import choose
from gemmtune.sweep.worker import NO_ALGO, measure_apart
from gemmtune.table import Candidate, Shape, Table, Tuned

MATTERS = 0.02  # share of the GEMM time from which a Gemm gets the sustained confirmation
LESSER = 1 / 3  # of the seconds per shape, for a Gemm below that share
START_S = 1.5  # of a worker: process, operands, verification
GPU_APIS = ("lt", "gemmex")

PathLike = str | os.PathLike[str]


class Options(NamedTuple):
    """How to sweep. `top` 0: all Gemms. `threads` and `timeout_s` None: the job's, by size."""

    min_gain: float = 0.005
    seconds_per_shape: float = 3.0
    top: int = 0
    threads: int | None = None
    seed: int = 0
    fresh: bool = False
    force: bool = False
    timeout_s: float | None = None


class Line(NamedTuple):
    """What became of one Gemm. `algo` is None where the default stays."""

    gemm: Gemm
    calls: float
    share: float
    default_us: float
    algo: Algo | None
    gain: Interval | None  # ratio of the default's time to the chosen one's
    reason: str = ""  # why it has no times

    @property
    def saved_us(self) -> float:
        """Per optimizer step."""
        return self.calls * self.default_us * (1 - 1 / self.gain.ratio) if self.gain else 0.0


class Summary(NamedTuple):
    """What a sweep came to. Times are of GEMMs per optimizer step on one rank, as swept."""

    lines: list[Line]  # swept Gemms, the largest share first
    unsupported: dict[Gemm, str]
    skipped: int  # Gemms beyond `top`
    resumed: int  # Gemms that candidates.csv held already
    candidates: str
    tuned: str
    provenance: dict[str, Any]

    @property
    def before_us(self) -> float:
        return sum(line.calls * line.default_us for line in self.lines)

    @property
    def after_us(self) -> float:
        return self.before_us - sum(line.saved_us for line in self.lines)

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line.reason]


class Event(NamedTuple):
    """Where the sweep stands; `line` is set where a Gemm has just been done."""

    done: int
    total: int
    gemm: Gemm
    seconds_left: float
    line: Line | None = None


class Plan(NamedTuple):
    """What will be swept: Gemms with calls and shares, the largest share of the time first."""

    calls: dict[Gemm, float]
    shares: dict[Gemm, float]
    tasks: list[Task]
    unsupported: dict[Gemm, str]
    skipped: int

    @property
    def seconds(self) -> float:
        return sum(task.seconds + START_S for task in self.tasks)


def make_plan(shapes: Iterable[Shape], backend: Backend, options: Options) -> Plan:
    """Which Gemms to sweep, in which order, for how long."""
    rows = list(shapes)
    calls = table.by_gemm(rows)
    shares = _shares(rows)
    unsupported = {g: reason for g in calls if (reason := _unsupported(g, backend))}
    ordered = sorted((g for g in calls if g not in unsupported), key=lambda g: -shares[g])
    kept = ordered[: options.top] if options.top else ordered
    tasks = []
    for gemm in kept:
        matters = shares[gemm] >= MATTERS
        seconds = options.seconds_per_shape * (1.0 if matters else LESSER)
        tasks.append(Task(gemm, seconds, matters, options.min_gain, options.seed))
    return Plan(calls, shares, tasks, unsupported, len(ordered) - len(kept))


def sweep(
    shapes: Table[Shape],
    backend: Backend,
    candidates_path: PathLike,
    tuned_path: PathLike,
    options: Options = Options(),  # noqa: B008  (immutable)
    progress: Callable[[Event], None] = lambda event: None,
) -> Summary:
    """Sweep the Gemms of `shapes`; what candidates.csv already holds is not measured again.

    Raises Incompatible where candidates.csv is of another library, processor or thread count, or
    the shapes are a GPU's and the backend a CPU's; UsageError for what cannot be read or written.
    """
    _refuse_gpu_shapes(shapes, backend, options)
    threads = thread_count(shapes.provenance, options)
    provenance = _provenance(shapes.provenance, backend, options, threads)
    held = _resume(candidates_path, provenance, options)
    plan = make_plan(shapes.rows, backend, options)
    pace = _Pace(plan, held)

    def write_tuned() -> None:
        rows = _tuned(plan, held, backend, options)
        table.write(tuned_path, rows, Tuned, provenance)

    write_tuned()
    resumed = sum(task.gemm in held for task in plan.tasks)
    todo = [task for task in plan.tasks if task.gemm not in held]
    for number, task in enumerate(todo, resumed):

        def at(line: Line | None = None, done: int = number, task: Task = task) -> None:
            progress(Event(done, len(plan.tasks), task.gemm, pace.seconds_left(), line))

        at()
        pace.start(task)
        limit = options.timeout_s or 30 + 10 * task.seconds + task.gemm.flops / 1e9
        rows = measure_apart(backend, task, threads, limit, at)
        table.append(candidates_path, rows)
        held[task.gemm] = rows
        pace.stop()
        write_tuned()
        at(_line(plan, task.gemm, rows, options.min_gain), number + 1)
    lines = [_line(plan, t.gemm, held[t.gemm], options.min_gain) for t in plan.tasks]
    paths = str(candidates_path), str(tuned_path)
    return Summary(lines, plan.unsupported, plan.skipped, resumed, *paths, provenance)


def thread_count(captured: Mapping[str, Any], options: Options) -> int:
    """Threads that a rank of the job has: as asked for, as captured, else torch's own number."""
    import torch

    return int(options.threads or captured.get("threads") or torch.get_num_threads())


def _shares(rows: list[Shape]) -> dict[Gemm, float]:
    """Each Gemm's share of the GEMM time: as captured if all rows have times, else by FLOPs."""
    timed = all(row.time_us > 0 for row in rows)
    weights: dict[Gemm, float] = {}
    for row in rows:
        calls = row.calls * len(table.parse_ranks(row.ranks))
        weight = calls * (row.time_us if timed else row.gemm.flops)
        weights[row.gemm] = weights.get(row.gemm, 0.0) + weight
    total = sum(weights.values()) or 1.0
    return {gemm: weight / total for gemm, weight in weights.items()}


def _unsupported(gemm: Gemm, backend: Backend) -> str | None:
    return "empty: nothing to compute" if not gemm.flops else backend.unsupported(gemm)


def _refuse_gpu_shapes(shapes: Table[Shape], backend: Backend, options: Options) -> None:
    """A CPU says nothing about a GPU's algorithms."""
    if backend.device != "cpu" or options.force:
        return
    device = shapes.provenance.get("device", "cpu")
    made = shapes.provenance.get("machine") or {}
    apis = {row.gemm.api for row in shapes.rows} & set(GPU_APIS)
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
    job = {k: v for k, v in captured.items() if k not in ("stage", "version", "machine", "threads")}
    return {
        **job,
        "stage": "sweep",
        "version": __version__,
        "backend": backend.name,
        "numerics": backend.numerics,
        "machine": {**machine.fingerprint(backend), "threads": threads},
        "threads": threads,
        "seconds_per_shape": options.seconds_per_shape,
        "min_gain": options.min_gain,
        "seed": options.seed,
    }


def _resume(
    path: PathLike, provenance: dict[str, Any], options: Options
) -> dict[Gemm, list[Candidate]]:
    """The whole blocks of an earlier sweep; the file then holds these alone, ready to append to."""
    if options.fresh or not Path(path).exists():
        table.write(path, [], Candidate, provenance)
        return {}
    old = table.read(path, Candidate)
    made = old.provenance.get("machine")
    if made is None:
        differs = ["it does not say on what machine it was made"]
    else:
        differs = machine.incompatible(made, provenance["machine"])
        for field in ("threads", "numerics"):
            was, now = old.provenance.get(field), provenance[field]
            if was != now:
                differs.append(f"{field}: {was} when the table was made, {now} here")
    if differs:
        raise Incompatible(
            f"{path} is of another sweep ({'; '.join(differs)}): name another --candidates and -o, "
            "or add --fresh to measure all anew"
        )
    held = whole_blocks(old.rows)
    kept = [row for block in held.values() for row in block]
    if len(kept) != len(old.rows):  # a kill came between the rows of a Gemm
        table.write(path, kept, Candidate, old.provenance)
    return held


def whole_blocks(rows: Iterable[Candidate]) -> dict[Gemm, list[Candidate]]:
    """The rows of each Gemm that was measured to the end."""
    blocks: dict[Gemm, list[Candidate]] = {}
    for row in rows:
        blocks.setdefault(row.gemm, []).append(row)
    return {
        gemm: block
        for gemm, block in blocks.items()
        if any(row.status == "default" or row.algo == NO_ALGO for row in block)
    }


def winner(rows: Iterable[Candidate], min_gain: float) -> Candidate | None:
    """The row that takes the default's place; None where it stays."""
    finalists = {row.algo: row for row in rows if row.status in ("finalist", "winner")}
    intervals = {a: Interval(r.ratio, r.ratio_low, r.ratio_high) for a, r in finalists.items()}
    chosen = choose(intervals, min_gain)
    return finalists[chosen] if chosen else None


def _line(plan: Plan, gemm: Gemm, rows: list[Candidate], min_gain: float) -> Line:
    calls, share = plan.calls[gemm], plan.shares[gemm]
    default = next((row for row in rows if row.status == "default"), None)
    if default is None:
        return Line(gemm, calls, share, 0.0, None, None, rows[-1].reason)
    won = winner(rows, min_gain)
    if won is None:
        return Line(gemm, calls, share, default.time_us, None, None)
    gain = Interval(won.ratio, won.ratio_low, won.ratio_high)
    return Line(gemm, calls, share, default.time_us, won.algo, gain)


def _tuned(
    plan: Plan, held: Mapping[Gemm, list[Candidate]], backend: Backend, options: Options
) -> list[Tuned]:
    rows = []
    for task in plan.tasks:
        block = held.get(task.gemm, [])
        won = winner(block, options.min_gain)
        if won is None:
            continue
        default = next(row for row in block if row.status == "default")
        needs = backend.workspace_bytes(won.gemm, won.algo)
        rows.append(
            Tuned(
                *(backend.dev_cap(), won.gemm, needs, table.WS_MAX, won.algo),
                *(won.time_us, default.time_us, won.ratio_low, won.ratio_high),
            )
        )
    return rows


class _Pace:
    """Time left: the plan's seconds, corrected by how the Gemms done so far kept to theirs."""

    def __init__(self, plan: Plan, held: Mapping[Gemm, Any]) -> None:
        self._left = sum(t.seconds + START_S for t in plan.tasks if t.gemm not in held)
        self._planned = self._taken = 0.0
        self._started, self._current = 0.0, 0.0

    def start(self, task: Task) -> None:
        self._started, self._current = time.monotonic(), task.seconds + START_S

    def stop(self) -> None:
        self._taken += time.monotonic() - self._started
        self._planned += self._current
        self._left -= self._current
        self._current = 0.0

    def seconds_left(self) -> float:
        factor = self._taken / self._planned if self._planned else 1.0
        running = (
            min(time.monotonic() - self._started, self._current * factor) if self._current else 0.0
        )
        return max(0.0, self._left * factor - running)
