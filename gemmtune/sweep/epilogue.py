"""What an epilogue makes of the product, in float64, and whether its side outputs are right.

GELU is the one with tanh, as the libraries compute it. Reads and writes tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gemmtune.backends.base import Operands
from gemmtune.gemm import Gemm

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

TANH_ERROR = 2.0**-11  # of the hardware's tanh.approx.f32 (PTX ISA)
STEEPEST = 1.13  # of GELU, and the largest value of its gradient


def outputs(gemm: Gemm, o: Operands) -> list[torch.Tensor]:
    """All tensors that a launch writes."""
    found = [o.d, o.bgrad, o.gelu_in if gemm.epi.startswith("gelu") else None]
    return [t for t in found if t is not None]


def apply(
    gemm: Gemm, product: torch.Tensor, error: torch.Tensor, gelu_in: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result before it is rounded to its type, and the bound on its error.

    `product` (with what is added to it) may be off by `error`; `gelu_in` are the same elements of
    the GELU's input, for its gradient.
    """
    import torch

    if gemm.epi.startswith("gelu"):
        gelu = torch.nn.functional.gelu(product, approximate="tanh")
        return gelu, STEEPEST * error + TANH_ERROR / 2 * product.abs()
    if gemm.epi.startswith("dgelu"):
        assert gelu_in is not None
        x = gelu_in.double()
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        steep = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        tanh = torch.tanh(inner)
        gradient = (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * steep
        off = TANH_ERROR * (0.5 + (x * steep).abs())
        return product * gradient, STEEPEST * error + product.abs() * off
    return product, error


def judge(
    gemm: Gemm, o: Operands, kept: tuple[torch.Tensor, torch.Tensor], units: Sequence[float]
) -> str:
    """Why a side output is wrong, "" where all are right.

    `kept`: the GELU's input that a launch should have written where it was sampled, and what it
    wrote there. `units`: unit roundoffs of the bias's type, the result's, the compute type.
    """
    bias_unit, unit, compute_unit = units
    expected, written = kept
    if gemm.epi.startswith("gelu"):
        allowed = 4 * unit * expected.abs().clamp_min(float(expected.abs().mean()))
        if bool(((written.double() - expected).abs() > allowed).any()):
            return "the GELU's input is written wrongly"
    if o.bgrad is None:
        return ""
    # The gradient of the bias is the sum of what was multiplied, or of what came out.
    if gemm.epi == "bgradb":
        summed, dimension, each = o.x, -1, compute_unit
    else:
        summed, dimension, each = o.d, -2, unit
    exact = summed.double().sum(dimension)
    allowed = 2 * bias_unit * exact.abs() + 2 * each * summed.double().abs().sum(dimension)
    if bool(((o.bgrad.double() - exact).abs() > allowed).any()):
        return "the bias gradient is wrong"
    return ""
