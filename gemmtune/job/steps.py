"""The step boundary inside the job: torch's global optimizer-step hook, or a mark by hand.

A step ends when the first optimizer that stepped (or the one named) has stepped again, so gradient
accumulation is one step, and a second optimizer or an optimizer per parameter adds none. A job that
calls gemmtune.step() is counted by those calls alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_callbacks: list[Callable[[int], None]] = []
_hook: Any = None
_marker: weakref.ref[Optimizer] | None = None
_named: str | None = None
_manual = False
_index = 0
optimizers: dict[str, int] = {}  # class name: calls of step(), for the report


class Handle:
    """Removes a callback; the hook itself goes with the last one."""

    def __init__(self, callback: Callable[[int], None]) -> None:
        self._callback = callback

    def remove(self) -> None:
        global _hook
        if self._callback in _callbacks:
            _callbacks.remove(self._callback)
        if not _callbacks and _hook is not None:
            _hook.remove()
            _hook = None


def on_step(callback: Callable[[int], None], optimizer: str | None = None) -> Handle:
    """Call `callback(i)` after the i-th step (from 0), in the thread that stepped.

    `optimizer` names the class whose steps count, where a job has several kinds.
    """
    global _hook, _named
    _named = optimizer or _named
    _callbacks.append(callback)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_stepped)
    return Handle(callback)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    global _marker
    kind = type(optimizer).__name__
    optimizers[kind] = optimizers.get(kind, 0) + 1
    if _manual or (_named is not None and kind != _named):
        return
    if _marker is None or _marker() is None:
        _marker = weakref.ref(optimizer)
    if _marker() is optimizer:
        _advance()


def mark() -> None:
    """The end of a step, said by the job itself."""
    global _manual
    if not _manual:
        _manual = True
        if _index:
            return  # the optimizer's hook has counted the step that this first mark ends
    _advance()


def _advance() -> None:
    global _index
    index = _index
    _index += 1
    for callback in tuple(_callbacks):
        callback(index)


def stop_job() -> None:
    """End this process of the job from inside a callback, as sys.exit(0) in the script would."""
    raise SystemExit(0)
