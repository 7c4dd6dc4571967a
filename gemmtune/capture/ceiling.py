"""The most that tuning could give: GEMM time if every GEMM ran as fast as the job's best. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gemmtune.gemm import Gemm
from gemmtune.table import Shape, parse_ranks


class Ceiling(NamedTuple):
    """Time of a step's GEMMs on one rank, as measured and at best, in microseconds."""

    gemm_us: float
    best_us: float

    def shorter(self, step_us: float) -> float:
        """The share by which a step of that time would be shorter, at most."""
        return min(max((self.gemm_us - self.best_us) / step_us, 0.0), 1.0) if step_us > 0 else 0.0


def ceiling(shapes: Iterable[Shape]) -> Ceiling | None:
    """The ceiling of a job's GEMMs; None where one of them has no time.

    At best a GEMM computes at the best rate (FLOP/s) among the job's GEMMs of its type, or moves
    its operands at the best rate (bytes/s) among all of them, whichever takes longer. That is not
    promised: a small GEMM does not fill the device, so the gain is at most what follows from this.
    """
    rows = [row for row in shapes if row.gemm.flops and row.calls]
    if not rows or any(row.time_us <= 0 for row in rows):
        return None
    world = len(set().union(*(parse_ranks(row.ranks) for row in rows)))
    flops: dict[str, float] = {}
    moved = 0.0
    for row in rows:
        kind = _kind(row.gemm)
        flops[kind] = max(flops.get(kind, 0.0), row.gemm.flops / row.time_us)
        moved = max(moved, row.gemm.bytes / row.time_us)
    gemm_us = best_us = 0.0
    for row in rows:
        calls = row.calls * len(parse_ranks(row.ranks)) / world
        gemm_us += calls * row.time_us
        best_us += calls * max(row.gemm.flops / flops[_kind(row.gemm)], row.gemm.bytes / moved)
    return Ceiling(gemm_us, min(best_us, gemm_us))


def _kind(gemm: Gemm) -> str:
    """What a device's peak depends on: both FP8 types are one."""
    return "float8" if gemm.type_a.startswith("float8") else gemm.type_a
