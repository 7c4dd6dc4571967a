"""Profiles one step of the job with torch's profiler: CUDA's activity alone, on a CPU operators.

Runs inside the job, after what capture records, which is not to be disturbed. Writes no files.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from gemmtune.capture.profile import is_gemm, summarise, union_us
from gemmtune.job import files, kernels, steps

Done = Callable[[dict[str, Any] | None], None]
# As the profiler names them, whatever the overload.
OPERATORS = {f"aten::{o.partition('.')[0]}" for group in kernels.GEMM_OPS.values() for o in group}


def profile_step(done: Done) -> None:
    """Profile the step that begins now; `done` learns at its end what it showed.

    `done` gets None, at once or then, where the profiler cannot be had: the job goes on as it is.
    """
    try:
        step = _Step(done)
    except Exception as error:
        files.complain("profiling a step", error)
        done(None)
    else:
        step.wait()


class _Step:
    """The step under the profiler, from `wait` to its end."""

    def __init__(self, done: Done) -> None:
        own = (profile, torch.autograd.profiler.profile)
        if any(issubclass(type(o), own) for o in gc.get_objects()):
            raise RuntimeError("the job has a profiler of its own, and there can be but one")
        self._done = done
        self._gpu = torch.cuda.is_initialized()
        activity = ProfilerActivity.CUDA if self._gpu else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])
        self._profile.start()
        self._runs_in = os.getpid()  # 0 where it does not run any more

    def wait(self) -> None:
        atexit.register(self._stop)  # of a job that ends in this step
        self._handle = steps.on_step(self._ended)
        self._began = self._now()

    def _now(self) -> float:
        """Seconds, once all that the job has queued is done."""
        if self._gpu:
            torch.cuda.synchronize()
        return perf_counter()

    def _ended(self, _: int) -> None:
        step_us = (self._now() - self._began) * 1e6
        self._handle.remove()
        found = None
        try:
            self._stop()
            found = self._seen(step_us)
        except Exception as error:
            files.complain("profiling a step", error)
        self._done(found)

    def _stop(self) -> None:
        if self._runs_in == os.getpid():  # not in what the job forks meanwhile
            self._runs_in = 0
            self._profile.stop()

    def _seen(self, step_us: float) -> dict[str, Any]:
        events = self._profile.events() or ()
        if not self._gpu:
            times = [(event.name, event.self_cpu_time_total) for event in events]
            return summarise(times, sum(us for _, us in times), step_us, OPERATORS.__contains__)
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        times = [(name, end - start) for name, start, end in spans]
        return summarise(times, union_us(span[1:] for span in spans), step_us, is_gemm)
