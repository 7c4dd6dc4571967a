"""Runs the processes of a comparison, one after the other, and keeps what they showed.

Reads and writes a folder: `runs.jsonl` (what is compared, then a line for each process as it ends),
`a-1.log` and `a-1.err` (the output of a's first process, and its errors), `a-1/` while it runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gemmtune.errors import JobError, UsageError
from gemmtune.job import launch, memory
from gemmtune.replay import watch
from gemmtune.replay.compare import (
    FAILED,
    KILLED,
    NO_MEMORY,
    OK,
    SHORT,
    Outcome,
    remaining,
)
from gemmtune.replay.turns import Command, Plan, Run

ENTRY = "gemmtune.replay.watch:start"
RUNS = "runs.jsonl"
PATIENCE_S = 60.0  # for a job whose steps are all measured to end by itself
TERMINATE_S = 15.0  # between SIGTERM and SIGKILL
_POLL_S = 2.0
_TAIL = 1 << 20  # bytes of a job's output that are searched for its error

# The last line of a traceback, behind a launcher's prefix; the launcher's own error says nothing.
_ERROR = re.compile(
    r"^(?:\[\w+\]: ?)*(?!\S*(?:ChildFailed|ProcessRaised))[\w.]*(?:Error|Exception)\b"
)
# How torchrun, torch.multiprocessing.spawn and gemmtune.llama tell of a killed rank.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|(?:terminated|ended) (?:with|by) (?:signal )?SIGKILL")


class Journal:
    """The file of what was measured: whole lines, each synced before the next process starts."""

    def __init__(self, folder: Path, what: Mapping[str, Any], fresh: bool) -> None:
        """Open it, and take over what an earlier run of the same comparison left.

        Processes that failed are not taken over, so they are tried again. Raises UsageError where
        the folder cannot be written, is in use, or holds another comparison.
        """
        self.path = folder / RUNS
        self.outcomes: list[Outcome] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another gemmtune writes to {folder}: wait for it, or name another file with -o"
            ) from None
        except OSError as e:
            raise UsageError(f"cannot write to {folder}: {e.strerror}: name another file") from None
        if fresh:
            self._file.truncate(0)
            for old in (*folder.glob("[ab]-*.log"), *folder.glob("[ab]-*.err")):
                old.unlink(missing_ok=True)
        self._load(dict(what))

    def _load(self, what: dict[str, Any]) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(whole))  # a line that a kill cut short
        if not whole:
            self._write(what)
            return
        try:
            head, *records = map(json.loads, whole.splitlines())
            known = [Outcome(**record) for record in records]
        except (ValueError, TypeError):
            raise UsageError(
                f"{self.path} is damaged: start over with --fresh, or name another file with -o"
            ) from None
        if head != what:
            changed = ", ".join(
                k for k in what if not isinstance(head, dict) or head.get(k) != what[k]
            )
            raise UsageError(
                f"{self.path} holds another comparison (different: {changed}): name another file "
                f"with -o, or start over with --fresh"
            )
        self.outcomes = [o for o in known if o.status in (OK, NO_MEMORY)]

    def add(self, outcome: Outcome) -> None:
        self._write(outcome._asdict())
        self.outcomes.append(outcome)

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise JobError(
                f"cannot write {self.path}: {e.strerror}: what was measured before is kept; make "
                f"room and repeat the command"
            ) from None

    def close(self) -> None:
        self._file.close()


def compare(
    commands: Mapping[str, Command],
    plan: Plan,
    folder: Path,
    *,
    stop: bool,
    optimizer: str | None,
    fresh: bool,
    tell: Callable[[Outcome, float], None],
) -> list[Outcome]:
    """Run what is left of the comparison; all outcomes, those of earlier runs included.

    `tell` hears of each process as it ends, and of the seconds that the rest should take. Ctrl-C
    and SIGTERM end the running job and raise KeyboardInterrupt; all whole processes are kept.
    """
    words = {arm: _words(command) for arm, command in commands.items()}
    what = {
        **{arm: command.text for arm, command in commands.items()},
        **{name: value for name, value in plan._asdict().items() if name != "runs"},
        "stop": stop,
        "optimizer": optimizer,
        "folder": os.getcwd(),
    }
    journal = Journal(folder, what, fresh)
    try:
        with _terminable():
            while left := remaining(plan, journal.outcomes):
                run = left[0]
                options = {
                    "steps": plan.all_steps,
                    "stop": stop,
                    "optimizer": optimizer,
                    "parent": watch.whereabouts(),
                }
                outcome = _run(run, commands[run.arm].env, words[run.arm], plan, options, folder)
                journal.add(outcome)
                rest = len(remaining(plan, journal.outcomes))
                seconds = [o.seconds for o in journal.outcomes]
                tell(outcome, rest * sum(seconds) / len(seconds))
    finally:
        journal.close()
    return journal.outcomes


def _words(command: Command) -> list[str]:
    """The words as started: looked for on the arm's own PATH, where it sets one."""
    path = command.env.get("PATH")
    if path is not None and (found := shutil.which(command.words[0], path=path)):
        return [found, *command.words[1:]]
    return launch.command(command.words)


