"""Counts Transformer Engine's GEMMs in one process. Runs inside the job."""

from __future__ import annotations

from typing import Any

from gemmtune.job.te_calls import Call, Hook


class TeRecorder:
    """Counts until `remove()`. `step` is the recorded step under way."""

    def __init__(self) -> None:
        self.step = 0
        self._seen: dict[Call, list[int]] = {}  # calls, and the first step
        self._hook = Hook(self._note)

    def _note(self, call: Call) -> None:
        self._seen.setdefault(call, [0, self.step])[0] += 1

    def remove(self) -> None:
        self._hook.remove()

    def forget(self) -> None:
        """In a forked child: what the parent saw is not the child's."""
        self._seen.clear()

    def rows(self) -> list[dict[str, Any]]:
        """As those of ops.Recorder; a GPU's times are not known here."""
        return [
            {
                "gemm": list(call.gemm),
                "pass": call.pass_,
                "recompute": call.recompute,
                "site": call.site,
                "calls": calls,
                "step": step,
                "time_s": 0.0,
            }
            for call, (calls, step) in list(self._seen.items())
        ]

    def untranslated(self) -> dict[str, int]:
        return {"Transformer Engine's GEMM": self._hook.failed} if self._hook.failed else {}
