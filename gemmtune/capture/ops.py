"""Records the GEMMs of one process while they run: counts by Gemm, pass, recomputation and site.

Runs inside the job; only the standard library and torch are used. Reads and writes no files.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gemmtune.capture.names import clean_name
from gemmtune.capture.passes import Forward, match
from gemmtune.gemm import Gemm
from gemmtune.job import kernels

_CALL_IMPL = Module._call_impl.__code__


class Seen:
    """A kind of call, counted: the Gemms that one call launches, where, and for how long."""

    __slots__ = ("calls", "gemms", "step", "time_s")

    def __init__(self, gemms: tuple[Gemm, ...], step: int) -> None:
        self.gemms = gemms
        self.step = step
        self.calls = 0
        self.time_s = 0.0


class Recorder:
    """Counts every GEMM call by Gemm, pass, recomputation and site while it is installed."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: dict[tuple[Hashable, str, int, str], Seen] = {}
        self.untranslated: dict[str, int] = {}
        self._forwards: dict[int, list[Forward]] = {}
        self._names: dict[int, str] = {}
        self._modules: list[Module] = []  # keeps them alive, so that their ids stay theirs
        self._owners: dict[int, str | None] = {}  # by a parameter's storage
        self._searched: set[int] = set()
        self._recompute = Recompute()
        self._override = kernels.Override(self._handle, others=True)

    def remove(self) -> None:
        self._override.remove()
        self._recompute.remove()
        self._forwards.clear()
        self._modules.clear()

    def next_step(self) -> None:
        self.step += 1
        self._forwards.clear()

    def rows(self) -> list[dict[str, Any]]:
        """What was seen, as JSON values: a row per Gemm, pass, recompute and site."""
        rows = []
        for (_, name, recompute, site), seen in list(self.seen.items()):
            for gemm in seen.gemms:
                row = {"gemm": list(gemm), "pass": name, "recompute": recompute, "site": site}
                share = seen.time_s / len(seen.gemms)
                rows.append({**row, "calls": seen.calls, "step": seen.step, "time_s": share})
        return rows

    def _handle(
        self, op: str, native: kernels.Native, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if op not in kernels.GEMM_OPS:
            self.untranslated[op] = self.untranslated.get(op, 0) + 1
            return native(*args, **kwargs)
        seen = self._classify(op, args, kwargs)
        started = time.perf_counter()
        result = native(*args, **kwargs)
        # Meaningful where kernels run in the caller's time, that is on a CPU.
        seen.time_s += time.perf_counter() - started
        seen.calls += 1
        return result

    def _classify(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
        what = kernels.signature(op, args, kwargs)
        x, w = args[1:3] if op in ("addmm", "baddbmm") else args[:2]
        task = torch._C._current_graph_task_id()
        recompute = task != -1 and self._recompute.running(task)
        if task == -1 or recompute:
            name, site = self._forward(x, w, task)
        else:
            name, site = self._backward(x, w)
            recompute = name == "fprop"
        if what is None:
            what = kernels.translate(op, args, kwargs)
        key = (what, name, int(recompute), site)
        seen = self.seen.get(key)
        if seen is None:
            gemms = kernels.translate(op, args, kwargs)
            if not gemms:
                label = f"{op} ({str(x.dtype).removeprefix('torch.')})"
                self.untranslated[label] = self.untranslated.get(label, 0) + 1
            seen = self.seen.setdefault(key, Seen(gemms, self.step))
        elif not seen.gemms:
            label = f"{op} ({str(x.dtype).removeprefix('torch.')})"
            self.untranslated[label] += 1
        return seen

    def _forward(self, x: Tensor, w: Tensor, task: int) -> tuple[str, str]:
        site = self._site(w)
        tracked = torch.is_grad_enabled()
        if site is None:
            if not tracked:  # an optimizer's own products, or an evaluation without modules
                return "other", ""
            site = ""
        # The node that will run backward was made just before the kernel was called. Inside an
        # autograd.Function's forward grad mode is off and the node is the Function's.
        node = torch._C._autograd._get_sequence_nr() - 1
        calls = self._forwards.setdefault(node, [])
        if tracked or len(calls) < 1024:
            calls.append(
                Forward(
                    site,
                    x.shape[-2],
                    x.shape[-1],
                    w.shape[-1],
                    x.untyped_storage()._cdata,
                    w.untyped_storage()._cdata,
                )
            )
        return "fprop", site

    def _backward(self, x: Tensor, w: Tensor) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return "other", ""
        storages = x.untyped_storage()._cdata, w.untyped_storage()._cdata
        calls = self._forwards.get(node._sequence_nr(), ())
        name, forward = match(calls, x.shape[-2], x.shape[-1], w.shape[-1], storages)
        return name, forward.site if forward is not None else node.name()

    def _site(self, w: Tensor) -> str | None:
        """The path of the innermost module that is running; None outside modules.

        Read off the Python stack, since module hooks would make torch.compile compile anew.
        """
        frame = sys._getframe(4)
        inner = outer = None
        while frame is not None:
            if frame.f_code is _CALL_IMPL:
                module = frame.f_locals["self"]
                if inner is None:
                    inner = module
                    if id(inner) in self._names:
                        break
                outer = module
            frame = frame.f_back  # type: ignore[assignment]
        if inner is None:
            return None
        if id(inner) not in self._names and outer is not None:
            self._learn(outer)
        site = self._names.get(id(inner), type(inner).__name__)
        return self._owner(inner, w) or site

    def _learn(self, root: Module) -> None:
        self._modules.append(root)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), clean_name(name) or type(module).__name__)

    def _owner(self, module: Module, w: Tensor) -> str | None:
        """The submodule whose parameter w is: inside a compiled region it has no frame."""
        if not module._modules:
            return None
        storage = w.untyped_storage()._cdata
        if storage not in self._owners and id(module) not in self._searched:
            self._searched.add(id(module))
            for child in module.modules():
                for parameter in child._parameters.values():
                    if parameter is not None:
                        local: Tensor = getattr(parameter, "_local_tensor", parameter)
                        name = self._names.get(id(child))
                        self._owners.setdefault(local.untyped_storage()._cdata, name)
        return self._owners.get(storage)


