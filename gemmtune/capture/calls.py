"""A GPU job's GEMMs as its library was called: the interposer's calls, for the recorder to claim.

Runs inside the job, which started with the interposer. Reads and writes no files.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from gemmtune.interposer import client

UNSPELLED = "calls of the library that no table can spell"


class Calls:
    """What the library is called with while this is in place, each kind of call by its id.

    `timed` also has each call timed by events of the GPU.
    """

    def __init__(self, interposer: client.Interposer, timed: bool = False) -> None:
        self._interposer = interposer
        self._found: dict[int, client.Record] = {}
        self._looking = threading.Lock()
        interposer.drain()  # what came before is not asked for
        self._before = self._unseen()
        self.begin = interposer.calls
        self.since = interposer.launched
        interposer.mode(True, timed)

    def stop(self) -> None:
        self._interposer.mode(False)

    def forget(self) -> None:
        """In a forked child: what the parent's threads launched is not the child's."""
        self._looking = threading.Lock()
        self._found.clear()

    def untranslated(self) -> dict[str, int]:
        """Calls that were seen, and are no Gemm of a table."""
        with self._looking:
            self._look()
        count = self._unseen() - self._before
        return {UNSPELLED: count} if count else {}

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of the recorders with their `id`s made Gemms, and rows of what nobody claimed.

        The rows get the algorithm that the job gave, if any, and the time of their calls, 0 where
        they are not timed.
        """
        with self._looking:
            self._look()
        claimed: Counter[int] = Counter()
        for row in rows:
            claimed[row.get("id", 0)] += row["calls"]
        nobody = {"pass": "other", "recompute": 0, "site": "", "step": 0}
        more = [
            {**nobody, "id": number, "calls": record.calls - claimed[number]}
            for number, record in self._found.items()
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
