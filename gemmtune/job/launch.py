"""Starts the user's job unchanged, with environment only, and reads what its processes left.

The job's processes write `rank-*.json` into the folder `out` (files.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gemmtune
from gemmtune.errors import JobError, UsageError

FILES = "rank-*.json"
BOOTSTRAP = Path(__file__).parent / "bootstrap"


def environment(
    entry: str,
    options: Mapping[str, Any],
    out: str | Path,
    base: Mapping[str, str] = os.environ,
    preload: Path | None = None,
) -> dict[str, str]:
    """The variables that make every Python process of a job call `entry` once it imported torch.

    They are to be set on top of `base`, whose PYTHONPATH and LD_PRELOAD are kept. `preload` is a
    library that every process starts with, before those of the base.
    `entry` is "module:function", called as function(options, out); `options` must be JSON values.
    """
    job = {
        "entry": entry,
        "options": dict(options),
        "out": str(Path(out).absolute()),
        "package": str(Path(gemmtune.__file__).absolute()),
    }
    path = os.pathsep.join(filter(None, (str(BOOTSTRAP), base.get("PYTHONPATH"))))
    found = {"PYTHONPATH": path, "GEMMTUNE_JOB": json.dumps(job)}
    if preload is not None:
        found["LD_PRELOAD"] = ":".join(filter(None, (str(preload), base.get("LD_PRELOAD"))))
    return found


def command(argv: Sequence[str]) -> list[str]:
    """The job's words as started: a script gets this Python, torchrun the one beside it."""
    if not argv:
        raise UsageError("no command: write the job after --, as in: -- python train.py")
    first, *rest = argv
    if shutil.which(first) is not None:
        return [first, *rest]
    if first.endswith(".py"):
        return [sys.executable, first, *rest]
    beside = shutil.which(first, path=str(Path(sys.executable).parent))
    if beside is None:
        raise UsageError(f"cannot start the job: {first!r} is not found; is it on PATH?")
    return [beside, *rest]


def elsewhere(argv: Sequence[str]) -> str | None:
    """Why a job that showed nothing may have run in another Python environment than gemmtune's.

    None where its first word is not one of the programs beside this Python, or is that one.
    """
    first = argv[0]
    found = shutil.which(first)
    beside = shutil.which(Path(first).name, path=str(Path(sys.executable).parent))
    # By folder: the python of a venv is a link to the very file that its base has.
    if found is None or beside is None or Path(found).parent.samefile(Path(beside).parent):
        return None
    return (
        f"the job was started with {found}, which is not of gemmtune's Python environment: if it"
        f" was meant to be, activate that environment, or write {beside}"
    )


def run(
    argv: Sequence[str],
    entry: str,
    options: Mapping[str, Any],
    out: str | Path,
    preload: Path | None = None,
) -> int:
    """Run the job to its end; its input, output and arguments are its own.

    Makes the folder `out`, and takes away what an earlier job left there. Returns the job's exit
    code, 128 + the signal's number where one ended it. Ctrl-C reaches the job from the terminal,
    SIGTERM is passed on to it, and this process waits for it. Raises UsageError where there is no
    such program, JobError where it cannot be started.
    """
    words = command(argv)
    env = {**os.environ, **environment(entry, options, out, preload=preload)}
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for old in Path(out).glob(FILES):
            old.unlink()
    except OSError as e:
        raise JobError(f"cannot write to the folder {out}: {e.strerror}: name another") from None
    sys.stdout.flush()  # what was said so far comes before the job's own words
    with Signals() as signals:
        try:
            child = subprocess.Popen(words, env=env)
        except OSError as e:
            raise JobError(f"cannot start the job: {words[0]}: {e.strerror}") from None
        signals.pass_on_to(child)
        code = child.wait()
    return code if code >= 0 else 128 - code


class Signals:
    """While a job runs: Ctrl-C is left to it, SIGTERM passed on, so that we outlive it.

    The terminal sends Ctrl-C to the job too. Only the main thread may set handlers; elsewhere
    signals are the main thread's business. `came` is the last signal's number, 0 where none came.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = False
        self.came = 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on_to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if self._asked:
            child.terminate()

    def _interrupt(self, number: int, _: object) -> None:
        self.came = number

    def _terminate(self, number: int, _: object) -> None:
        self._asked, self.came = True, number
        if self._child is not None:
            self._child.terminate()


def read_ranks(out: str | Path) -> list[dict[str, Any]]:
    """What each process of the job left in `out`, by rank. Raises JobError where none did."""
    files = [json.loads(p.read_text()) for p in Path(out).glob(FILES)]
    if not files:
        raise JobError(
            "nothing was learnt from the job: no Python process of it imported torch and ran a"
            " step under gemmtune (python -I, -S and -E switch the hook off; so does a job that"
            " clears PYTHONPATH); a job without a torch optimizer is captured with --warmup 0, or"
            " marks its steps with gemmtune.step()"
        )
    return sorted(files, key=lambda f: (f["rank"], f["pid"]))