def _run(
    run: Run,
    env: Mapping[str, str],
    words: list[str],
    plan: Plan,
    options: Mapping[str, Any],
    folder: Path,
) -> Outcome:
    """Run one process of an arm to its end."""
    out, log, err = (folder / f"{run.name}{end}" for end in ("", ".log", ".err"))
    shutil.rmtree(out, ignore_errors=True)
    base = {**os.environ, **env}
    began = time.monotonic()
    try:
        out.mkdir()
        with log.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                words,
                env={**base, **launch.environment(ENTRY, options, out, base)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is ours, and so is all that the job starts
            )
    except OSError as e:
        raise JobError(f"cannot start {run.name}: {e.filename or words[0]}: {e.strerror}") from None
    code = _wait(child, lambda: bool(options["stop"]) and _whole(watch.read(out), plan))
    seconds = time.monotonic() - began
    seen = watch.read(out)
    shutil.rmtree(out, ignore_errors=True)
    return _outcome(run, plan, seen, code, seconds, _tail(err), _tail(log), bool(options["stop"]))


def _wait(child: subprocess.Popen[bytes], measured: Callable[[], bool]) -> int:
    """The exit code of a job, 128 + the signal's number where one ended it.

    A job that hangs once all is measured is ended, and so is what a job leaves behind.
    """
    since: float | None = None
    try:
        while True:
            try:
                code = child.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if since is None and measured():
                    since = time.monotonic()
                if since is not None and time.monotonic() - since > PATIENCE_S:
                    code = _end(child)
                    break
    except BaseException:
        _end(child)
        raise
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[bytes]) -> int:
    """SIGTERM to the job and all that it started, SIGKILL to what does not heed it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return child.wait(TERMINATE_S)
    return -signal.SIGKILL


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that the running job is ended too; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _whole(seen: list[watch.Seen], plan: Plan) -> bool:
    """Whether every rank that can be seen left all its steps."""
    return bool(seen) and all(len(s.steps) >= plan.all_steps for s in seen)


def _outcome(
    run: Run,
    plan: Plan,
    seen: list[watch.Seen],
    code: int,
    seconds: float,
    err: str,
    log: str,
    stop: bool,
) -> Outcome:
    """What a process showed, from the steps and words that it left. Pure."""
    done = min((max(s.steps) + 1 for s in seen), default=0)
    known: dict[str, Any] = {
        "ranks_us": {
            str(s.rank): [us for i, us in sorted(s.steps.items()) if i >= plan.warmup and us]
            for s in seen
        },
        "peak_bytes": max((s.peak_bytes for s in seen), default=0),
        "world": max((s.world for s in seen), default=0),
        "device": seen[0].device if seen else "",
        "host": socket.gethostname(),
        **{
            name: sum(values) / len(values)
            for name in ("tokens", "flops", "peak_flops")
            if (values := [s.work[name] for s in seen if name in s.work])
        },
    }
    # Once all is measured the job is ended from inside, and how it goes is not its own doing.
    if _whole(seen, plan) and (stop or code == 0):
        return Outcome(*run, OK, code, seconds, **known)
    known |= {"at": done + 1}
    if found := memory.out_of_memory_line(err) or memory.out_of_memory_line(log):
        whose, line = found
        return Outcome(*run, NO_MEMORY, code, seconds, **known, memory=whose, error=line[:500])
    if code == 128 + signal.SIGKILL or (code and _KILLED.search(err)):
        return Outcome(*run, KILLED, code, seconds, **known)
    if code:
        return Outcome(*run, FAILED, code, seconds, **known, error=_telling(err)[:500])
    return Outcome(*run, SHORT, code, seconds, **known, error=_short(done, plan))


def _short(done: int, plan: Plan) -> str:
    if done:
        return (
            f"ended after {done} of {plan.all_steps} steps: let it run longer, or lower --steps "
            f"and --warmup"
        )
    return (
        "ended without a step: a job without a torch optimizer marks its steps with gemmtune.step()"
    )


def _telling(err: str) -> str:
    """The line of a job's stderr that says why it failed: its last error, or else its last."""
    written = [line.strip() for line in err.splitlines() if line.strip()]
    errors = [line for line in written if _ERROR.search(line)]
    return (errors or written or ["(nothing on stderr)"])[-1]


def _tail(path: Path) -> str:
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - _TAIL))
        return f.read().decode("utf-8", "replace")
