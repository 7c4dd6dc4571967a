"""Processes that answer the questions about one Gemm, so that a crash costs one algorithm alone.

Started from a server that has torch loaded already (multiprocessing's forkserver): a start takes
hundredths of a second. Questions go out over a pipe in batches, answers come back one by one, so
that it is known at which question a worker died; another one goes on with the rest. What a worker
prints goes to a temporary file, whose last line explains a crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from gemmtune.backends.base import Backend
from gemmtune.errors import BackendError, DeviceLost, GemmtuneError, WorkerError
from gemmtune.gemm import Gemm
from gemmtune.sweep.measure import Bench, Choice, choices
from gemmtune.sweep.search import TIME, Answer, Ask

TICK_S = 0.2
START_TRIES = 3
GRACE_S = 30.0  # for an answer, beyond what its launches should take
PATIENCE = 10.0  # times the expected time
# Of the float64 products that verification compares with.
SLOWEST_FLOPS_PER_S, SLOWEST_GPU_FLOPS_PER_S = 1e9, 1e11
LOST = 70  # exit code of a worker whose device is lost
HERE = "here"  # a worker's first word: its process has come up


class Ended(Exception):
    """A worker is no more; the message says how it ended."""


class Workers:
    """Answers questions about one Gemm, with one process after another as each is lost.

    `backend` is pickled: it must not hold a device yet. `timeout_s` replaces the patience with an
    answer that follows from the time expected. `lost` (algorithms that are out of the race, with
    the reason) and `us` (times known) grow with the answers. `tick` is called a few times a second.
    """

    def __init__(
        self,
        backend: Backend,
        gemm: Gemm,
        seed: int,
        threads: int,
        timeout_s: float | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.args = (backend, gemm, seed, threads)
        self.gemm, self.timeout_s, self.tick = gemm, timeout_s, tick
        self.lost: dict[int, str] = {}
        self.us: dict[int, float] = {}
        self._worker: _Worker | None = None
        slowest = SLOWEST_FLOPS_PER_S if backend.device == "cpu" else SLOWEST_GPU_FLOPS_PER_S
        self._verifying_s = gemm.flops / slowest
        # For backends that start processes of their own.
        self._starting_s: float = getattr(backend, "starts_s", 0.0)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *raised: object) -> None:
        self._drop()

    def choices(self) -> list[Choice]:
        """The Gemm's algorithms, from a worker that is started where none is there.

        Raises BackendError where none can be had for this Gemm, WorkerError where no worker can be
        started at all.
        """
        if self._worker is None:
            self._worker = self._start()
        return self._worker.choices

    def learn(self, ask: Ask, answer: Answer) -> None:
        """Take note of an answer, this one's own or one given earlier."""
        if answer.reason:
            self.lost.setdefault(ask.algo, answer.reason)
        elif answer.us:
            self.us[ask.algo] = answer.us

    def answers(self, number: int, asks: Sequence[Ask]) -> Iterator[tuple[Ask, Answer]]:
        """Each question with its answer, in order; `number` is the first one's in the Gemm.

        Raises like `choices`.
        """
        done, again = 0, -1
        while done < len(asks):
            if self._worker is None:
                self._worker = self._start()
            try:
                self._worker.ask(number + done, asks[done:])
                while done < len(asks):
                    ask = asks[done]
                    answer = self._worker.wait(self._patience(ask), self.tick)
                    self.learn(ask, answer)
                    yield ask, answer
                    done += 1
            except Ended as e:
                innocent = self._worker.answered > 0
                self._drop()
                ask = asks[done]
                if ask.algo == 0 and innocent and again != done:
                    again = done  # another algorithm may have left the process in ruins
                    continue
                answer = Answer(0.0, str(e))
                self.learn(ask, answer)
                yield ask, answer
                done += 1

    def _patience(self, ask: Ask) -> float:
        if self.timeout_s is not None:
            return self.timeout_s
        launches = ask.launches + ask.settle if ask.kind == TIME else 2
        expected = launches * self.us.get(ask.algo, 0.0) / 1e6
        starting = 0.0 if ask.kind == TIME else self._starting_s
        return GRACE_S + PATIENCE * expected + self._verifying_s + starting

    def _start(self) -> _Worker:
        patience = self.timeout_s or GRACE_S + self._verifying_s + self._starting_s
        for left in reversed(range(START_TRIES)):
            try:
                worker = _Worker(*self.args, self.lost)
            except (OSError, EOFError, RuntimeError) as e:
                reason = str(e) or type(e).__name__
            else:
                try:
                    worker.come_up(patience, self.tick)
                    return worker
                except Ended as e:
                    reason = str(e)
                    worker.stop()
                    if worker.here:
                        raise BackendError(f"no algorithm could be tried: {reason}") from None
                except BaseException:
                    worker.stop()
                    raise
            if not left:
                raise WorkerError(f"cannot start a worker process: {reason}")
            time.sleep(TICK_S)
        raise AssertionError

    def _drop(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.stop()


class _Worker:
    """One process. Raises OSError, EOFError or RuntimeError where it cannot be started."""

    def __init__(
        self, backend: Backend, gemm: Gemm, seed: int, threads: int, lost: dict[int, str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        modules = ["torch", "gemmtune.sweep.measure", type(backend).__module__]
        context.set_forkserver_preload(modules)
        self.choices: list[Choice] = []
        self.answered = 0
        self.here = False
        self._log = _log_file()
        self._ours, theirs = context.Pipe()
        args = (backend, gemm, seed, threads, lost, theirs, self._log)
        self._process: ForkServerProcess = context.Process(target=_work, args=args, daemon=True)
        try:
            with _undisturbed():
                self._process.start()
        except BaseException:
            self._forget()
            raise
        finally:
            theirs.close()

    def come_up(self, patience_s: float, tick: Callable[[], None]) -> None:
        """Wait until it can be asked. Raises Ended; BackendError with what it says instead."""
        assert self._receive(patience_s, tick) == HERE
        self.here = True
        found = self._receive(patience_s, tick)
        if isinstance(found, str):
            raise BackendError(found)
        self.choices = found

    def ask(self, number: int, asks: Sequence[Ask]) -> None:
        """Raises Ended."""
        try:
            self._ours.send((number, list(asks)))
        except OSError:
            raise Ended(self._death()) from None

    def wait(self, patience_s: float, tick: Callable[[], None]) -> Answer:
        """The next answer. Raises Ended: it died, or took too long and was stopped."""
        answer: Answer = self._receive(patience_s, tick)
        self.answered += 1
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._forget()

    def _forget(self) -> None:
        self._ours.close()
        if self._log != os.devnull:
            with contextlib.suppress(OSError):
                os.unlink(self._log)

    def _receive(self, patience_s: float, tick: Callable[[], None]) -> Any:
        deadline = time.monotonic() + patience_s
        while True:
            left = deadline - time.monotonic()
            if self._ours.poll(max(0.0, min(TICK_S, left))):
                try:
                    return self._ours.recv()
                except (EOFError, OSError):
                    raise Ended(self._death()) from None
            if left <= 0:
                raise Ended(f"hung: no answer after {patience_s:.0f} s")
            tick()

    def _death(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code >= 0:
            how = f"ended the process with code {code}"
        else:
            try:
                how = f"killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"killed by signal {-code}"
            if code == -signal.SIGKILL:  # nobody else sends it unasked
                how += ", as for want of memory"
        try:
            with open(self._log, errors="replace") as f:
                lines = f.read().split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return how + (f": {last[:200]}" if last else "")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C comes when this is done, and never to the processes that are started meanwhile: the
    server of the workers would end with a traceback where it is still loading torch."""
    resource_tracker.ensure_running()  # which unblocks the signal where it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _log_file() -> str:
    try:
        fd, path = tempfile.mkstemp(prefix="gemmtune-worker-", suffix=".log")
    except OSError:  # a full or missing /tmp costs the explanation of a crash, not the sweep
        return os.devnull
    os.close(fd)
    return path


def _work(
    backend: Backend,
    gemm: Gemm,
    seed: int,
    threads: int,
    lost: dict[int, str],
    theirs: Connection,
    log: str,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # where memory runs out, this process goes first and not the user's others
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.disable()  # a crash is explained by what the library said last
    gc.disable()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        theirs.send(HERE)
        bench = _set_up(backend, gemm, seed, threads, lost, theirs)
        while bench is not None:
            try:
                number, asks = theirs.recv()
            except EOFError:
                break
            # A collection in the midst of a sample would be counted as the algorithm's. What is
            # left is frozen: to go through all of torch's objects again takes a tenth of a second.
            gc.collect()
            gc.freeze()
            for place, ask in enumerate(asks, number):
                theirs.send(_answer(bench, place, ask))
    # Libraries that a bad launch has corrupted may hang or crash while they are torn down.
    os._exit(0)


def _set_up(
    backend: Backend,
    gemm: Gemm,
    seed: int,
    threads: int,
    lost: dict[int, str],
    theirs: Connection,
) -> Bench | None:
    try:
        import torch

        torch.set_num_threads(threads)
        found = choices(backend, gemm)
        bench = Bench(backend, gemm, [c.algo for c in found], seed, lost)
        theirs.send(found)
    except GemmtuneError as e:
        theirs.send(str(e))
    except Exception as e:
        theirs.send(_fault(e))
    else:
        return bench
    return None


def _answer(bench: Bench, number: int, ask: Ask) -> Answer:
    try:
        return bench.answer(number, ask)
    except DeviceLost as e:
        print(e, flush=True)  # how the process ended
        os._exit(LOST)
    except Exception as e:  # a fault here must not cost more than this algorithm
        bench.lost.setdefault(ask.algo, _fault(e))
        return Answer(0.0, _fault(e))


def _fault(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:200]


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
