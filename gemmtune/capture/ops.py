"""Records the GEMMs of one process while they run: counts by Gemm, pass, recomputation and site.

Runs inside the job; only the standard library and torch are used. Reads and writes no files. A call
is only noted when it happens; what it was is worked out when the step is over, since that is the
larger part of the work.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module

from gemmtune.capture import noting
from gemmtune.capture.passes import Forward, match
from gemmtune.gemm import Gemm
from gemmtune.job import kernels
from gemmtune.job.files import complain
from gemmtune.job.names import clean_name

if TYPE_CHECKING:
    from gemmtune.capture.calls import Calls

# Bound once: they are called at every GEMM.
current_node = torch._C._current_autograd_node
next_node = torch._C._autograd._get_sequence_nr
is_grad_enabled = torch.is_grad_enabled
_CALL_IMPL = Module._call_impl.__code__
WITH_C = ("addmm", "baddbmm")  # operators whose first argument is C
UNNOTED = "products that could not be noted"


class Noted(NamedTuple):
    """A call as it happened."""

    step: int
    signature: Any  # of kernels.signature; without one (op, x, w) by shape, and `gemms` are known
    gemms: tuple[Gemm, ...] | None
    x_storage: int
    w_storage: int
    spent: Any  # seconds; or the ids of the library's own calls, where it is a GPU's
    forward: bool
    backward: bool  # whether it ran inside backward; a forward there is a recomputation
    node: int  # sequence number of the autograd node, the forward's and its backward's alike
    tracked: bool
    module: int  # id of the innermost module; 0 outside modules
    caller: str  # class of the backward node; "" in a forward
    after: int  # calls that `noting` had noted before


def _sizes(call: Noted) -> tuple[int, int, int]:
    """Rows, inner and columns of the product, row-major."""
    op, *parts = call.signature
    x, w = (part[0] for part in parts[op in WITH_C :][:2])
    return x[-2], x[-1], w[-1]


class Seen:
    """A kind of call, counted: the Gemms that one call launches, and for how long."""

    __slots__ = ("calls", "gemms", "step", "time_s")

    def __init__(self, gemms: tuple[Gemm, ...], step: int) -> None:
        self.gemms = gemms
        self.step = step
        self.calls = 0
        self.time_s = 0.0


class Recorder:
    """Counts every GEMM call by Gemm, pass, recomputation and site while it is installed.

    With `calls` the Gemms of a GPU are those that its library was called with, whoever called it.
    """

    def __init__(self, calls: Calls | None = None) -> None:
        self.step = 0
        self._seen: dict[tuple[Any, str, int, str], Seen] = {}
        self._translations: dict[Any, tuple[Gemm, ...]] = {}
        self._untranslated: Counter[str] = Counter()
        # The calls' values one after another, in Noted's order. Objects kept for each call would
        # bring on Python's garbage collector, whose longest runs take as long as a step.
        self._noted: deque[Any] = deque()
        self._interned: dict[Any, Any] = {}
        self._sorted_step = 0
        self._sorting = threading.Lock()
        self._forwards: dict[int, list[Forward]] = {}
        self._names: dict[int, str] = {}
        self._modules: dict[int, Module] = {}  # keeps them alive, so that their ids stay theirs
        self._roots: list[Module] = []  # whose modules have no names yet
        self._owners: dict[int, int] = {}  # a module's id by its parameter's storage
        self._searched: set[int] = set()
        self._recompute = Recompute()
        how: dict[str, Any] = {}
        if calls is not None:
            how = {
                "begin": lambda: (calls.begin(), perf_counter()),
                "since": lambda began: (calls.since(began[0]), perf_counter() - began[1]),
            }
        self._fast = noting.load() if calls is None else None
        self._taken = 0  # of its calls, those that are sorted
        if self._fast is not None:
            running = self._recompute.running
            replaced = self._fast.begin(
                kernels.inside, self._recompute.tasks, running, _CALL_IMPL, self._module
            )
            how = {"but": replaced}
        self._override = kernels.Override(self._note, others=True, watch=True, **how)

    def remove(self) -> None:
        """Leave torch as it was; what was seen stays."""
        self._override.remove()
        self._recompute.remove()
        if self._fast is not None:
            self._fast.end()
        self._sort()
        if self._fast is not None:
            self._untranslated.update({UNNOTED: self._fast.failed()})
            self._fast = None
        self._forwards.clear()
        self._modules.clear()
        self._owners.clear()

    def next_step(self) -> None:
        self.step += 1
        if self._fast is not None:
            self._fast.step(self.step)

    def forget(self) -> None:
        """In a forked child: what the parent saw is not the child's, its lock may be held."""
        self._sorting = threading.Lock()
        self.step = self._sorted_step = 0
        for seen in (self._seen, self._noted, self._forwards, self._untranslated):
            seen.clear()
        self._override.counts.clear()
        if self._fast is not None:
            self._fast.forget()
            self._taken = 0

    def rows(self) -> list[dict[str, Any]]:
        """What was seen, as JSON values: a row per Gemm, pass, recompute and site.

        A row of the library's own calls has their `id` in place of a Gemm (see Calls.complete).
        """
        self._sort()
        rows = []
        for (kind, name, recompute, site), seen in list(self._seen.items()):
            row = {"pass": name, "recompute": recompute, "site": site, "step": seen.step}
            if isinstance(kind, int):
                rows.append({**row, "id": kind, "calls": seen.calls})
            for gemm in seen.gemms:
                share = seen.time_s / len(seen.gemms)
                rows.append({**row, "gemm": list(gemm), "calls": seen.calls, "time_s": share})
        return rows

    def untranslated(self) -> dict[str, int]:
        """Calls of matrix products that are no Gemm, by operator."""
        self._sort()
        return dict(self._untranslated + self._override.counts)

    def _note(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], spent: Any) -> None:
        x, w = args[1:3] if op in WITH_C else args[:2]
        gemms = None
        signature = kernels.signature(op, args, kwargs)
        if signature is None:
            gemms = kernels.translate(op, args, kwargs)
            if not gemms:  # sparse operands, which have no storage either
                layouts = {str(t.layout).removeprefix("torch.") for t in (x, w)} - {"strided"}
                self._untranslated[" ".join([op, *(f"of {name}" for name in sorted(layouts))])] += 1
                return
            signature = op, *((),) * (op in WITH_C), (x.shape,), (w.shape,)
        storages = x.untyped_storage()._cdata, w.untyped_storage()._cdata
        signature = self._interned.setdefault(signature, signature)
        if isinstance(spent, tuple):
            spent = spent[x.is_cpu]  # the GPU's library has nothing to do with a CPU's product
        where, after = self._where(w), self._fast.count() if self._fast is not None else 0
        self._noted.extend((self.step, signature, gemms, *storages, spent, *where, after))

    def _where(self, w: Tensor) -> tuple[Any, ...]:
        """Noted's fields from `forward` to `caller`; `w` is the call's weight."""
        node = current_node()
        if node is None or self._recompute.running():
            # The node that will run backward was made just before the kernel was called. Inside
            # an autograd.Function's forward grad mode is off and the node is the Function's.
            number, tracked = next_node() - 1, is_grad_enabled()
            module = self._module(w.untyped_storage()._cdata)
            return True, node is not None, number, tracked, module, ""
        return False, True, node._sequence_nr(), False, 0, type(node).__name__

    def _module(self, storage: int) -> int:
        """The id of the innermost module that is running, or of its weight's; 0 outside modules.

        Read off the Python stack, since module hooks would make torch.compile compile anew.
        """
        frame: Any = sys._getframe(1)
        inner = outer = None
        while frame is not None:
            if frame.f_code is _CALL_IMPL:
                outer = frame.f_locals["self"]
                if inner is None:
                    inner = outer
                    if id(inner) in self._modules:
                        break
            frame = frame.f_back
        if inner is None or outer is None:
            return 0
        if id(inner) not in self._modules:
            self._modules.update((id(module), module) for module in outer.modules())
            self._roots.append(outer)
        if not inner._modules:
            return id(inner)
        # Inside a compiled region the module whose parameter the weight is has no frame.
        if storage not in self._owners and id(inner) not in self._searched:
            self._searched.add(id(inner))
            for module in inner.modules():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        local: Tensor = getattr(parameter, "_local_tensor", parameter)
                        self._owners.setdefault(local.untyped_storage()._cdata, id(module))
        return self._owners.get(storage, id(inner))

    def _sort(self) -> None:
        """Work out what the noted calls were, in their order."""
        with self._sorting:
            while self._roots:
                for name, module in list(self._roots.pop().named_modules()):
                    self._names.setdefault(id(module), clean_name(name) or type(module).__name__)
            for call in self._in_order():
                try:
                    self._count(call)
                except Exception as error:  # counted all the same, and the others with it
                    self._untranslated[call.signature[0]] += 1
                    if self._untranslated[call.signature[0]] == 1:
                        complain(f"recording {call.signature[0]}", error)

    def _in_order(self) -> Iterator[Noted]:
        """The noted calls, each once, those of Python's kernels and of `noting` as they came."""
        fast = deque(self._fast.take()) if self._fast is not None else deque()
        end = self._taken + len(fast)
        last = len(Noted._fields) - 1
        while self._noted and self._noted[last] <= end:
            while self._taken < self._noted[last]:
                yield self._spelled(fast.popleft())
            yield Noted(*(self._noted.popleft() for _ in Noted._fields))
        while fast:
            yield self._spelled(fast.popleft())

    def _spelled(self, told: tuple[Any, ...]) -> Noted:
        """A call as `noting` tells it: its operands are shape, strides and type."""
        step, op, *operands = told[:4]
        signature = op, *((torch.Size(shape), *more) for shape, *more in operands)
        self._taken += 1
        return Noted(step, signature, None, *told[4:], self._taken)  # type: ignore[call-arg]

    def _count(self, call: Noted) -> None:
        if call.step != self._sorted_step:
            self._forwards.clear()  # autograd's nodes do not outlive their step
            self._sorted_step = call.step
        op = call.signature[0]
        where = self._forward(call) if call.forward else self._backward(call)
        if isinstance(call.spent, tuple):
            for launched in call.spent:
                self._seen.setdefault((launched, *where), Seen((), call.step)).calls += 1
            if not call.spent:
                self._untranslated[f"{op} without a call of the library"] += 1
            return
        key = (call.gemms or call.signature, *where)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = Seen(self._translate(call), call.step)
        seen.calls += 1
        seen.time_s += call.spent
        if not seen.gemms:
            label = " ".join(
                [op, *(str(t).replace("torch.", "of ") for t in call.signature[1][2:])]
            )
            self._untranslated[label] += 1

    def _forward(self, call: Noted) -> tuple[str, int, str]:
        """Pass, recompute and site of a call outside backward, or repeated inside it."""
        site = self._names.get(call.module, "")
        if not call.module and not call.tracked:
            # An optimizer's own product, or an evaluation without modules.
            return "other", int(call.backward), site
        calls = self._forwards.setdefault(call.node, [])
        if call.tracked or len(calls) < 1024:  # without grad they pile up under one number
            calls.append(Forward(site, *_sizes(call), call.x_storage, call.w_storage))
        return "fprop", int(call.backward), site

    def _backward(self, call: Noted) -> tuple[str, int, str]:
        forwards = self._forwards.get(call.node, ())
        storages = call.x_storage, call.w_storage
        name, forward = match(forwards, *_sizes(call), storages)
        site = forward.site if forward is not None else call.caller
        return name, int(name == "fprop"), site

    def _translate(self, call: Noted) -> tuple[Gemm, ...]:
        if call.gemms is not None:
            return call.gemms
        if call.signature not in self._translations:
            gemms = kernels.translate(*kernels.arguments(call.signature))
            self._translations[call.signature] = gemms
        return self._translations[call.signature]


