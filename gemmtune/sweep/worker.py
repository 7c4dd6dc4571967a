"""One process per Gemm, so that whatever an algorithm does to it costs that Gemm alone.

Started from a server that has torch loaded already (multiprocessing's forkserver): a start takes
hundredths of a second, and every Gemm meets a fresh process. Rows come back through a pipe; what a
worker prints goes to a temporary file, whose last line explains a crash.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from gemmtune.backends.base import Backend
from gemmtune.errors import GemmtuneError
from gemmtune.gemm import Algo
from gemmtune.sweep.measure import Task, measure
from gemmtune.table import Candidate

# Stands in the row of a Gemm of which nothing could be measured.
NO_ALGO = Algo(0, 0, "-")
TICK_S = 0.2


def measure_apart(
    backend: Backend,
    task: Task,
    threads: int,
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
) -> list[Candidate]:
    """The rows of one Gemm, measured in a process of its own with `threads` torch threads.

    A worker that fails, dies or takes longer than `timeout_s` leaves one row, status failed, with
    the reason. `backend` is pickled: it must not hold a device yet. `tick` is called a few times a
    second.
    """
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "gemmtune.sweep.measure", type(backend).__module__]
    context.set_forkserver_preload(modules)
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="gemmtune-worker-", suffix=".log") as log:
        args = (backend, task, threads, theirs, log.name)
        process = context.Process(target=_work, args=args, daemon=True)
        process.start()
        theirs.close()
        try:
            answer = _wait(ours, time.monotonic() + timeout_s, tick)
            if isinstance(answer, list):
                return answer
            if answer is None:
                answer = f"not done after {timeout_s:.0f} s: stopped"
            elif not answer:
                process.join(5)
                answer = _death(process.exitcode, log.name)
            return [Candidate(task.gemm, NO_ALGO, "failed", answer)]
        finally:
            process.kill()
            process.join()
            process.close()
            ours.close()


def _wait(
    ours: Connection, deadline: float, tick: Callable[[], None]
) -> list[Candidate] | str | None:
    """What the worker sent: rows or a reason; "" where it died first, None where time ran out."""
    while (left := deadline - time.monotonic()) > 0:
        if ours.poll(min(TICK_S, left)):
            try:
                answer: list[Candidate] | str = ours.recv()
            except EOFError:
                return ""
            return answer
        tick()
    return None


def _work(backend: Backend, task: Task, threads: int, theirs: Connection, log: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_die_with_parent, daemon=True).start()
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    import torch

    torch.set_num_threads(threads)
    answer: list[Candidate] | str
    try:
        answer = measure(backend, task)
    except GemmtuneError as e:
        answer = str(e)
    except Exception as e:  # a fault here must not cost more than this Gemm
        answer = f"{type(e).__name__}: {e}".splitlines()[0][:200]
    with contextlib.suppress(BrokenPipeError):
        theirs.send(answer)
    # Libraries that a bad launch has corrupted may hang or crash while they are torn down.
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _death(code: int | None, log: str) -> str:
    if code is not None and code < 0:
        try:
            how = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"killed by signal {-code}"
    else:
        how = f"ended with code {code}"
    with open(log, errors="replace") as f:
        lines = f.read().split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"worker {how}" + (f": {last[:200]}" if last else "")
