"""A comparison inside the job: times the steps, and sees what memory they took.

Writes `steps-<host>-<pid>.jsonl` into the folder given: a line that says who the process is, then
one for each step as it ends, so that a job that dies leaves all of its steps.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """What one process of a job left: times of its steps in microseconds, by number from 0.

    The first step has no time, as nobody saw it begin. `work` is as the job last said it.
    """

    rank: int
    world: int
    device: str
    steps: dict[int, float | None]
    peak_bytes: int
    work: dict[str, float]


class Watch:
    """One process's part of a comparison; `stop` ends the job after `steps` steps."""

    def __init__(self, options: dict[str, Any], out: str) -> None:
        from gemmtune.job import steps

        self._last = options["steps"] - 1
        self._stop = options["stop"]
        self._here = beside(options["parent"])
        self._parent = options["parent"]["pid"]
        self._out = out
        self._steps = steps
        self._pid = 0
        self._log: Any = None
        self._device: Any = None
        self._began: Any = None
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._handle = steps.on_step(self._stepped, options["optimizer"])

    def _stepped(self, step: int) -> None:
        if self._pid != os.getpid():  # a fork's records are its own
            self._open()
        ended = self._mark()
        self._pending.append((step, self._began, ended))
        last = step >= self._last
        self._drain(wait=last)
        if last or (self._stop and self._here and not _alive(self._parent)):
            self._handle.remove()
            self._log.close()
            if self._stop:
                self._steps.stop_job()
        # On a GPU the work is queued, so what is done here costs it nothing.
        self._began = ended if self._device is not None else perf_counter()

    def _mark(self) -> Any:
        if self._device is None:
            return perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _drain(self, wait: bool) -> None:
        """Write the steps that are done: nothing waits for the GPU but the last of all."""
        from gemmtune.job import memory

        while self._pending:
            step, began, ended = self._pending[0]
            us: float | None = None
            if self._device is not None:
                if wait:
                    ended.synchronize()
                elif not ended.query():
                    return
                us = None if began is None else began.elapsed_time(ended) * 1e3
            elif began is not None:
                us = (ended - began) * 1e6
            self._pending.popleft()
            self._write(
                {
                    "step": step,
                    "us": None if us is None else round(us, 1),
                    "peak_bytes": memory.peak_bytes(self._device),
                    "work": self._steps.work(),
                }
            )

    def _open(self) -> None:
        import torch

        from gemmtune.job import files

        self._pid = os.getpid()
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._device = torch.device("cuda", torch.cuda.current_device()) if gpu else None
        self._began = None
        self._pending = deque()
        name = f"steps-{socket.gethostname()}-{self._pid}.jsonl"
        self._log = open(os.path.join(self._out, name), "w")  # noqa: SIM115
        rank, world = files.rank()
        device = torch.cuda.get_device_name(self._device) if gpu else "CPU"
        self._write({"rank": rank, "world": world, "device": device})

    def _write(self, record: dict[str, Any]) -> None:
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


def whereabouts() -> dict[str, Any]:
    """This process, so that the job can see whether it is still there."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "space": _pid_space()}


def beside(parent: dict[str, Any]) -> bool:
    """Whether the process numbers of `parent` mean the same here: no other host or container."""
    return bool(parent["host"] == socket.gethostname() and parent["space"] == _pid_space())


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def start(options: dict[str, Any], out: str) -> None:
    """Entry in the job. Options: `steps` (all of them, the uncounted too), `stop` (end the job
    after them, or when the comparison is gone), `optimizer` (class whose steps count, or None),
    `parent` (whereabouts() of the comparison)."""
    Watch(options, out)


def read(out: str | Path) -> list[Seen]:
    """What the processes of a job left in `out`, by rank; a torn last line is left out.

    Of a rank that was restarted the process with most steps counts.
    """
    ranks: dict[int, Seen] = {}
    for path in sorted(Path(out).glob("steps-*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        if len(records) < 2:
            continue
        about, *records = records
        times = {r["step"]: r["us"] for r in records}
        peak = max(r["peak_bytes"] for r in records)
        seen = Seen(**about, steps=times, peak_bytes=peak, work=records[-1]["work"])
        if seen.rank not in ranks or len(times) > len(ranks[seen.rank].steps):
            ranks[seen.rank] = seen
    return [ranks[rank] for rank in sorted(ranks)]
