"""Verification: is what an algorithm computes right, before anyone looks at its time?

Reads and writes tensors. The yardstick is the same product in float64; the bound follows from the
result's type, the type in which the GEMM adds up, and k; the default's own error is the other
measure.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gemmtune.backends.base import Launch, Operands
from gemmtune.gemm import Gemm
from gemmtune.sweep import epilogue
from gemmtune.sweep import operands as ops

if TYPE_CHECKING:
    import torch

LAMBDA = 6.0  # Higham and Mary's λ: the rounding errors of k additions stay below λ·√k units
WORSE = 4.0  # times the default's own root-mean-square error that another algorithm may have
SAMPLES = 64  # rows and columns that the quick check looks at
WHOLE_SAMPLES = 8192  # the same of the whole check: all of most results, and at most half a GiB in
# float64 of the largest

UNIT = {  # unit roundoff, and the smallest normal number
    "float64": (2.0**-53, 2.0**-1022),
    "float32": (2.0**-24, 2.0**-126),
    "bfloat16": (2.0**-8, 2.0**-126),
    "float16": (2.0**-11, 2.0**-14),
    "float8e4m3": (2.0**-4, 2.0**-6),
    "float8e5m2": (2.0**-3, 2.0**-14),
}
COMPUTE_UNIT = {"f32": 2.0**-24, "f64": 2.0**-53}
# Hopper's tensor cores keep about 14 bits of a sum of FP8 products, whatever the compute type
# (DeepSeek-V3 Technical Report, 2024, section 3.3.2).
FP8_COMPUTE_UNIT = 2.0**-13


class Error(NamedTuple):
    """How far a result is from float64: root mean square, and the worst share of the bound."""

    rms: float
    worst: float


class Reference(NamedTuple):
    """The exact result of some rows and columns, the bound on each element's error, its scale.

    `product`: what went into the epilogue.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    exact: torch.Tensor
    bound: torch.Tensor
    product: torch.Tensor
    floor: float  # root-mean-square error of rounding the exact result to its type


def reference(gemm: Gemm, o: Operands, samples: int | None = None, seed: int = 0) -> Reference:
    """The float64 result, of all elements or of `samples` random rows and columns.

    |error| <= 2·u·|exact| + λ·√k·u_c·(|x|·|w| + |c|) + the smallest normal number, with u the unit
    roundoff of the result's type and u_c that of the type in which the GEMM adds up (Higham and
    Mary, A new approach to probabilistic rounding error analysis, 2019).
    """
    import torch

    rows = _pick(gemm.n, samples, seed, o.d.device)
    columns = _pick(gemm.m, samples, seed + 1, o.d.device)
    x = _plain(o.x).index_select(-2, rows).double()
    w = _plain(o.w).index_select(-1, columns).double()
    scale = math.prod(float(s) for s in (o.scale_x, o.scale_w) if s is not None)
    product, size = x @ w * scale, x.abs() @ w.abs() * scale
    for addend in (o.c, o.bias):
        if addend is not None:
            part = addend.index_select(-1, columns)
            part = (part if part.dim() == 1 else part.index_select(-2, rows)).double()
            product, size = product + part, size + part.abs()
    unit, smallest = UNIT[gemm.type_d]
    compute_unit = FP8_COMPUTE_UNIT if gemm.fp8 else COMPUTE_UNIT[gemm.comp]
    compute = LAMBDA * math.sqrt(gemm.k + 1) * compute_unit
    gelu_in = o.gelu_in
    if gelu_in is not None:
        gelu_in = gelu_in.index_select(-2, rows).index_select(-1, columns)
    exact, off = epilogue.apply(gemm, product, compute * size, gelu_in)
    bound = 2 * unit * exact.abs() + off + smallest
    floor = unit * float(torch.sqrt(torch.mean(exact**2))) if exact.numel() else 0.0
    return Reference(rows, columns, exact, bound, product, floor)


def error(result: torch.Tensor, ref: Reference) -> Error:
    """The error of a result, (batch,) n, m, against a reference."""
    import torch

    picked = _plain(result).index_select(-2, ref.rows).index_select(-1, ref.columns)
    difference = picked.double() - ref.exact
    if not difference.numel():
        return Error(0.0, 0.0)
    rms = float(torch.sqrt(torch.mean(difference**2)))
    return Error(rms, float((difference.abs() / ref.bound).max()))


