"""Counts Transformer Engine's GEMMs in one process. Runs inside the job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gemmtune.job.te_calls import TOLD, Call, Hook

if TYPE_CHECKING:
    from gemmtune.capture.calls import Calls


class TeRecorder:
    """Counts until `remove()`. `step` is the recorded step under way.

    With `calls` the Gemms are those that the library was called with, as ops.Recorder has them.
    """

    def __init__(self, calls: Calls | None = None) -> None:
        self.step = 0
        self._seen: dict[tuple[int, Call], list[int]] = {}  # calls, and the first step
        self._calls = calls
        self._silent = 0  # GEMMs that TE was asked for and the library was not
        self._hook = Hook(self._note) if calls is None else Hook(self._claim, calls.begin)

    def _note(self, call: Call, _: None) -> None:
        self._seen.setdefault((0, call), [0, self.step])[0] += 1

    def _claim(self, call: Call, began: int) -> None:
        assert self._calls is not None
        launched = self._calls.since(began)
        if not launched:
            self._silent += 1
        for number in launched:
            self._seen.setdefault((number, call), [0, self.step])[0] += 1

    def remove(self) -> None:
        self._hook.remove()

    def forget(self) -> None:
        """In a forked child: what the parent saw is not the child's."""
        self._seen.clear()
        self._silent = self.step = 0

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

    def compared(self) -> dict[str, Any]:
        """Calls for which the library was given the GEMM that TE was asked for, and the others."""
        agree, differ = 0, Counter({"a GEMM -> no call of the library": self._silent})
        for (number, call), (calls, _) in list(self._seen.items()):
            given = self._calls.gemm(number) if self._calls is not None else None
            if given is None:
                continue
            other = [name for name in TOLD if getattr(call.gemm, name) != getattr(given, name)]
            if other:
                differ[f"{call.gemm} -> {given} ({', '.join(other)})"] += calls
            else:
                agree += calls
        return {"agree": agree, "differ": dict(+differ)}

    def untranslated(self) -> dict[str, int]:
        return {"Transformer Engine's GEMM": self._hook.failed} if self._hook.failed else {}
