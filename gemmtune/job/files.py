"""Writes what one process of the job knows: `rank-<host>-<pid>.json` in the folder given."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any


def rank() -> tuple[int, int]:
    """This process's rank and the number of ranks; torchrun's variables where no group is up."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def save(out: str, payload: Mapping[str, Any]) -> None:
    """Write this process's file anew, atomically, so that a reader or a kill finds it whole."""
    import torch

    number, world = rank()
    about = {
        "rank": number,
        "world": world,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "local_world": int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
    }
    path = os.path.join(out, f"rank-{about['host']}-{about['pid']}.json")
    temporary = path + ".tmp"
    with open(temporary, "w") as f:
        json.dump({**payload, **about}, f)
    os.replace(temporary, path)
