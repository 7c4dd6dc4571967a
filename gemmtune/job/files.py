"""Writes what one process of the job knows: `rank-<host>-<pid>.json` in the folder given."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from multiprocessing import util
from typing import Any

_in_group: dict[int, tuple[int, int]] = {}  # by pid, as a fork is another process


def rank() -> tuple[int, int]:
    """This process's rank and the number of ranks.

    Where no group is up, those of the last group that was seen, else torchrun's variables.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        _in_group[os.getpid()] = dist.get_rank(), dist.get_world_size()
    if os.getpid() in _in_group:
        return _in_group[os.getpid()]
    return _variable("RANK", 0), _variable("WORLD_SIZE", 1)


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def at_exit(function: Callable[[], None]) -> None:
    """Call `function` when this process ends in order, or one that multiprocessing forks from it.

    Those do not come to Python's own exit handlers.
    """
    atexit.register(function)
    util.register_after_fork(
        function, lambda _: util.Finalize(None, function, exitpriority=0) and None
    )


def complain(what: str, error: Exception) -> None:
    """One line on stderr about something of ours that failed inside the job, which goes on."""
    text = " ".join(str(error).split())
    line = f"gemmtune: {what}: {type(error).__name__}: {text}: the job goes on as it is"
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: other ranks write too


_failed: set[str] = set()


def save(out: str, payload: Mapping[str, Any]) -> bool:
    """Write this process's file anew, atomically, so that a reader or a kill finds it whole.

    Says whether that worked. Where it cannot be written the job goes on, with one line on stderr
    for each folder.
    """
    import torch

    number, world = rank()
    about = {
        "rank": number,
        "world": world,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "local_world": _variable("LOCAL_WORLD_SIZE", world),
    }
    path = os.path.join(out, f"rank-{about['host']}-{about['pid']}.json")
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w") as f:
            json.dump({**payload, **about}, f)
        os.replace(temporary, path)
    except (OSError, TypeError, ValueError) as error:
        if out not in _failed:
            _failed.add(out)
            complain(f"cannot write to {out}", error)
        return False
    return True
