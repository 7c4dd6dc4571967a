"""The journal of a sweep: every answer as it was measured, one JSON object a line, append-only.

    {"provenance": {…}}                                        the first line, or later
    {"session": {"pid": 17, "version": "…"}}                   a sweep that began to write here
    {"begin": {"gemm": {…}, "seconds": 3.0, …}, "calls": 4.0, "share": 0.2, "choices": [[…], …]}
    {"of": 0, "ask": ["time", 2, 40, 8], "us": 103.2, "s": 12.41}
    {"of": 0, "ask": ["check", 5], "reason": "killed by SIGSEGV", "s": 12.8}
    {"of": 0, "gpu": {"sm_mhz": 1755, …}, "s": 12.9}           the GPU meanwhile (nvml.Reading)
    {"of": 0, "failed": "…", "s": 13.0}                        nothing of this Gemm can be measured

A later provenance takes an earlier one's place. `of` counts the begin lines from 0; a later begin
line of the same Gemm takes an earlier one's place.
`s` is what the sweep had taken until then, in seconds, all sessions added up. One sweep at a time
writes: it holds a lock on the file. What a kill or a full disk cut off in the last line is cut away
by the next one that writes. Candidates and tuned tables are made from this file alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from gemmtune import __version__, textfile
from gemmtune.errors import TableError, UsageError
from gemmtune.gemm import INT_FIELDS, KEY, Algo, Gemm
from gemmtune.sweep.measure import Choice
from gemmtune.sweep.search import CHECK, TIME, WHOLE, Answer, Ask, Task
from gemmtune.table import LARGEST, provenance_faults

SYNC_S = 0.5  # at most so much of what was measured is lost with the power
KINDS = (CHECK, WHOLE, TIME)
PathLike = str | os.PathLike[str]


@dataclass
class Record:
    """A Gemm that was begun: what was asked for it, and every answer so far, in order."""

    number: int
    task: Task
    calls: float
    share: float
    choices: list[Choice]
    answered: list[tuple[Ask, Answer]] = field(default_factory=list)
    failed: str = ""


@dataclass
class Held:
    """What a journal holds. `records`: the last one of each Gemm, in the order first begun."""

    provenance: dict[str, Any]
    records: dict[Gemm, Record]
    begun: int = 0
    spent_s: float = 0.0
    pid: int = 0  # of the sweep that wrote last


def path_beside(candidates: PathLike) -> Path:
    """Where the journal of a candidates table is: candidates.samples.jsonl.

    Raises UsageError where the table is none that a file can stand beside.
    """
    path = Path(candidates)
    if not path.name or path.name == ".." or textfile.is_special(path):
        raise UsageError(f"cannot keep samples beside {path}: name a plain file for the candidates")
    return path.with_suffix(".samples.jsonl")


def read(path: PathLike) -> Held:
    """What a journal holds; a torn last line is passed over.

    Raises UsageError where it cannot be read, TableError naming the line that is no journal's.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from None
    return _parse(data, str(path))


class Journal:
    """A journal open for writing, locked. `held` is what it holds, kept up to date."""

    def __init__(self, path: PathLike, fresh: bool = False) -> None:
        """Opens the file, or makes it; `fresh` renames an old one first (`aside` says to what).

        Raises UsageError (it cannot be written, or another sweep writes), TableError (malformed).
        """
        self.path = Path(path)
        self.aside: Path | None = None
        self._fd = lock(self.path, create=True)
        try:
            if fresh and os.fstat(self._fd).st_size:
                self.aside = textfile.set_aside(self.path)
                os.close(self._fd)
                self._fd = lock(self.path, create=True)
            data = self.path.read_bytes()
            self._end = data.rfind(b"\n") + 1
            self.held = _parse(data, str(self.path)) if self._end else Held({}, {})
        except BaseException:
            os.close(self._fd)
            raise
        self._started = self._synced = time.monotonic()
        self._before_s = self.held.spent_s
        self._dirty = False
        self._turn = threading.RLock()  # several Gemms may be under way, each in its own thread

    def start(self, provenance: Mapping[str, Any]) -> None:
        """Begin to write: cut off a torn last line, say who writes and under what provenance."""
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as e:
            self._cannot(e)
        if not self._end or provenance != self.held.provenance:
            self._write({"provenance": dict(provenance)})
            self.held.provenance = dict(provenance)
        self._write({"session": {"pid": os.getpid(), "version": __version__}})
        self.sync()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._turn:  # what was written outlives this process in any case
            fd, self._fd = self._fd, -1
        os.close(fd)

    @property
    def spent_s(self) -> float:
        """Seconds that the sweep has taken, all sessions added up."""
        return self._before_s + time.monotonic() - self._started

    def begin(self, task: Task, calls: float, share: float, choices: list[Choice]) -> Record:
        """Begin a Gemm; an earlier record of it no longer counts."""
        asked = {**task._asdict(), "gemm": task.gemm._asdict()}
        found = [[*c.algo, c.ws_bytes, *[1] * c.unlisted] for c in choices]
        with self._turn:
            self._write({"begin": asked, "calls": calls, "share": share, "choices": found})
            record = Record(self.held.begun, task, calls, share, choices)
            self.held.begun += 1
            self.held.records[task.gemm] = record
        return record

    def answer(self, record: Record, ask: Ask, answer: Answer) -> None:
        """Keep an answer, synced within SYNC_S."""
        words = list(ask) if ask.kind == TIME else list(ask[:2])
        line: dict[str, Any] = {"of": record.number, "ask": words}
        line |= {"reason": answer.reason} if answer.reason else {"us": answer.us}
        self._write({**line, "s": round(self.spent_s, 3)})
        record.answered.append((ask, answer))
        if time.monotonic() - self._synced >= SYNC_S:
            self.sync()

    def reading(self, record: Record, gpu: Mapping[str, Any]) -> None:
        """What the GPU says of itself while the Gemm is measured."""
        self._write({"of": record.number, "gpu": dict(gpu), "s": round(self.spent_s, 3)})

    def fail(self, record: Record, reason: str) -> None:
        """Nothing of this Gemm can be measured."""
        self._write({"of": record.number, "failed": reason, "s": round(self.spent_s, 3)})
        record.failed = reason

    def sync(self) -> None:
        """See to it that what was written outlives a power cut."""
        if self._dirty:
            try:
                os.fsync(self._fd)
            except OSError as e:
                self._cannot(e)
            self._dirty = False
        self._synced = time.monotonic()

    def _write(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":"), ensure_ascii=False)
        left = (data + "\n").encode("utf-8", "backslashreplace")
        self._dirty = True
        try:
            with self._turn:
                while left:
                    left = left[os.write(self._fd, left) :]
        except OSError as e:
            self._cannot(e)

    def _cannot(self, e: OSError) -> NoReturn:
        raise UsageError(f"cannot write {self.path}: {e.strerror}") from None