def judge(own: Error, default: Error, floor: float) -> str:
    """Why a result is not accurate enough, "" where it is. Pure.

    Within the bound (or no worse than a default that is not), and its typical error no more than
    WORSE times the default's, so that an algorithm that quietly computes in a narrower type is
    found even where the bound is wide.
    """
    if not own.worst <= max(1.0, default.worst):
        return f"error {own.worst:.3g} times the bound for its type and k"
    allowed = WORSE * max(default.rms, floor)
    if not own.rms <= allowed:
        return f"error {own.rms:.3g}, the default's {default.rms:.3g}"
    return ""


def launch_clean(gemm: Gemm, launch: Launch, o: Operands) -> str:
    """Launch once over NaN; why the output is not whole, "" where every element was written."""
    written = [(t, ops.storage(t)) for t in epilogue.outputs(gemm, o)]
    for _, memory in written:
        memory.fill_(math.nan)
    launch(o)
    for t, memory in written:
        nans = int(_nans(t).sum())
        if nans:
            return f"{nans} of {t.numel()} elements NaN or not written"
        # What lies between the rows of d belongs to another tensor.
        if int((~_nans(memory)).sum()) != t.numel():
            return "wrote outside its matrix"
    return ""


def _nans(t: torch.Tensor) -> torch.Tensor:
    return _plain(t).isnan()


def _plain(t: torch.Tensor) -> torch.Tensor:
    """FP8 as float32: torch has neither isnan nor, on every device, index_select for FP8."""
    return t.float() if t.element_size() == 1 else t


class Checker:
    """Checks the algorithms of one Gemm, each against float64 and against the default's error.

    Raises whatever a launch raises.
    """

    def __init__(self, gemm: Gemm, default: Launch, o: Operands, seed: int) -> None:
        self.gemm, self.default, self.seed, self.device = gemm, default, seed, o.d.device.type
        self._sampled = self._measure(o, SAMPLES)
        self._whole: list[tuple[str, Operands, Reference, Error]] = []
        self._operands = o

    def _measure(self, o: Operands, samples: int | None) -> tuple[Reference, Error]:
        ref = reference(self.gemm, o, samples, self.seed)
        launch_clean(self.gemm, self.default, o)
        return ref, error(o.d, ref)

    def quick(self, launch: Launch) -> str:
        """NaN scan and sampled check; the reason of a failure, "" where it passed."""
        return self._judge(launch, self._operands, *self._sampled)

    def _judge(self, launch: Launch, o: Operands, ref: Reference, default: Error) -> str:
        reason = launch_clean(self.gemm, launch, o)
        reason = reason or judge(error(o.d, ref), default, ref.floor)
        if reason or self.gemm.epi in ("-", "bias"):
            return reason
        g, kept = self.gemm, (ref.product, ref.product)
        if o.gelu_in is not None:
            written = o.gelu_in.index_select(-2, ref.rows).index_select(-1, ref.columns)
            kept = (ref.product, written)
        bias = g.bias_type if g.bias_type != "-" else g.type_d
        units = (UNIT[bias][0], UNIT[g.type_d][0], COMPUTE_UNIT[g.comp])
        return epilogue.judge(g, o, kept, units)

    def whole(self, launch: Launch) -> str:
        """At normal, tiny and huge scales, twice over; "" where it passed.

        Every element is scanned; WHOLE_SAMPLES rows and columns are compared with float64.
        """
        if not self._whole:
            scales = {"normal": 0}
            if not self.gemm.fp8:
                scales["tiny"] = ops.TINY_LOG2[self.gemm.type_d]
                scales["huge"] = ops.HUGE_LOG2[self.gemm.type_d]
            for name, log2 in scales.items():
                o = ops.draw(self.gemm, self.seed + 1, self.device, log2)
                self._whole.append((name, o, *self._measure(o, WHOLE_SAMPLES)))
        for name, o, ref, default in self._whole:
            if reason := self._judge(launch, o, ref, default):
                return f"{reason} ({name} values)"
            first = o.d.clone()
            reason = launch_clean(self.gemm, launch, o)
            if reason or not bool((_plain(first) == _plain(o.d)).all()):
                return f"not repeatable: {reason or 'two launches differ'} ({name} values)"
        return ""


def _pick(size: int, samples: int | None, seed: int, device: torch.device) -> torch.Tensor:
    """Indices to look at: all, or a random choice with the first and the last among them."""
    import torch

    if samples is None or size <= samples:
        return torch.arange(size, device=device)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(size, generator=generator)[: samples - 2]
    ends = torch.tensor([0, size - 1])
    picked: torch.Tensor = torch.cat([ends, chosen]).unique()
    return picked.to(device)