class Recompute:
    """Knows whether a GEMM is a forward repeated by activation checkpointing, in both variants.

    The hook that surrounds a non-reentrant recomputation and the backward of a reentrant one are
    wrapped, and remember the graph task they run in: GEMMs of that task are the repeated forward,
    those of a task nested in it are its backward.
    """

    def __init__(self) -> None:
        from torch.utils import checkpoint

        self._module: Any = checkpoint
        self._tasks: dict[tuple[int, int], int] = {}
        self._hook = self._module._recomputation_hook
        self._backward: Any = checkpoint.CheckpointFunction.backward
        recompute = self

        class Hook(self._hook):  # type: ignore[name-defined, misc]
            def __enter__(self) -> Any:
                recompute._change(1)
                return super().__enter__()

            def __exit__(self, *error: Any) -> Any:
                recompute._change(-1)
                return super().__exit__(*error)

        def backward(ctx: Any, *grads: Any) -> Any:
            recompute._change(1)
            try:
                return recompute._backward(ctx, *grads)
            finally:
                recompute._change(-1)

        self._module._recomputation_hook = Hook
        self._module.CheckpointFunction.backward = staticmethod(backward)

    def remove(self) -> None:
        self._module._recomputation_hook = self._hook
        self._module.CheckpointFunction.backward = staticmethod(self._backward)

    def running(self, task: int) -> bool:
        return self._tasks.get((threading.get_ident(), task), 0) > 0

    def _change(self, by: int) -> None:
        key = threading.get_ident(), torch._C._current_graph_task_id()
        self._tasks[key] = self._tasks.get(key, 0) + by
