"""Choosing algorithms inside the job: appliers, and the entry of `gemmtune run` and `gemmtune env`.

Reads a tuned table. Writes, through files.py, which rows this process launched and how often. An
applier decides nothing: it launches what it was told, counts, and fails open: whatever goes wrong
in it, the call goes through as the job made it, and is counted by reason.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gemmtune import machine, table
from gemmtune.backends import base
from gemmtune.errors import BackendError, GemmtuneError
from gemmtune.gemm import Algo, Gemm
from gemmtune.job import files, kernels, steps
from gemmtune.job.coverage import Use, first_rows, summary
from gemmtune.table import Table, Tuned

APPLIERS = {
    "cpu": "gemmtune.job.apply:KernelApplier",
    "cublaslt": "gemmtune.interposer.client:InterposerApplier",
    "hipblaslt": "gemmtune.interposer.client:HipApplier",
}
INCOMPATIBLE = 3  # exit code of a strict job whose table was made elsewhere

_LAUNCHED_OPS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
_MOST_SIGNATURES = 65536  # a job of ever new shapes must not fill the memory


class Launches(NamedTuple):
    """Calls of one Gemm by one algorithm, and their time (0 where nothing is timed)."""

    calls: int
    time_us: float


class Applier(Protocol):
    """Launches a job's GEMMs as told, in this process."""

    def choose(self, choices: Mapping[Gemm, Algo]) -> None:
        """From now on launch these Gemms with these algorithms, all others as the job does."""

    def drain(self) -> dict[tuple[Gemm, Algo | None], Launches]:
        """What was launched since the last drain; None is the job's own call."""

    def fallbacks(self) -> dict[str, int]:
        """Calls since the start that were to be launched otherwise and were not, by reason."""

    def graphed(self) -> int:
        """Calls since the start that went into a CUDA graph, which replays them as they are.

        Of all calls where times are taken, else of those that were launched as chosen.
        """

    def close(self) -> None:
        """Take the applier out of the process."""


def open_applier(backend: str, timed: bool = False) -> Applier:
    """The applier of a backend, in place in this process. `timed` also times every call.

    Raises BackendError where the backend has none.
    """
    if backend not in APPLIERS:
        raise BackendError(
            f"tables of the backend {backend!r} cannot be switched inside a job: compare processes,"
            ' as in: gemmtune replay --a "JOB" --b "TE_HIPBLASLT_ALGO_LOAD=te.csv JOB"'
        )
    module, cls = APPLIERS[backend].split(":")
    applier: Applier = getattr(importlib.import_module(module), cls)(timed)
    return applier


