"""The step boundary inside the job: torch's global optimizer-step hook, or a mark by hand.

A step ends when the first optimizer that stepped (or the one named) has stepped again, so gradient
accumulation is one step, and a second optimizer or an optimizer per parameter adds none. A job that
calls gemmtune.step() is counted by those calls alone.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemmtune.job.files import complain

# Where the optimizer whose steps count is still alive but no longer used (a job that made a new
# one), another takes over once it has stepped this often in between.
PATIENCE = 16


class _Steps:
    """The one counter of a process."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[int], None]] = []
        self.optimizers: dict[str, int] = {}
        self.hooked = False
        self.marker: weakref.ref[Optimizer] | None = None
        self.between: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.named: str | None = None
        self.manual = False
        self.index = 0

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if _within_another(optimizer):
            return
        kind = type(optimizer).__name__
        self.optimizers[kind] = self.optimizers.get(kind, 0) + 1
        if self.manual or (self.named is not None and kind != self.named):
            return
        marker = self.marker() if self.marker is not None else None
        if marker is not optimizer:
            self.between[optimizer] = self.between.get(optimizer, 0) + 1
            if marker is not None and self.between[optimizer] < PATIENCE:
                return
            self.marker = weakref.ref(optimizer)
        self.between.clear()
        self.advance()

    def advance(self) -> None:
        index = self.index
        self.index += 1
        for callback in tuple(self.callbacks):
            try:
                callback(index)
            except Exception as error:
                Handle(callback).remove()
                complain(f"after step {index}", error)


_steps = _Steps()


# Whether a class's step may call another that torch hooks. No functools.cache: torch.compile, which
# traces the hook with the step, warns of one.
_calls_parent: dict[type[Optimizer], bool] = {}


def _within_another(optimizer: Optimizer) -> bool:
    """Whether this is the step of a parent class, called by a subclass's step that torch hooks too.

    To be asked from the hook itself, by its caller.
    """
    kind = type(optimizer)
    if kind not in _calls_parent:
        hooked = sum("step" in vars(c) for c in kind.__mro__ if c is not Optimizer)
        _calls_parent[kind] = hooked > 1
    if not _calls_parent[kind]:
        return False
    hook = sys._getframe(2)
    frame = hook.f_back
    while frame is not None:
        if frame.f_code is hook.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


class Handle:
    """Removes a callback; it may be called from inside one.

    torch's own hook stays, as torch iterates over its hooks while it calls ours.
    """

    def __init__(self, callback: Callable[[int], None]) -> None:
        self._callback = callback

    def remove(self) -> None:
        if self._callback in _steps.callbacks:
            _steps.callbacks.remove(self._callback)


def on_step(callback: Callable[[int], None], optimizer: str | None = None) -> Handle:
    """Call `callback(i)` after the i-th step (from 0), in the thread that stepped.

    `optimizer` names the class whose steps count, where a job has several kinds. A callback that
    raises is removed, with one line on stderr; the job goes on.
    """
    _steps.named = optimizer or _steps.named
    _steps.callbacks.append(callback)
    if not _steps.hooked:
        _steps.hooked = True
        register_optimizer_step_post_hook(_steps.stepped)
    return Handle(callback)


def mark() -> None:
    """The end of a step, said by the job itself."""
    if not _steps.manual:
        _steps.manual = True
        if _steps.index:
            return  # the optimizer's hook has counted the step that this first mark ends
    _steps.advance()


_work: dict[str, float] = {}


def set_work(tokens: float | None, flops: float | None, peak_flops: float | None) -> None:
    """What a step of this process is, said by the job itself (gemmtune.work)."""
    said = {"tokens": tokens, "flops": flops, "peak_flops": peak_flops}
    try:
        numbers = {name: float(value) for name, value in said.items() if value is not None}
    except (TypeError, ValueError) as error:
        complain("gemmtune.work", error)
        return
    _work.clear()
    _work.update(numbers)


def work() -> dict[str, float]:
    """What the job last said of its step: tokens, flops, peak_flops, those that it knows."""
    return dict(_work)


def optimizers() -> dict[str, int]:
    """Class name of each optimizer kind that stepped, and how often step() was called on it."""
    return dict(_steps.optimizers)


# Long enough for a thread that has work in hand to come to the interpreter's lock.
SETTLING_S = 0.2


def stop_job() -> None:
    """End this process of the job from inside a callback, as sys.exit(0) in the script would.

    The script does not come to its own destroy_process_group(), so the group is left for it.
    """
    atexit.register(leave_group)
    raise SystemExit(0)


def leave_group() -> None:
    """Leave torch.distributed's group, if there is one, so that the interpreter can shut down.

    A gloo thread that drops its last work while the interpreter shuts down would abort it
    ("terminate called without an active exception"), and FSDP's and DDP's models hold the group,
    whose threads run on: they get a moment before that.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(SETTLING_S)
