"""What answers the questions of a search about one Gemm: verifies, launches, times. In a worker.

The backend launches and holds the clock; what to ask, and what the answers mean, is decided in
search.py.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from gemmtune.backends.base import Backend, Launch, Operands
from gemmtune.errors import BackendError, DeviceLost
from gemmtune.gemm import TYPE_BYTES, Algo, Gemm
from gemmtune.sweep import operands
from gemmtune.sweep.search import CHECK, TIME, WHOLE, Answer, Ask
from gemmtune.sweep.verify import WHOLE_SAMPLES, Checker

# What a launch may raise when an algorithm does not fit; anything else is a fault of gemmtune.
LAUNCH_ERRORS = (BackendError, RuntimeError, ValueError, TypeError, MemoryError)
CLOCK_TRIES = 3  # a clock that is set back once spoils one sample and not the algorithm


class Choice(NamedTuple):
    """An algorithm of a Gemm and the workspace that it needs.

    `unlisted`: a job that looks its algorithms up in the library's list cannot have it.
    """

    algo: Algo
    ws_bytes: int
    unlisted: bool = False


def choices(backend: Backend, gemm: Gemm) -> list[Choice]:
    """The algorithms in the backend's order, the default first."""
    unlisted = getattr(backend, "unlisted", lambda gemm, algo: False)  # hipBLASLt's alone has it
    return [
        Choice(a, backend.workspace_bytes(gemm, a), unlisted(gemm, a)) for a in backend.algos(gemm)
    ]


def memory_bytes(gemm: Gemm) -> int:
    """About how much of the device's memory a Bench of the Gemm takes at most.

    Sets of operands: the first, those of the whole check at three scales, the rotation; the
    largest tensor in float32 while it is drawn; a dozen arrays of the whole check in float64.
    """
    g = gemm
    x = max(g.ldb * (g.n if g.trans_b == "N" else g.k), 1) + (g.batch - 1) * g.stride_b
    w = max(g.lda * (g.k if g.trans_a == "N" else g.m), 1) + (g.batch - 1) * g.stride_a
    d = max(g.ldd * g.n, 1) + (g.batch - 1) * g.stride_d
    results = 1 + bool(g.beta) + ("gelu" in g.epi)
    kinds = ((x, g.type_b), (w, g.type_a), *((d, g.type_d),) * results)
    one_set = sum(elements * TYPE_BYTES[kind] for elements, kind in kinds)
    rows, columns = min(g.n, WHOLE_SAMPLES), min(g.m, WHOLE_SAMPLES)
    whole = g.batch * (12 * rows * columns + 3 * g.k * (rows + columns)) * 8
    return 4 * one_set + operands.MAX_BYTES + 8 * max(x, w, d) + whole


class Bench:
    """Answers questions about the algorithms of one Gemm, each by its index in `algos`.

    `lost` holds those that are out of the race already, with the reason: they are not touched.
    """

    def __init__(
        self, backend: Backend, gemm: Gemm, algos: list[Algo], seed: int, lost: dict[int, str]
    ) -> None:
        self.backend, self.gemm, self.algos, self.seed = backend, gemm, algos, seed
        self.lost = dict(lost)
        self._first = operands.draw(gemm, seed, backend.device)
        self._launches: dict[int, Launch] = {}
        self._checker: Checker | None = None
        self._sets: list[Operands] = []
        self._next = 0

    def answer(self, number: int, ask: Ask) -> Answer:
        """The answer to question `number`, counted over the Gemm; its reason says what failed.

        Raises DeviceLost.
        """
        reason = self.lost.get(0) or self.lost.get(ask.algo) or ""
        us = 0.0
        if not reason:
            try:
                reason, us = self._try(number, ask)
            except DeviceLost:
                raise
            except LAUNCH_ERRORS as e:
                reason = _why(e)
                if _lost(self.backend.device):
                    raise DeviceLost(reason) from e
        if reason:
            self.lost.setdefault(ask.algo, reason)
            return Answer(0.0, reason)
        return Answer(us)

    def _try(self, number: int, ask: Ask) -> tuple[str, float]:
        launch = self._launches.get(ask.algo)
        fresh = launch is None
        if launch is None:
            launch = self.backend.launcher(self.gemm, self.algos[ask.algo])
            self._launches[ask.algo] = launch
        if ask.kind == CHECK:
            # The better of two launches: the first one also pays for what is built once.
            return self._judge(CHECK, launch) or self._time(number, launch, [self._first], 1, 2)
        if ask.kind == WHOLE:
            return self._judge(WHOLE, launch) or ("", 0.0)
        assert ask.kind == TIME
        if warm := ask.settle or (1 if fresh else 0):
            self.backend.time_us(launch, self._turned(warm), warm)
        return self._time(number, launch, self._turned(ask.launches), ask.launches, 1)

    def _judge(self, kind: str, launch: Launch) -> tuple[str, float] | None:
        if self._checker is None:
            default = self._launches.get(0)
            if default is None:
                default = self._launches[0] = self.backend.launcher(self.gemm, self.algos[0])
            self._checker = Checker(self.gemm, default, self._first, self.seed)
        judge = self._checker.quick if kind == CHECK else self._checker.whole
        reason = judge(launch)
        return (reason, 0.0) if reason else None

    def _time(
        self, number: int, launch: Launch, sets: list[Operands], launches: int, times: int
    ) -> tuple[str, float]:
        """The best of `times` samples, in microseconds per launch."""
        # What a backend draws by chance depends on the question alone, in whatever process.
        random.seed(number)
        found = []
        for _ in range(times):
            for _ in range(CLOCK_TRIES):
                us = self.backend.time_us(launch, sets, launches)
                if math.isfinite(us) and us > 0:
                    found.append(us)
                    break
            else:
                return f"clock: a launch took {us:g} us", 0.0
        return "", min(found)

    def _turned(self, launches: int) -> list[Operands]:
        """The sets to rotate through, each call starting where the one before it ended."""
        if not self._sets:
            count = operands.rotation(self.gemm, operands.cache_bytes(self.backend.device))
            self._sets = operands.copies(self._first, count)
        start, self._next = self._next, (self._next + launches) % len(self._sets)
        return self._sets[start:] + self._sets[:start]


def _lost(device: str) -> bool:
    """Whether the device refuses everything from now on, as a GPU does after a bad access."""
    if device == "cpu":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _why(e: BaseException) -> str:
    text = str(e).strip() or type(e).__name__
    line = text.splitlines()[0][:200]
    lack = isinstance(e, MemoryError) or any(
        words in text.lower() for words in ("out of memory", "can't allocate memory")
    )
    return f"out of memory: {line}" if lack else f"cannot be launched: {line}"
