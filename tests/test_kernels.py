"""A Gemm describes the memory that the library is given; an override is invisible to the job."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from gemmtune.gemm import Gemm
from gemmtune.job import kernels

SIZES = (0, 1, 2, 3, 5, 8, 17)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture
def override():
    """Puts an override in place; each is removed at the end."""
    placed = []

    def put(handle, **kwargs):
        placed.append(kernels.Override(handle, **kwargs))
        return placed[-1]

    yield put
    for each in placed:
        each.remove()


@pytest.fixture
def calls(override):
    """The calls seen, as (op, args, kwargs)."""
    seen = []

    def handle(op, native, args, kwargs):
        seen.append((op, args, kwargs))
        return native(*args, **kwargs)

    override(handle, others=True)
    return seen


# The oracle: the operation, done again in column-major terms from the Gemm and flat memory alone.


def memory(t):
    """The storage from the tensor's first element on, in float64."""
    count = max(0, t.untyped_storage().nbytes() // t.element_size() - t.storage_offset())
    return torch.as_strided(t.detach(), (count,), (1,), t.storage_offset()).double().numpy()


def matrices(flat, rows, cols, ld, trans, batch, stride):
    """op(M): (batch, rows, cols) read from memory; whatever lies outside of it fails."""
    stored = (cols, rows) if trans == "T" else (rows, cols)
    if ld < max(1, stored[0]):
        raise IndexError(f"leading dimension {ld} for columns of {stored[0]}")
    if batch * rows * cols == 0:
        return np.zeros((batch, rows, cols))
    last = (batch - 1) * stride + (stored[0] - 1) + (stored[1] - 1) * ld
    if last >= len(flat):
        raise IndexError("the key reaches beyond the tensor's memory")
    size = flat.itemsize
    view = np.lib.stride_tricks.as_strided(
        flat, (batch, *stored), (stride * size, size, ld * size), writeable=False
    )
    return view.transpose(0, 2, 1) if trans == "T" else view


def given(t):
    """The tensor that the library is given: this one, or torch's contiguous copy of it.

    torch copies a matrix in which neither dimension is dense with the other stepping over it.
    """
    rows, cols = t.shape[-2:]
    down, right = t.stride()[-2:]
    dense = t.dim() == 2 and (t.is_contiguous() or t.t().is_contiguous())
    by_row, by_column = right == 1 and down >= max(1, cols), down == 1 and right >= max(1, rows)
    return t if dense or by_row or by_column else t.contiguous()


def check(gemm, x, w, result, c=None, alpha=1, beta=0, scale=1.0):
    """The Gemm, applied to the memory of x and w, gives what torch wrote to result's memory.

    A result that torch made is row-major, so that w is the library's A. One that the job gave may
    be column-major, which turns the problem round.
    """
    ways = [(w, x, given(result), False), (x.mT, w.mT, given(result).mT, True)]
    if result.numel() == 0:
        assert {gemm.m, gemm.n} == set(result.shape[-2:])
        assert (gemm.k, gemm.flops) == (x.shape[-1], 0)
        return
    fits = []
    for a, b, out, turned in ways:
        m, n, k, batch = *out.mT.shape[-2:], x.shape[-1], gemm.batch
        plain = result.is_contiguous() and min(m, n) > 1
        if (gemm.m, gemm.n, gemm.k) != (m, n, k) or (turned and plain):
            continue
        if n > 1 and out.stride(-2) != gemm.ldd:
            continue
        a, b = memory(given(a)), memory(given(b))
        try:
            a = matrices(a, m, k, gemm.lda, gemm.trans_a, batch, gemm.stride_a)
            b = matrices(b, k, n, gemm.ldb, gemm.trans_b, batch, gemm.stride_b)
            d = matrices(memory(out), m, n, gemm.ldd, "N", batch, gemm.stride_d)
        except IndexError:
            continue
        expected = alpha * scale * (a @ b)
        if gemm.epi == "bias":
            assert gemm.bias_type == kernels.TYPES[c.dtype]
            expected = expected + c.double().numpy()[None, :, None]
        elif gemm.beta:
            added = c.double().expand(result.shape)
            added = added if turned else added.mT
            expected = expected + beta * added.numpy().reshape(batch, m, n)
        fits.append(np.array_equal(d, expected))
    assert any(fits)
    assert (gemm.epi == "bias") + gemm.beta == (1 if c is not None and beta else 0)
    assert (gemm.bias_type == "-") == (gemm.epi == "-")


class Draw:
    """Random operands whose products are exact in every type: values -1, 0 and 1."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def size(self):
        return self.random.choice(SIZES)

    def values(self, *shape, dtype):
        return torch.randint(-1, 2, shape, generator=self.torch).to(dtype)

    def matrix(self, rows, cols, dtype, writable=False):
        """A view of (rows, cols), laid out in one of many ways."""
        kinds = ["row", "column", "part", "part of column", "every other"]
        kind = self.random.choice(kinds if writable else [*kinds, "one row", "one column"])
        if kind == "row":
            return self.values(rows, cols, dtype=dtype)
        if kind == "column":
            return self.values(cols, rows, dtype=dtype).t()
        if kind == "part":
            return self.values(rows + 2, cols + 3, dtype=dtype)[1 : rows + 1, 2 : cols + 2]
        if kind == "part of column":
            return self.values(cols + 2, rows + 3, dtype=dtype)[1 : cols + 1, 2 : rows + 2].t()
        if kind == "every other":
            return self.values(2 * rows, 2 * cols, dtype=dtype)[::2, ::2]
        if kind == "one row":
            return self.values(1, cols, dtype=dtype).expand(rows, cols)
        return self.values(rows, 1, dtype=dtype).expand(rows, cols)

    def batch(self, count, rows, cols, dtype, writable=False):
        kinds = ["plain", "turned", "part", "batch inside", "heads", "every other"]
        kind = self.random.choice(kinds if writable else [*kinds, "same matrix"])
        if kind == "plain":
            return self.values(count, rows, cols, dtype=dtype)
        if kind == "turned":
            return self.values(count, cols, rows, dtype=dtype).mT
        if kind == "part":
            return self.values(count, rows + 1, cols + 2, dtype=dtype)[:, 1:, 1 : cols + 1]
        if kind == "batch inside":
            return self.values(rows, count, cols, dtype=dtype).transpose(0, 1)
        if kind == "heads":
            return self.values(cols, count, rows, dtype=dtype).permute(1, 2, 0)
        if kind == "every other":
            return self.values(count, rows, 2 * cols, dtype=dtype)[:, :, ::2]
        return self.matrix(rows, cols, dtype).expand(count, rows, cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_mm_and_bmm_are_the_memory_they_read_and_write(calls, dtype, seed):
    draw = Draw(seed)
    for case in range(80):
        n, k, m = draw.size(), draw.size(), draw.size()
        if case % 2:
            batch = draw.random.choice((0, 1, 2, 5))
            x, w = draw.batch(batch, n, k, dtype), draw.batch(batch, k, m, dtype)
            out, product = draw.batch(batch, n, m, dtype, writable=True), torch.bmm
        else:
            x, w = draw.matrix(n, k, dtype), draw.matrix(k, m, dtype)
            out, product = draw.matrix(n, m, dtype, writable=True), torch.mm
        calls.clear()
        result = product(x, w)
        assert product(x, w, out=out) is out
        for (op, args, kwargs), written in zip(calls, (result, out), strict=True):
            (gemm,) = kernels.translate(op, args, kwargs)
            assert (gemm.api, gemm.type_a) == (product.__name__, kernels.TYPES[dtype])
            check(gemm, x, w, written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["new", "out", "in place"])
def test_addmm_and_baddbmm_with_bias_beta_and_alpha(calls, dtype, form):
    draw = Draw(len(form))
    for case in range(80):
        n, k, m = draw.size(), draw.size(), draw.size()
        alpha, beta = draw.random.choice((1, 1, -1, 0.5)), draw.random.choice((1, 1, 0, 2))
        batched = case % 2 == 1
        if batched:
            lead = (draw.random.choice((1, 2, 3)),)
            x, w = draw.batch(*lead, n, k, dtype), draw.batch(*lead, k, m, dtype)
            out = draw.batch(*lead, n, m, dtype, writable=True)
        else:
            lead = ()
            x, w = draw.matrix(n, k, dtype), draw.matrix(k, m, dtype)
            out = draw.matrix(n, m, dtype, writable=True)
        name = "baddbmm" if batched else "addmm"
        shape = draw.random.choice(((m,), (1, m), (n, 1), (1,), (*lead, n, m)))
        c = draw.values(*shape, dtype=dtype)
        calls.clear()
        if form == "in place":
            c = out.clone()
            result = getattr(out, name + "_")(x, w, alpha=alpha, beta=beta)
            assert result is out
        elif form == "out":
            result = getattr(torch, name)(c, x, w, alpha=alpha, beta=beta, out=out)
            assert result is out
        else:
            result = getattr(torch, name)(c, x, w, alpha=alpha, beta=beta)
        ((op, args, kwargs),) = calls
        (gemm,) = kernels.translate(op, args, kwargs)
        assert gemm.api == name
        check(gemm, x, w, result, c, alpha, beta)


def test_layout_of_a_linear_layers_three_passes(calls):
    layer = nn.Linear(3, 5)
    x = torch.ones(7, 3, requires_grad=True)
    layer(x).backward(torch.ones(7, 5))
    found = [kernels.translate(*call)[0] for call in calls]
    as_called = [(g.m, g.n, g.k, g.trans_a + g.trans_b, g.lda, g.ldb, g.epi) for g in found]
    assert as_called == [
        (5, 7, 3, "TN", 3, 3, "bias"),
        (3, 7, 5, "NN", 3, 5, "-"),
        (3, 5, 7, "NT", 3, 5, "-"),
    ]
