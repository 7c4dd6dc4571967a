"""What capture does inside each process of the job: wait, record, save, get out of the way.

Waits for `warmup` optimizer steps, records `steps` of them, and writes this process's rank file
at the end and every half second while it records, so that a job that dies keeps what was seen.
Meanwhile a meter reads the GPU; where asked for, one more step is profiled.
Options: steps, warmup (whole numbers), stop, dims (true or false), optimizer (name or null),
profile (true or false; null: where a GPU is used), backend (that of the interposer, null without
one), time (true or false: have the interposer time calls).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from gemmtune import machine
from gemmtune.capture.dims import Dims
from gemmtune.capture.ops import Recorder
from gemmtune.capture.profile import power
from gemmtune.capture.profiler import profile_step
from gemmtune.capture.te import TeRecorder
from gemmtune.capture.te_saved import save_beside
from gemmtune.errors import BackendError
from gemmtune.job import files, readings, steps

if TYPE_CHECKING:
    from gemmtune.capture.calls import Calls

SAVE_EVERY_S = 0.5


def start(options: dict[str, Any], out: str) -> None:
    """Called once in every process of the job, as soon as it has imported torch."""
    Session(options, out)


class Session:
    """One process's recording."""

    def __init__(self, options: dict[str, Any], out: str) -> None:
        self.options = options
        self.out = out
        self.recorder: Recorder | None = None
        self.te: TeRecorder | None = None
        self.calls: Calls | None = None
        self.dims = Dims() if options["dims"] else None
        self.step_s: list[float] = []
        self.waited = 0
        self.meter: readings.Meter | None = None
        self.gpu: dict[str, Any] = {}
        self.profile: dict[str, Any] | None = None
        self.optimizers: dict[str, int] | None = None
        self.machine: dict[str, Any] = {}  # that of the calls' library
        self._done = threading.Event()
        self._saving = threading.Lock()
        save_beside(out)
        self._child = False  # forked from the process that imported torch
        self._handle = steps.on_step(self._on_step, options["optimizer"])
        files.at_exit(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)
        if options["warmup"] == 0:
            self._begin()

    def _forked(self) -> None:
        """Start afresh in a forked child: what the parent saw is the parent's to tell.

        The child may be a rank, a data loader or anything else: it is one of the job's ranks once
        an optimizer steps in it. The parent's locks may be held by threads that it alone has.
        """
        self._child = True
        self._saving = threading.Lock()
        self.waited, self.step_s = 0, []
        self.meter = None
        if not self._done.is_set():
            self._done = threading.Event()
            self._began = time.perf_counter()
            for recorder in (self.recorder, self.te, self.calls):
                if recorder is not None:
                    recorder.forget()

    def _begin(self) -> None:
        self.calls = self._library_calls()
        self.recorder = Recorder(self.calls)
        self.te = TeRecorder(self.calls)
        if self.dims is not None:
            self.dims.install()
        threading.Thread(target=self._save_at_times, daemon=True).start()
        self.meter = readings.meter()
        self._began = time.perf_counter()

    def _library_calls(self) -> Calls | None:
        backend = self.options["backend"]
        if backend is None:
            return None
        from gemmtune.backends import base
        from gemmtune.capture.calls import Calls
        from gemmtune.interposer import client

        try:
            self.machine = machine.fingerprint(base.get(backend))
            return Calls(client.present(backend), self.options["time"])
        except BackendError as error:
            files.complain("recording the library's calls", error)
            return None

    def _on_step(self, _: int) -> None:
        if self.recorder is None:
            self.waited += 1
            if self.waited >= self.options["warmup"]:
                self._begin()
            return
        now = time.perf_counter()
        self.step_s.append(now - self._began)
        self.recorder.next_step()
        if self.te is not None:
            self.te.step += 1
        if self.dims is not None:
            self.dims.remove()
        if len(self.step_s) == self.options["steps"]:
            self._end()
            asked = self.options["profile"]
            if torch.cuda.is_initialized() if asked is None else asked:
                profile_step(self._profiled)
            else:
                self._finish()
        else:
            self._began = time.perf_counter()

    def _profiled(self, found: dict[str, Any] | None) -> None:
        self.profile = found
        self._save()
        self._finish()

    def _finish(self) -> None:
        if self.options["stop"]:
            steps.stop_job()

    def _end(self) -> None:
        if self.options["time"] and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the last calls' events have happened then
        for recorder in (self.recorder, self.te):
            if recorder is not None:
                recorder.remove()
        if self.calls is not None:
            self.calls.stop()
        if self.meter is not None:
            self.gpu = power(self.meter.take())
            self.meter.close()
        self.optimizers = steps.optimizers()  # a step that is profiled then is not to count
        self._handle.remove()
        self._done.set()
        self._save()

    def _at_exit(self) -> None:
        stepped = self.waited or self.step_s
        seen = not self._child and self._rows()
        if not self._done.is_set() and (stepped or seen):
            self._end()

    def _save_at_times(self) -> None:
        while not self._done.wait(SAVE_EVERY_S):
            if self._rows():
                self._save()

    def _rows(self) -> list[dict[str, Any]]:
        rows = [row for r in (self.recorder, self.te) if r is not None for row in r.rows()]
        return rows if self.calls is None else self.calls.complete(rows)

    def _save(self) -> None:
        recorders = [r for r in (self.recorder, self.te, self.calls) if r is not None]
        with self._saving:
            files.save(
                self.out,
                {
                    "rows": self._rows(),
                    "untranslated": {k: v for r in recorders for k, v in r.untranslated().items()},
                    "te": self.te.compared() if self.te is not None else {},
                    "waited": self.waited,
                    "step_s": self.step_s,
                    "optimizers": self.optimizers or steps.optimizers(),
                    "timed": self.options["time"] and self.calls is not None,
                    "machine": self.machine,
                    "settings": machine.settings(),
                    "device": "cuda" if torch.cuda.is_initialized() else "cpu",
                    "compiled": _compiled(),
                    "gpu": self.gpu,
                    "profile": self.profile,
                    "dims": self.dims.rows() if self.dims is not None else [],
                },
            )


def _compiled() -> dict[str, Any]:
    """What torch.compile did in this process: graphs made, and what hides GEMMs from us.

    Templates are counted by inductor for C++; Triton's have no counter, so the settings that ask
    for them are named.
    """
    dynamo = sys.modules.get("torch._dynamo")
    counters = dynamo.utils.counters if dynamo is not None else {}
    graphs = counters["stats"]["unique_graphs"] if counters else 0
    if not graphs:
        return {"graphs": 0, "hidden": []}
    settings = sys.modules.get("torch._inductor.config")
    options = ("cpp_wrapper", "max_autotune", "max_autotune_gemm")
    hidden = [f"{option} is on" for option in options if getattr(settings, option, False)]
    if templates := counters["inductor"]["cpp_templated_kernel_counter"]:
        hidden.append(f"{templates} C++ templates were made")
    return {"graphs": graphs, "hidden": hidden}