class _Cell:
    """Calls and seconds of one Gemm by one algorithm."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0


class _Known:
    """A signature that was met: its Gemm, and what it is launched with now."""

    __slots__ = ("broken", "gemm", "native", "now")

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        self.broken: str | None = None  # why the algorithm does not work for this signature
        self.native: _Cell
        # Configuration (None: the job's own kernel) and where it is counted, in one piece, as other
        # threads read it while it is changed.
        self.now: tuple[str | None, _Cell]


class KernelApplier:
    """The CPU's applier: torch's GEMM kernels overridden, alternatives run by backends.cpu."""

    def __init__(self, timed: bool = False) -> None:
        from gemmtune.backends import cpu

        self._run = cpu.run
        self._default = cpu.DEFAULT
        self._timed = timed
        self._lock = threading.Lock()
        self._choices: Mapping[Gemm, Algo] = {}
        self._known: dict[Any, _Known | None] = {}
        self._cells: dict[tuple[Gemm, Algo | None], _Cell] = {}
        self._fallbacks: Counter[str] = Counter()
        os.register_at_fork(after_in_child=self._forked)
        self._override = kernels.Override(self._handle)

    def choose(self, choices: Mapping[Gemm, Algo]) -> None:
        with self._lock:
            self._choices = dict(choices)
            for known in self._known.values():
                if known is not None:
                    self._resolve(known)

    def drain(self) -> dict[tuple[Gemm, Algo | None], Launches]:
        with self._lock:
            launched = {
                key: Launches(cell.calls, cell.seconds * 1e6)
                for key, cell in self._cells.items()
                if cell.calls
            }
            for cell in self._cells.values():
                cell.calls, cell.seconds = 0, 0.0
        return launched

    def fallbacks(self) -> dict[str, int]:
        with self._lock:
            return dict(self._fallbacks)

    def graphed(self) -> int:
        return 0

    def close(self) -> None:
        self._override.remove()

    def _forked(self) -> None:
        """In a forked child: the parent's counts are not the child's, its lock may be held."""
        self._lock = threading.Lock()
        self._fallbacks.clear()
        for cell in self._cells.values():
            cell.calls, cell.seconds = 0, 0.0

    def _handle(
        self, op: str, native: kernels.Native, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            signature = kernels.signature(op, args, kwargs)
            known = self._known.get(signature)
            if known is None:
                known = self._learn(signature, op, args, kwargs)
        except Exception as error:
            self._fell(error)
            return native(*args, **kwargs)
        if known is None:
            return native(*args, **kwargs)
        config, cell = known.now
        begin = perf_counter() if self._timed else 0.0
        result = None
        if config is not None:
            result = self._alternative(known, config, op, args, kwargs)
        if result is None:
            if config is not None:
                cell = known.native
                begin = perf_counter() if self._timed else 0.0
            result = native(*args, **kwargs)
        spent = perf_counter() - begin if self._timed else 0.0
        with self._lock:
            cell.calls += 1
            cell.seconds += spent
        return result

    def _learn(
        self, signature: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Known | None:
        """A signature not met before; None where it is no GEMM that could be chosen for."""
        if signature is None or signature in self._known:
            return None
        gemms = kernels.translate(op, args, kwargs)
        with self._lock:
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            if len(gemms) != 1 or not args[0].is_cpu:
                self._known[signature] = None
                return None
            known = _Known(gemms[0])
            self._resolve(known)
            self._known[signature] = known
        return known

    def _resolve(self, known: _Known) -> None:
        """Set what a signature is launched with."""
        algo = self._choices.get(known.gemm)
        config = None if algo is None or algo.config == self._default else algo.config
        known.broken = None
        known.native = self._cell(known.gemm, None)
        known.now = config, self._cell(known.gemm, algo)

    def _cell(self, gemm: Gemm, algo: Algo | None) -> _Cell:
        return self._cells.setdefault((gemm, algo), _Cell())

    def _alternative(
        self, known: _Known, config: str, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The result by `config`; None where it does not work, and it is not tried again."""
        reason = known.broken
        if reason is None:
            try:
                return self._launch(config, op, args, kwargs)
            except Exception as error:
                known.broken = reason = f"{config}, {known.gemm}: {_words(error)}"
        with self._lock:
            self._fallbacks[reason] += 1
        return None

    def _launch(
        self, config: str, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Run `config` on the call's tensors. The job's own `out` is as before where it raises."""
        if op not in _LAUNCHED_OPS:
            raise BackendError(f"{op} has scales or groups: only {', '.join(_LAUNCHED_OPS)} can be")
        call = kernels.unpack(op, args, kwargs)
        if not call.alpha:
            raise BackendError("alpha=0, for which torch reads neither factor")
        x, w, c = _plain(call.x), _plain(call.w), call.c
        shape = (*x.shape[:-1], w.shape[-1])
        if call.out is not None:
            _check_out(call, shape)
        bias = _plain(c) if call.bias and c is not None else None
        c = None if c is None or bias is not None else _plain(c).expand(shape)
        out = call.out
        if out is None:
            d = torch.empty(shape, dtype=call.out_type or x.dtype, device=x.device)
            self._run(config, x, w, d, c, call.alpha, call.beta, bias)
            return d
        d = _plain(out)
        before = None
        if c is not None and c.data_ptr() == d.data_ptr():
            before = c = c.clone()  # in place: an algorithm may write d before it reads c
        try:
            if d.stride(-1) != 1 and d.stride(-2) == 1:  # by columns: the problem turned round
                shift = bias.expand(shape).mT if bias is not None else None
                c = c.mT if c is not None else shift
                self._run(config, w.mT, x.mT, d.mT, c, call.alpha, call.beta)
            else:
                self._run(config, x, w, d, c, call.alpha, call.beta, bias)
        except Exception:
            if before is not None:
                d.copy_(before)
            raise
        return out

    def _fell(self, error: Exception) -> None:
        with self._lock:
            self._fallbacks[_words(error)] += 1


def _check_out(call: kernels.Call, shape: tuple[int, ...]) -> None:
    """Raise BackendError where only torch's own kernel treats the job's `out` as torch does.

    Its refusals are the job's to see, and where it lets `out` share memory with what is read, the
    result depends on the order of reading and writing. C may be `out` itself (in place).
    """
    x, w, c, out = call.x, call.w, call.c, call.out
    assert out is not None
    if out.shape != shape:
        raise BackendError("out= has another shape, which torch would resize")
    if out.dtype != (call.out_type or x.dtype):
        raise BackendError("out= has another type, which torch refuses")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise BackendError("out= lies over itself, which torch refuses")
    storage = out.untyped_storage().data_ptr()
    own = c is not None and c.data_ptr() == out.data_ptr() and _same_layout(c, out)
    read = (x, w) if own or c is None else (x, w, c)
    if any(t.untyped_storage().data_ptr() == storage and _overlap(t, out) for t in read):
        raise BackendError("out= shares memory with an operand")


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the spans of memory of two tensors meet."""
    (a0, a1), (b0, b1) = _span(a), _span(b)
    return a0 < b1 and b0 < a1


def _span(t: Tensor) -> tuple[int, int]:
    if not t.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _plain(t: Tensor) -> Tensor:
    """A tensor that knows no gradient: numpy refuses to look at any other."""
    return t.detach() if t.requires_grad else t


def _words(error: Exception) -> str:
    text = str(error).split("\n")[0]
    return text if isinstance(error, GemmtuneError) else f"{type(error).__name__}: {text}"


def backend_of(tuned: Table[Tuned], named: str | None) -> str:
    """The backend that applies a table: the one named, else the table's, else this machine's."""
    return base.applying(tuned.provenance, named)


def compare(tuned: Table[Tuned], backend: str) -> tuple[list[str], list[str]]:
    """Hard and soft differences between where the table was made and here, in plain words."""
    made = tuned.provenance.get("machine", {})
    here = machine.fingerprint(base.get(backend))
    return machine.incompatible(made, here), machine.differences(made, here)


class _Process:
    """A table in use in this process: what was launched, saved as the job goes on."""

    def __init__(
        self, tuned: Table[Tuned], applier: Applier, differences: list[str], out: str | None
    ) -> None:
        self._differences = differences
        self._applier = applier
        self._out = out
        self._rows = tuned.rows
        self._index = first_rows(tuned.rows)
        self._calls: Counter[str] = Counter()
        self._gemms: set[Gemm] = set()
        self._steps = 0
        self._child = False
        applier.choose({gemm: tuned.rows[i].algo for gemm, i in self._index.items()})
        os.register_at_fork(after_in_child=self._forked)
        steps.on_step(self._stepped)
        files.at_exit(self._ended)

    def _forked(self) -> None:
        self._child = True
        self._calls.clear()
        self._gemms.clear()
        self._steps = 0

    def _stepped(self, _: int) -> None:
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # 1, 2, 4, …: a killed job leaves most of it
            self._save()

    def _ended(self) -> None:
        if self._child and not self._steps:
            return  # a data loader, say: no rank of the job
        use = self._save()
        if self._out is None and use.gemms and use.rank == 0:
            who = "rank 0: " if files.rank()[1] > 1 else ""
            print(f"gemmtune: {who}{summary([use], len(self._rows))}", file=sys.stderr)

    def _save(self) -> Use:
        for (gemm, algo), launches in self._applier.drain().items():
            self._gemms.add(gemm)
            if algo is not None:
                self._calls[str(self._index[gemm])] += launches.calls
        use = Use(
            rank=files.rank()[0],
            rows=dict(self._calls),
            gemms=len(self._gemms),
            steps=self._steps,
            fallbacks=self._applier.fallbacks(),
            graphed=self._applier.graphed(),
            differences=self._differences,
        )
        if self._out is not None and use.gemms:  # a launcher has nothing to tell
            files.save(self._out, use._asdict())
        return use


def start(options: dict[str, Any], out: str) -> None:
    """Entry in the job: apply the table `options["table"]`, or go on untuned where it is foreign.

    Other options: `backend` (name or None), `strict` (exit with 3 instead of going on), `quiet`
    (save to `out` for a parent to report; else rank 0 reports at its end).
    """
    if "gemmtune.cli" in sys.modules:
        return  # exported variables also reach gemmtune's own commands
    tuned = table.read(options["table"], Tuned)
    if not tuned.rows:
        return
    backend = backend_of(tuned, options["backend"])

    def apply() -> None:
        try:
            hard, soft = compare(tuned, backend)
            if hard:
                _refuse("was made elsewhere", hard, options, out)
                return
            applier = open_applier(backend)
        except BackendError as error:
            _refuse("cannot be applied", [str(error)], options, out)
            return
        _Process(tuned, applier, soft, out if options["quiet"] else None)

    def late() -> None:
        try:
            apply()
        except Exception as error:  # it would be the job's
            files.complain("applying the table", error)

    if getattr(base.get(backend), "version_needs_device", False):
        # Not every process that imports torch is to hold the GPU, and no fork may come after it.
        torch.cuda._lazy_call(late)
    else:
        apply()


def _refuse(what: str, hard: list[str], options: Mapping[str, Any], out: str) -> None:
    """Say once, where rank 0 runs a GEMM or a step, that the table is not used and why."""
    line = f"gemmtune: {options['table']} {what} ({'; '.join(hard)}): "
    if options["strict"]:
        print(line + "refused, as --strict asks", file=sys.stderr)
        raise SystemExit(INCOMPATIBLE)
    told = threading.Lock()

    def tell() -> None:
        if told.acquire(blocking=False):
            if files.rank()[0] == 0:
                print(line + "the job goes on untuned", file=sys.stderr)
            if options["quiet"]:
                files.save(out, Use(incompatible=hard)._asdict())

    def gemm(op: str, native: kernels.Native, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tell()
        return native(*args, **kwargs)

    def stop(_: int) -> None:
        tell()  # of a job whose GEMMs are not torch's
        override.remove()
        handle.remove()

    override = kernels.Override(gemm)
    handle = steps.on_step(stop)
