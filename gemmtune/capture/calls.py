"""A GPU job's GEMMs as its library was called: the interposer's calls, for the recorder to claim.

Runs inside the job, which started with the interposer. Reads and writes no files.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from gemmtune.gemm import Gemm
from gemmtune.interposer import client

UNSPELLED = "calls of the library that no table can spell"


class Calls:
    """What the library is called with while this is in place, each kind of call by its id.

    `timed` also has each call timed by events of the GPU.
    """

    def __init__(self, interposer: client.Interposer, timed: bool = False) -> None:
        self._interposer = interposer
        interposer.drain()  # what came before is not asked for
        self.forget()
        self.begin = interposer.calls
        self.since = interposer.launched
        interposer.mode(True, timed)

    def stop(self) -> None:
        self._interposer.mode(False)

    def forget(self) -> None:
        """Start anew, as in a forked child: what the parent launched is not the child's."""
        self._lock = threading.Lock()  # the parent's may be held by a thread that it alone has
        self._found: dict[int, client.Record] = {}
        self._before = self._unseen()

    def gemm(self, number: int) -> Gemm | None:
        """That of an id, where a table can spell it and rows were made since it was launched."""
        record = self._found.get(number)
        return None if record is None else record.gemm

    def untranslated(self) -> dict[str, int]:
        """Calls that were seen, and are no Gemm of a table."""
        self._look()
        count = self._unseen() - self._before
        return {UNSPELLED: count} if count else {}

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of the recorders with their `id`s made Gemms, and rows of what nobody claimed.

        The rows get the algorithm that the job gave, if any, and the time of their calls, 0 where
        they are not timed.
        """
        self._look()
        claimed: Counter[int] = Counter()
        for row in rows:
            claimed[row.get("id", 0)] += row["calls"]
        nobody = {"pass": "other", "recompute": 0, "site": "", "step": 0}
        more = [
            {**nobody, "id": number, "calls": record.calls - claimed[number]}
            for number, record in list(self._found.items())
            if record.calls > claimed[number]
        ]
        made = [row for row in rows if "id" not in row]
        for row in (*(row for row in rows if "id" in row), *more):
            record = self._found.get(row.pop("id"))
            if record is not None:  # else one that no table can spell
                mean_us = record.time_us / record.timed if record.timed else 0.0
                given = record.algo.config if record.algo is not None else ""
                time_s = mean_us * row["calls"] / 1e6
                made.append({**row, "gemm": list(record.gemm), "time_s": time_s, "default": given})
        return made

    def _look(self) -> None:
        with self._lock:
            for new in self._interposer.drain():
                old = self._found.get(new.id, new._replace(calls=0, timed=0, time_us=0.0))
                self._found[new.id] = new._replace(
                    calls=old.calls + new.calls,
                    timed=old.timed + new.timed,
                    time_us=old.time_us + new.time_us,
                )

    def _unseen(self) -> int:
        """Calls since the start that went through unseen, or that no Gemm has a name for."""
        return self._interposer.unspelled + sum(
            self._interposer.faults()[client.REASONS.index(reason)] for reason in client.UNSEEN
        )
