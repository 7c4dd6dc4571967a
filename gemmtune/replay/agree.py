"""How the ranks of a job agree on the rounds of a replay: rank 0 decides, the others are told.

The word goes through the store that torch.distributed keeps for the default process group, which
all ranks share on one node or many. A job without a group decides in each process by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gemmtune.replay.plan import Round

KEY = "gemmtune/replay"
# How long a rank waits for the decision: rank 0 may be a slow step behind.
TIMEOUT_S = 120.0


class Lost(Exception):
    """The decision did not arrive."""


def agree(number: int, decide: Callable[[], Round], timeout_s: float = TIMEOUT_S) -> Round:
    """Decision `number` of a replay, the same on all ranks, each of which asks at the same step.

    `decide` is called on rank 0, and in every process where there is no group. Raises Lost where
    the decision cannot be had, or not be told.
    """
    try:
        store, rank = _store()
        if rank:
            # Not set_timeout() and get(): the store is the job's own, and so is its timeout.
            store.wait([str(number)], timedelta(seconds=timeout_s))
            return Round.read(json.loads(store.get(str(number))))
    except Exception as error:
        raise Lost(f"the decision of rank 0 did not arrive: {_text(error)}") from None
    decided = decide()
    if store is not None:
        try:
            store.set(str(number), json.dumps(decided))
        except Exception as error:
            raise Lost(f"the other ranks could not be told: {_text(error)}") from None
    return decided


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _store() -> tuple[Any, int]:
    """The store for our keys and this process's rank in the default group; None, 0 without one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None, 0
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(KEY, _get_default_store()), dist.get_rank()
