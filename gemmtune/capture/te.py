"""Counts Transformer Engine's GEMMs in one process, and compares them with what TE itself saves.

Runs inside the job; `compare` runs beside it. Each process's TE is told to save its algorithm
table (TE_HIPBLASLT_ALGO_SAVE) into the capture's folder, unless the user has it saved elsewhere.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmtune.gemm import Gemm
from gemmtune.job.te_calls import Call, Hook

if TYPE_CHECKING:
    from gemmtune.capture.calls import Calls

ALGO_SAVE = "TE_HIPBLASLT_ALGO_SAVE"
FILES = "te-*.csv"


class TeRecorder:
    """Counts until `remove()`. `step` is the recorded step under way.

    With `calls` the Gemms are those that the library was called with, as ops.Recorder has them.
    """

    def __init__(self, calls: Calls | None = None) -> None:
        self.step = 0
        self._seen: dict[tuple[int, Call], list[int]] = {}  # calls, and the first step
        self._calls = calls
        self._hook = Hook(self._note) if calls is None else Hook(self._claim, calls.begin)

    def _note(self, call: Call, _: None) -> None:
        self._seen.setdefault((0, call), [0, self.step])[0] += 1

    def _claim(self, call: Call, began: int) -> None:
        assert self._calls is not None
        for number in self._calls.since(began):
            self._seen.setdefault((number, call), [0, self.step])[0] += 1

    def remove(self) -> None:
        self._hook.remove()

    def forget(self) -> None:
        """In a forked child: what the parent saw is not the child's."""
        self._seen.clear()

    def rows(self) -> list[dict[str, Any]]:
        """As those of ops.Recorder; a GPU's times are not known here."""
        return [
            {
                **({"id": number} if number else {"gemm": list(call.gemm), "time_s": 0.0}),
                "pass": call.pass_,
                "recompute": call.recompute,
                "site": call.site,
                "calls": calls,
                "step": step,
            }
            for (number, call), (calls, step) in list(self._seen.items())
        ]

    def untranslated(self) -> dict[str, int]:
        return {"Transformer Engine's GEMM": self._hook.failed} if self._hook.failed else {}


def save_beside(out: str) -> None:
    """Have TE save its table of this process, unless the user has: it reads this at its first GEMM.

    The name carries the process, as TE itself would leave `%i` as it is before te-v2.
    """
    if not os.environ.get(ALGO_SAVE):
        os.environ[ALGO_SAVE] = os.path.join(out, f"te-{socket.gethostname()}-{os.getpid()}.csv")


def compare(folder: str | os.PathLike[str], gemms: Iterable[Gemm]) -> list[str]:
    """Remarks on where TE's saved tables and the recorded Gemms differ; none where TE saved none.

    TE's tables hold every GEMM since the start, and what it had loaded: more there is no fault.
    """
    from gemmtune.dialects import te
    from gemmtune.errors import GemmtuneError
    from gemmtune.textfile import read_text

    saved: set[tuple[Any, ...]] = set()
    unread = 0
    for path in sorted(Path(folder).glob(FILES)):
        try:
            saved |= {tuple(getattr(r, n) for n in te.SAID) for r in te.read(read_text(path)).rows}
        except GemmtuneError:  # cut short by the end of a process that was killed
            unread += 1
    remarks = []
    if unread:
        remarks.append(
            f"{unread} tables of Transformer Engine's own are empty or cut short: it writes them"
            " when a process ends in order"
        )
    seen = {tuple(getattr(g, n) for n in te.SAID): g for g in gemms if g.api == "lt"}
    if saved and (missing := [seen[key] for key in seen if key not in saved]):
        remarks.append(
            f"{len(missing)} of {len(seen)} GEMMs that Transformer Engine was seen to issue are not"
            f" in its own table: {missing[0]} first"
        )
    if saved and (more := saved - set(seen)):
        m, n, k, *_ = min(more)
        remarks.append(
            f"{len(more)} GEMMs of Transformer Engine's own table were not recorded (they ran"
            f" outside the recorded steps, or were loaded): {m}x{n}x{k} first"
        )
    return remarks
