"""Inside a job that runs with a table of Transformer Engine's: which of its rows are used.

TE itself loads the table and chooses. Here its GEMMs are counted by key, its own table is saved
beside, and what the process had in its environment at the first GEMM is noted; all of it goes to
the process's rank file. After the first step rank 0 says so where not one row fits.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from typing import Any

import torch

from gemmtune.capture.te_saved import save_beside
from gemmtune.dialects import te
from gemmtune.gemm import Gemm
from gemmtune.job import files, steps
from gemmtune.job.te_calls import Call, Hook
from gemmtune.job.te_coverage import unfit, used
from gemmtune.textfile import read_text

WATCHED = 10  # steps in which the GEMMs are counted: then the job is left alone
PREFIXES = ("TE_HIPBLASLT_TUNING_", "TE_HIPBLASLT_ALGO_SELECTION")


def start(options: dict[str, Any], out: str) -> None:
    """Entry in the job; `options["table"]` is the table that all ranks are to load."""
    _Process(options["table"], out)


class _Process:
    def __init__(self, table: str, out: str) -> None:
        save_beside(out)
        self.table, self.out = table, out
        self.gemms: Counter[Gemm] = Counter()
        self.steps = 0
        self.about: dict[str, Any] = {}
        self._hook = Hook(self._note)
        self._handle = steps.on_step(self._stepped)
        files.at_exit(self._save)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.gemms.clear()
        self.steps = 0

    def _note(self, call: Call, _: None) -> None:
        if not self.about:  # TE has read its variables by now
            load = os.environ.get(te.ALGO_LOAD, "")
            left = [k for k in os.environ if k.startswith(PREFIXES)]
            self.about = {"load": load, "digest": _digest(load), "left": left}
        self.gemms[call.gemm] += 1

    def _stepped(self, _: int) -> None:
        self.steps += 1
        if self.steps == WATCHED:
            self._hook.remove()
            self._handle.remove()
        if self.steps in (1, 4, WATCHED):
            self._save()
        if self.steps == 1 and self.gemms and files.rank()[0] == 0:
            rows = te.read(read_text(self.table)).rows
            if rows and not used(rows, self.gemms.items()):
                caps = _dev_caps()
                line = f"gemmtune: {unfit(rows, list(self.gemms), caps)}: the job goes on untuned"
                print(f"{line}\n", end="", file=sys.stderr, flush=True)

    def _save(self) -> None:
        if self.gemms:
            gemms = [[list(gemm), calls] for gemm, calls in self.gemms.items()]
            files.save(self.out, {"gemms": gemms, "steps": self.steps, **self.about})


def _dev_caps() -> list[int]:
    if not torch.cuda.is_available():
        return []
    major, minor = torch.cuda.get_device_capability()
    return [major * 100 + minor]


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()
    except OSError as e:
        return e.strerror or "unreadable"