def lock(path: PathLike, create: bool = False) -> int:
    """A descriptor of the journal that holds its lock until it is closed.

    It appends; `create` makes a file where there is none. Raises UsageError, also where another
    sweep holds the lock.
    """
    flags = (os.O_RDWR | os.O_APPEND | os.O_CREAT) if create else os.O_RDONLY
    flags |= os.O_NONBLOCK  # a pipe is refused below, and not waited for
    while True:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except OSError as e:
            verb = "write" if create else "read"
            raise UsageError(f"cannot {verb} {path}: {e.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UsageError(f"cannot keep samples in {path}: it is no plain file")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UsageError(
                f"another sweep{_writer(path)} is writing {path}: wait for it, or name another "
                "-o and --candidates"
            ) from None
        except OSError:
            return fd  # a file system without locks
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            same = False
        if same:
            return fd
        os.close(fd)  # renamed by a fresh sweep between open and lock


def _writer(path: PathLike) -> str:
    try:
        pid = read(path).pid
    except (UsageError, TableError):
        return ""
    return f" (pid {pid})" if pid else ""


def _parse(data: bytes, name: str) -> Held:
    held: Held | None = None
    begun: list[Record] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            entry = json.loads(line.decode("utf-8"))
            if held is None:
                held = Held(_provenance(entry["provenance"]), {})
            else:
                _take(entry, held, begun)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
            raise TableError(
                f"{name}:{number}: not a line of a sweep's journal: mend it, or start anew with "
                "--fresh (the old file is kept)"
            ) from None
    if held is None:
        raise TableError(f"{name}:1: empty: a sweep's journal has its provenance here")
    held.begun = len(begun)
    return held


def _take(entry: Any, held: Held, begun: list[Record]) -> None:
    """Add a line. Raises ValueError, KeyError, TypeError or IndexError where it is none."""
    if "provenance" in entry:
        held.provenance = _provenance(entry["provenance"])
        return
    if "session" in entry:
        held.pid = _of(entry["session"]["pid"], int)
        return
    if "begin" in entry:
        choices = [
            Choice(
                Algo(_of(i, int), _of(x, int), _of(config, str)), _of(ws_bytes, int), rest == [1]
            )
            for i, x, config, ws_bytes, *rest in entry["choices"]
        ]
        task = _task(entry["begin"])
        calls, share = _number(entry["calls"]), _number(entry["share"])
        begun.append(Record(len(begun), task, calls, share, choices))
        held.records[task.gemm] = begun[-1]
        return
    record = begun[_of(entry["of"], int)]
    held.spent_s = max(held.spent_s, _number(entry["s"]))
    if "gpu" in entry:  # for people to read; nothing is concluded from it
        _of(entry["gpu"], dict)
        return
    if "failed" in entry:
        record.failed = _of(entry["failed"], str)
        return
    kind, *numbers = entry["ask"]
    if kind not in KINDS:
        raise ValueError(kind)
    ask = Ask(kind, *(_of(n, int) for n in numbers))
    if not 0 <= ask.algo < len(record.choices):
        raise ValueError(ask)
    reason = _of(entry.get("reason", ""), str)
    record.answered.append((ask, Answer(0.0 if reason else _number(entry["us"]), reason)))


def _provenance(said: Any) -> dict[str, Any]:
    if wrong := provenance_faults(_of(said, dict)):
        raise ValueError(wrong)
    found: dict[str, Any] = said
    return found


def _task(said: Any) -> Task:
    gemm = {k: _of(said["gemm"][k], int if k in INT_FIELDS else str) for k in KEY}
    kinds = get_type_hints(Task)
    rest = {
        k: _number(said[k]) if kinds[k] is float else _of(said[k], kinds[k])
        for k in Task._fields
        if k != "gemm"
    }
    return Task(Gemm(**gemm), **rest)  # type: ignore[arg-type]


def _of(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        raise ValueError(value)
    return float(value)