class Recompute:
    """Knows whether a GEMM is a forward repeated by activation checkpointing, in both variants.

    The hook that surrounds a non-reentrant recomputation and the backward of a reentrant one are
    wrapped, and remember the graph task they run in: GEMMs of that task are the repeated forward,
    those of a task nested in it are its backward.
    """

    def __init__(self) -> None:
        # torch's own names: what surrounds a non-reentrant recomputation, and the function whose
        # backward is a reentrant one.
        self._replaced: list[tuple[Any, str, Any]] = []
        self.tasks: dict[tuple[int, int], int] = {}  # depth by thread and task, while it is > 0
        self._replace(torch.utils.checkpoint, "_recomputation_hook", self._surround)
        self._replace(torch.utils.checkpoint.CheckpointFunction, "backward", self._wrap)

    def _replace(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        self._replaced.append((owner, name, original))
        setattr(owner, name, change(original))

    def remove(self) -> None:
        for owner, name, original in self._replaced:
            setattr(owner, name, original)

    def running(self) -> bool:
        return (threading.get_ident(), torch._C._current_graph_task_id()) in self.tasks

    def _surround(self, hook: Any) -> Any:
        recompute = self

        class Hook(hook):  # type: ignore[misc]
            def __enter__(self) -> Any:
                recompute._change(1)
                return super().__enter__()

            def __exit__(self, *error: Any) -> Any:
                recompute._change(-1)
                return super().__exit__(*error)

        return Hook

    def _wrap(self, original: staticmethod[..., Any]) -> Any:
        def backward(ctx: Any, *grads: Any) -> Any:
            self._change(1)
            try:
                return original.__func__(ctx, *grads)
            finally:
                self._change(-1)

        return staticmethod(backward)

    def _change(self, by: int) -> None:
        key = threading.get_ident(), torch._C._current_graph_task_id()
        depth = self.tasks.pop(key, 0) + by
        if depth:
            self.tasks[key] = depth
