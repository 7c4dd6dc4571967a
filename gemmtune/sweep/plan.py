"""Which Gemms of a job to sweep, in which order, for how long. Reads shapes; writes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from gemmtune import gpu, machine, table
from gemmtune.backends.base import Backend
from gemmtune.gemm import Gemm
from gemmtune.sweep import budget, measure
from gemmtune.table import Shape

MATTERS = 0.02  # share of the GEMM time from which a Gemm gets the sustained confirmation
LESSER = 1 / 3  # of the seconds per shape, for a Gemm below that share
START_S = 1.5  # of a Gemm beside its timing: process, operands, verification; until it is measured
MOST = 64  # Gemms that are swept unasked: a job of varying lengths has hundreds


class Options(NamedTuple):
    """How to sweep. `threads` and `timeout_s` None: the job's; by the time expected of an answer.

    `budget_s` is for the whole sweep, all its sessions together; 0: `seconds_per_shape` instead.
    """

    min_gain: float = 0.005
    seconds_per_shape: float = 3.0
    top: int = MOST
    threads: int | None = None
    seed: int = 0
    fresh: bool = False
    force: bool = False
    timeout_s: float | None = None
    budget_s: float = 0.0
    te_direct: bool = False


class Plan(NamedTuple):
    """What will be swept: Gemms with calls and shares, the largest share of the time first."""

    calls: dict[Gemm, float]
    shares: dict[Gemm, float]
    gemms: list[Gemm]
    seconds: dict[Gemm, float]  # of timing; 0 where the budget does not suffice
    unsupported: dict[Gemm, str]
    beyond: list[Gemm]  # the `top`

    @property
    def total_s(self) -> float:
        return sum(s + START_S for s in self.seconds.values() if s)

    def share(self, gemms: Iterable[Gemm]) -> float:
        """The share of the step's GEMM time that these Gemms stand for."""
        return sum(self.shares[gemm] for gemm in gemms)


def make_plan(shapes: Iterable[Shape], backend: Backend, options: Options) -> Plan:
    """Which Gemms to sweep, in which order, for how long."""
    rows = list(shapes)
    calls = table.by_gemm(rows)
    shares = _shares(rows)
    room = _room(backend)
    unsupported = {g: reason for g in calls if (reason := _unsupported(g, backend, room))}
    ordered = sorted((g for g in calls if g not in unsupported), key=lambda g: -shares[g])
    kept, beyond = ordered[: options.top], ordered[options.top :]
    if options.budget_s:
        given = budget.allot([shares[g] for g in kept], options.budget_s, START_S)
    else:
        given = [options.seconds_per_shape * (1.0 if matters(shares[g]) else LESSER) for g in kept]
    seconds = dict(zip(kept, given, strict=True))
    return Plan(calls, shares, kept, seconds, unsupported, beyond)


def matters(share: float) -> bool:
    """Whether a Gemm of that share gets the sustained confirmation, unless the job runs below its
    GPU's power cap."""
    return share >= MATTERS


def _shares(rows: list[Shape]) -> dict[Gemm, float]:
    """Each Gemm's share of the GEMM time: as captured if all rows have times, else by FLOPs."""
    timed = all(row.time_us > 0 for row in rows)
    weights: dict[Gemm, float] = {}
    for row in rows:
        calls = row.calls * len(table.parse_ranks(row.ranks))
        weight = calls * (row.time_us if timed else row.gemm.flops)
        weights[row.gemm] = weights.get(row.gemm, 0.0) + weight
    total = sum(weights.values()) or 1.0
    return {gemm: weight / total for gemm, weight in weights.items()}


def _unsupported(gemm: Gemm, backend: Backend, room: int) -> str | None:
    if not gemm.flops:
        return "empty: nothing to compute"
    if reason := backend.unsupported(gemm):
        return reason
    if 0 < room < (needed := measure.memory_bytes(gemm)):
        return (
            f"needs about {needed / 2**30:.1f} GiB of GPU memory to be checked and timed; half of "
            f"what is free is {room / 2**30:.1f} GiB"
        )
    return None


def _room(backend: Backend) -> int:
    """Half of the GPU's free memory: the rest may be a job's. 0: not known, or not a GPU's."""
    found = machine.gpus() if backend.device != "cpu" else []
    return gpu.read(found[0].uuid).free_bytes // 2 if found else 0


class Purse:
    """The time that the Gemms still to be swept get: what earlier ones left or overran is shared
    out anew among them, with the overhead as measured."""

    def __init__(self, plan: Plan, options: Options, lanes: int = 1) -> None:
        self._plan, self._budget_s, self._lanes = plan, options.budget_s, lanes
        self._beside_s = [START_S]

    def seconds(self, todo: list[Gemm], spent_s: float) -> float:
        """Of timing for the first of `todo`; 0 where the budget does not suffice any more."""
        if not self._budget_s:
            return self._plan.seconds[todo[0]]
        shares = [self._plan.shares[gemm] for gemm in todo]
        return budget.allot(shares, (self._budget_s - spent_s) * self._lanes, self._overhead_s)[0]

    def over(self, spent_s: float) -> bool:
        """Whether it is time to stop in the midst of a Gemm."""
        return bool(self._budget_s) and spent_s > self._budget_s * (1 + budget.OVERRUN)

    def left_s(self, todo: list[Gemm], spent_s: float) -> float:
        """What the Gemms still to be done are expected to take."""
        if self._budget_s:
            return max(0.0, self._budget_s - spent_s)
        return sum(self._plan.seconds[gemm] + self._overhead_s for gemm in todo) / self._lanes

    def took(self, wall_s: float, timing_s: float) -> None:
        """A Gemm is done: its time, and that of it in which it was timed."""
        self._beside_s.append(max(0.0, wall_s - timing_s))

    @property
    def _overhead_s(self) -> float:
        # The first worker also waits for torch to be loaded, which is no later Gemm's to pay.
        return statistics.median_low(self._beside_s)
