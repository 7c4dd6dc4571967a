"""Verification of the epilogues: what they should compute, and that a wrong one is found."""

from __future__ import annotations

import pytest
import torch

from gemmtune.backends.base import Operands
from gemmtune.gemm import Gemm
from gemmtune.sweep import epilogue, operands
from gemmtune.sweep.verify import Checker

M, N, K = 40, 24, 32


def gemm(epi: str, bias: str = "-", kind: str = "bfloat16") -> Gemm:
    ops = ("N", "N") if "dgelu" in epi else ("T", "N")
    return Gemm(M, N, K, *ops, kind, kind, kind, bias, M if ops[0] == "N" else K, K, M, epi=epi)


def compute(g: Gemm, o: Operands) -> None:
    """The Gemm and its epilogue in float64, by torch's own GELU and its own gradient."""
    y = o.x.double() @ o.w.double()
    if o.bias is not None:
        y = y + o.bias.double()
    if g.epi.startswith("gelu"):
        o.gelu_in.copy_(y)
        y = torch.nn.functional.gelu(y, approximate="tanh")
    elif g.epi.startswith("dgelu"):
        x = o.gelu_in.double().requires_grad_()
        torch.nn.functional.gelu(x, approximate="tanh").backward(y)
        y = x.grad
    o.d.copy_(y)
    if g.epi == "dgelubgrad":
        o.bgrad.copy_(y.sum(0))
    elif g.epi == "bgradb":
        o.bgrad.copy_(o.x.double().sum(1))


CASES = [
    gemm("geluaux"),
    gemm("geluauxbias", "bfloat16"),
    gemm("geluauxbias", "float16", "float16"),
    gemm("dgelu"),
    gemm("dgelubgrad", "bfloat16"),
    gemm("bgradb", "bfloat16"),
    gemm("bgradb"),
]


@pytest.mark.parametrize("g", CASES, ids=str)
def test_what_is_right_passes(g):
    def launch(o):
        compute(g, o)

    checker = Checker(g, launch, operands.draw(g, 0), 0)
    assert checker.quick(launch) == "" and checker.whole(launch) == ""


@pytest.mark.parametrize("g", CASES, ids=str)
def test_a_side_output_that_is_wrong_or_missing_is_found(g):
    checker = Checker(g, lambda o: compute(g, o), operands.draw(g, 0), 0)
    sides = [n for n in ("gelu_in", "bgrad") if g.epi.startswith("gelu") or n == "bgrad"]
    for name in sides:

        def off(o, name=name):
            compute(g, o)
            side = getattr(o, name)
            if side is not None:
                side[3] += 1

        def unwritten(o, name=name):
            compute(g, o)
            side = getattr(o, name)
            if side is not None:
                side[3] = float("nan")

        if getattr(operands.draw(g, 0), name) is not None:
            assert "wrong" in checker.quick(off)
            assert "not written" in checker.quick(unwritten)


def test_the_plain_product_in_place_of_the_epilogue_is_found():
    for g in (gemm("geluaux"), gemm("dgelu")):

        def plain(o, g=g):
            compute(g, o)
            o.d.copy_(o.x.double() @ o.w.double())

        checker = Checker(g, lambda o, g=g: compute(g, o), operands.draw(g, 0), 0)
        assert "bound" in checker.quick(plain)


def test_the_gelus_input_has_a_leading_dimension_that_is_a_multiple_of_8():
    o = operands.draw(gemm("geluaux")._replace(m=M - 3), 0)
    assert o.gelu_in.shape == (N, M - 3) and o.gelu_in.stride() == (M, 1)
    assert epilogue.outputs(gemm("geluaux"), o) == [o.d, o.gelu_in]
