"""Starts the user's job unchanged, with environment only, and reads what its processes left.

Writes nothing itself; the job's processes write `rank-*.json` into the folder `out` (files.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gemmtune
from gemmtune.errors import JobError

BOOTSTRAP = Path(__file__).parent / "bootstrap"


def environment(entry: str, options: Mapping[str, Any], out: str | Path) -> dict[str, str]:
    """The variables that make every Python process of a job call `entry` once it imported torch.

    `entry` is "module:function", called as function(options, out); `options` must be JSON values.
    """
    job = {
        "entry": entry,
        "options": dict(options),
        "out": str(Path(out).absolute()),
        "package": str(Path(gemmtune.__file__).absolute()),
    }
    path = os.pathsep.join(filter(None, (str(BOOTSTRAP), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "GEMMTUNE_JOB": json.dumps(job)}


def command(argv: Sequence[str]) -> list[str]:
    """The job's words as started: a script gets this Python, torchrun the one beside it."""
    if not argv:
        raise JobError("no command: write the job after --, as in: -- python train.py")
    first, *rest = argv
    if first.endswith(".py") and not os.access(first, os.X_OK):
        return [sys.executable, first, *rest]
    if shutil.which(first) is None:
        beside = Path(sys.executable).parent / first
        if not beside.exists():
            raise JobError(f"cannot start the job: {first!r} is not found; is it on PATH?")
        return [str(beside), *rest]
    return [first, *rest]


def run(argv: Sequence[str], entry: str, options: Mapping[str, Any], out: str | Path) -> int:
    """Run the job to its end; its input, output and arguments are its own.

    Returns its exit code, 128 + the signal's number where one ended it. Ctrl-C and SIGTERM reach
    the job, and this process waits for it. Raises JobError where it cannot be started.
    """
    words = command(argv)
    env = {**os.environ, **environment(entry, options, out)}
    before: dict[int, Any] = {}
    try:
        child = subprocess.Popen(words, env=env)
    except OSError as e:
        raise JobError(f"cannot start the job: {words[0]}: {e.strerror}") from None
    try:
        # The terminal sends Ctrl-C to the job too: this process must outlive it to tell the tale.
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def read_ranks(out: str | Path) -> list[dict[str, Any]]:
    """What each process of the job left in `out`, by rank. Raises JobError where none did."""
    files = [json.loads(p.read_text()) for p in Path(out).glob("rank-*.json")]
    if not files:
        raise JobError(
            "nothing was learnt from the job: no Python process of it imported torch and ran a"
            " step under gemmtune (python -I, -S and -E switch the hook off; so does a job that"
            " clears PYTHONPATH)"
        )
    return sorted(files, key=lambda f: (f["rank"], f["pid"]))
