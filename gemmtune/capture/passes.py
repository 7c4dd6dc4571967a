"""Which pass a GEMM inside backward belongs to, told from its node's forward GEMMs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Forward:
    """A forward product x(rows, inner) @ w(inner, cols), as its autograd node will look for it."""

    site: str
    rows: int
    inner: int
    cols: int
    x_storage: int
    w_storage: int
    seen: dict[str, int] = field(default_factory=dict)  # pass: GEMMs of backward matched to it


def match(
    forwards: Sequence[Forward], rows: int, inner: int, cols: int, storages: tuple[int, int]
) -> tuple[str, Forward | None]:
    """The pass of a product (rows, inner) @ (inner, cols) in the backward of these forward calls.

    dgrad multiplies by w over the forward's cols, wgrad by x over its rows, and a forward repeated
    inside backward (a compiled graph's own recomputation, marked "fprop") over its inner. Where
    equal dimensions leave several readings, an operand that is the forward's own tensor decides,
    then the order: torch computes the gradient of w first. Forwards that fit equally well take
    turns, so that a compiled graph's layers of one shape share its backward evenly.
    """
    readings = []
    for forward in forwards:
        for name, reduced, others in (
            ("dgrad", forward.cols, (forward.rows, forward.inner)),
            ("wgrad", forward.rows, (forward.inner, forward.cols)),
            ("fprop", forward.inner, (forward.rows, forward.cols)),
        ):
            if inner != reduced or sorted(others) != sorted((rows, cols)):
                continue
            own = {
                "dgrad": forward.w_storage in storages,
                "wgrad": forward.x_storage in storages,
                "fprop": forward.w_storage in storages and forward.x_storage in storages,
            }[name]
            first = {"wgrad": 0, "dgrad": 1, "fprop": 2}[name]
            readings.append((not own, forward.seen.get(name, 0), first, name, forward))
    if not readings:
        return "other", None
    *_, name, forward = min(readings, key=lambda r: r[:3])
    forward.seen[name] = forward.seen.get(name, 0) + 1
    return name, forward
