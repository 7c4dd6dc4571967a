"""A Gemm describes the memory that the library is given; an override is invisible to the job."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_mm_by_tensor_and_by_row(calls, bias, by_row):
    if not hasattr(torch, "_scaled_mm"):
        pytest.skip("this torch has no _scaled_mm")
    draw = Draw(7)
    x = draw.values(16, 48, dtype=torch.float32).to(torch.float8_e4m3fn)
    w = draw.values(32, 48, dtype=torch.float32).to(torch.float8_e4m3fn).t()
    shapes = ((16, 1), (1, 32)) if by_row else ((), ())
    scale_x, scale_w = torch.full(shapes[0], 2.0), torch.full(shapes[1], 0.5)
    c = draw.values(32, dtype=torch.bfloat16) if bias else None
    try:
        result = torch._scaled_mm(
            x, w, scale_a=scale_x, scale_b=scale_w, bias=c, out_dtype=torch.bfloat16
        )
    except (RuntimeError, NotImplementedError) as e:
        pytest.skip(f"not on this torch's CPU: {e}")
    ((op, args, kwargs),) = calls
    (gemm,) = kernels.translate(op, args, kwargs)
    assert gemm.api == "scaled_mm"
    assert (gemm.type_a, gemm.type_b, gemm.type_d) == ("float8e4m3", "float8e4m3", "bfloat16")
    assert (gemm.trans_a, gemm.trans_b) == ("T", "N")
    assert gemm.scale_mode == (3 if by_row else 0)
    assert gemm.fast_accum == 0
    assert kernels.translate(*kernels.arguments(kernels.signature(op, args, kwargs))) == (gemm,)
    check(gemm, x, w, result, c, beta=int(bias))


def test_scaled_mm_arguments_by_place_and_by_name():
    x = torch.zeros(16, 32).to(torch.float8_e5m2)
    w = torch.zeros(16, 32).to(torch.float8_e4m3fn).t()
    one = torch.ones(())
    by_name = {"scale_a": one, "scale_b": one, "out_dtype": torch.float32, "use_fast_accum": True}
    by_place = (x, w, one, one, None, None, torch.float32, True)
    (gemm,) = kernels.translate("_scaled_mm", (x, w), by_name)
    assert kernels.translate("_scaled_mm", by_place, {}) == (gemm,)
    assert (gemm.type_a, gemm.type_b, gemm.type_d) == ("float8e4m3", "float8e5m2", "float32")
    assert gemm.fast_accum == 1
    v2 = (x, w, [one], [0], [0], [one], [0], [0], None, torch.float32, [], True)
    assert kernels.translate("_scaled_mm_v2", v2, {}) == (gemm,)


def test_products_with_another_type_of_result():
    x, w, c = torch.ones(3, 4).half(), torch.ones(4, 5).half(), torch.ones(5).half()
    for op, args, kwargs in (
        ("mm", (x, w, torch.float32), {}),
        ("mm", (x, w), {"out_dtype": torch.float32}),
        ("bmm", (x[None], w[None], torch.float32), {}),
        ("addmm", (c, x, w, torch.float32), {}),
        ("baddbmm", (c, x[None], w[None], torch.float32), {}),
    ):
        (gemm,) = kernels.translate(op, args, kwargs)
        assert (gemm.type_a, gemm.type_b, gemm.type_d) == ("float16", "float16", "float32")
        assert (gemm.m, gemm.n, gemm.k, gemm.comp) == (5, 3, 4, "f32")


@pytest.mark.parametrize("kind", ["2d x 3d", "3d x 2d", "3d x 3d", "2d x 2d"])
def test_grouped_products_are_a_gemm_a_group(calls, kind):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no _grouped_mm")
    draw, kwargs = Draw(3), {"offs": torch.tensor([8, 24, 32], dtype=torch.int32)}
    groups = [(0, 8), (8, 24), (24, 32)]
    if kind == "2d x 3d":
        x = draw.values(32, 16, dtype=torch.bfloat16)
        w = draw.values(3, 8, 16, dtype=torch.bfloat16).mT
        pairs = [(x[a:b], w[i], (slice(a, b),)) for i, (a, b) in enumerate(groups)]
    elif kind == "3d x 2d":
        x = draw.values(3, 8, 16, dtype=torch.bfloat16)
        w = draw.values(32, 16, dtype=torch.bfloat16).t()
        pairs = [(x[i], w[:, a:b], (slice(None), slice(a, b))) for i, (a, b) in enumerate(groups)]
    elif kind == "3d x 3d":
        x = draw.values(3, 8, 16, dtype=torch.bfloat16)
        w = draw.values(3, 24, 16, dtype=torch.bfloat16).mT
        kwargs = {}
        pairs = [(x[i], w[i], (i,)) for i in range(3)]
    else:
        x = draw.values(16, 32, dtype=torch.bfloat16)
        w = draw.values(8, 32, dtype=torch.bfloat16).t()
        pairs = [(x[:, a:b], w[a:b], (i,)) for i, (a, b) in enumerate(groups)]
    result = torch._grouped_mm(x, w, **kwargs)
    ((op, args, kwargs),) = calls
    gemms = kernels.translate(op, args, kwargs)
    assert len(gemms) == 3
    for gemm, (part_x, part_w, where) in zip(gemms, pairs, strict=True):
        assert gemm.api == "grouped_mm"
        check(gemm, part_x, part_w, result[where].contiguous())
    assert (kernels.signature(op, args, kwargs) is None) == (kind != "3d x 3d")


def test_equal_signatures_mean_equal_gemms(calls):
    draw, known = Draw(11), {}
    for _ in range(300):
        n, k, m = (draw.random.choice((1, 2, 3)) for _ in range(3))
        x, w = draw.matrix(n, k, torch.float32), draw.matrix(k, m, torch.float32)
        c = draw.values(m, dtype=torch.float32)
        calls.clear()
        torch.mm(x, w)
        torch.addmm(c, x, w, beta=draw.random.choice((0, 1)))
        torch.mm(x, w, out=draw.matrix(n, m, torch.float32, writable=True))
        for call in calls:
            key = kernels.signature(*call)
            assert known.setdefault(key, kernels.translate(*call)) == kernels.translate(*call)
            assert kernels.translate(*kernels.arguments(key)) == kernels.translate(*call)
    assert len(known) < 900


WRONG = [
    lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
    lambda: torch.mm(torch.ones(3), torch.ones(3)),
    lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2).double()),
    lambda: torch.bmm(torch.ones(2, 3, 3), torch.ones(1, 3, 3)),
    lambda: torch.addmm(torch.ones(7), torch.ones(2, 3), torch.ones(3, 2)),
    lambda: torch.baddbmm(torch.ones(7), torch.ones(1, 2, 3), torch.ones(1, 3, 2)),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_torch_refuses_is_refused_in_the_same_words(override, wrong):
    with pytest.raises(RuntimeError) as native:
        wrong()

    def handle(op, native, args, kwargs):
        kernels.signature(op, args, kwargs)
        kernels.translate(op, args, kwargs)
        return native(*args, **kwargs)

    placed = override(handle)
    with pytest.raises(RuntimeError) as seen:
        wrong()
    assert str(seen.value) == str(native.value)
    assert placed.faults == 0


@pytest.mark.parametrize(
    ("op", "product"),
    [
        ("mm", lambda a: a.to_sparse_csr() @ a),
        ("addmm", lambda a: torch.sparse.mm(a.to_sparse(), a)),
        ("mm", lambda a: a.long() @ a.long()),
        ("mm", lambda a: a.cfloat() @ a.cfloat()),
        ("addmv", lambda a: a @ a[0]),
        ("dot", lambda a: a[0] @ a[1]),
        ("_int_mm", lambda a: torch._int_mm(a.to(torch.int8), a.to(torch.int8))),
        ("_addmm_activation", lambda a: torch._addmm_activation(a[0], a, a)),
        ("convolution", lambda a: nn.functional.conv1d(a[None], a[:, :, None])),
        ("mkldnn_rnn_layer", lambda a: nn.LSTM(32, 32)(a[None])),
        ("mkldnn_linear", lambda a: nn.functional.linear(a.to_mkldnn(), a.to_mkldnn())),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            lambda a: nn.functional.scaled_dot_product_attention(*[a[None, None]] * 3),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_products_that_no_gemm_spells_are_named(calls, op, product):
    if op.startswith("mkldnn") and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    product(torch.ones(32, 32))
    assert op in [name for name, _, _ in calls]
    for name, args, kwargs in calls:
        kernels.signature(name, args, kwargs)
        if name == op:
            assert kernels.translate(name, args, kwargs) == ()


@pytest.mark.parametrize(
    ("flops", "product"),
    [
        (2 * 2 * 3 * 4 * 5, lambda r: torch.addbmm(r(3, 5), r(2, 3, 4), r(2, 4, 5))),
        (2 * 2 * 3 * 4 * 5, lambda r: torch.einsum("bij,bjk->bik", r(2, 3, 4), r(2, 4, 5))),
        (2 * 2 * 3 * 4 * 5, lambda r: r(2, 3, 4) @ r(4, 5)),
        (2 * 3 * 4 * 5, lambda r: torch.tensordot(r(3, 4), r(4, 5), 1)),
        (2 * 4 * 5, lambda r: r(4) @ r(4, 5)),
        (2 * 2 * 3 * 4 * 3 * 2, lambda r: attention_by_mathematics(*[r(1, 2, 3, 4)] * 3)),
    ],
)
def test_products_made_of_gemms_are_seen_in_full(calls, flops, product):
    product(torch.randn)
    found = [g for call in calls for g in kernels.translate(*call)]
    assert sum(g.flops for g in found) == flops


def attention_by_mathematics(*qkv):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(*qkv)


# What the job sees of an override: nothing.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i % 2 == 0) for i in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y = torch.baddbmm(x, x, x.mT @ x)
        return torch.einsum("bij,bjk->bik", y, x.mT)


def gradients(net, **kwargs):
    net.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, **kwargs):
        y = net(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


def passing(op, native, args, kwargs):
    return native(*args, **kwargs)


@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_the_same_bits(override, autocast):
    net = Net()
    before = gradients(net, enabled=autocast)
    placed = override(passing, others=True)
    during = gradients(net, enabled=autocast)
    placed.remove()
    for plain, seen, after in zip(before, during, gradients(net, enabled=autocast), strict=True):
        assert torch.equal(plain, seen)
        assert torch.equal(plain, after)


def test_a_result_of_the_handlers_own_is_differentiated_as_the_products(override):
    net = Net()
    before = gradients(net, enabled=False)

    def other_way(op, native, args, kwargs):
        call = kernels.unpack(op, args, kwargs)
        if call.c is None and call.out is None:
            return (call.w.mT @ call.x.mT).mT
        return native(*args, **kwargs)

    override(other_way)
    for plain, seen in zip(before, gradients(net, enabled=False), strict=True):
        torch.testing.assert_close(plain, seen, rtol=1e-5, atol=1e-4)


def test_in_place_and_out_forms_write_where_they_should(override):
    outs = []

    def handle(op, native, args, kwargs):
        outs.append(kwargs.get("out"))
        return native(*args, **kwargs)

    a, c, out = torch.ones(4, 4), torch.zeros(4, 4), torch.empty(4, 4)
    view, batch = torch.zeros(8, 8)[::2, ::2], torch.zeros(2, 4, 4)
    override(handle)
    assert torch.mm(a, a, out=out) is out
    assert c.addmm_(a, a) is c
    view.addmm_(a, a, alpha=2)
    batch.baddbmm_(a.expand(2, 4, 4), a.expand(2, 4, 4), beta=0)
    assert [o.data_ptr() for o in outs] == [t.data_ptr() for t in (out, c, view, batch)]
    for t, value in ((out, 4), (c, 4), (view, 8), (batch, 4)):
        assert bool((t == value).all())


def test_in_place_forms_still_stop_a_stale_gradient(override):
    override(passing)
    x = torch.ones(2, 2, requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    y.addmm_(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_what_the_handler_calls_is_its_own(override):
    seen = []

    def handle(op, native, args, kwargs):
        seen.append(op)
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
        return native(*args, **kwargs)

    override(handle)
    for _ in range(2):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert seen == ["mm", "mm"]


def test_every_thread_is_seen_and_none_hides_anothers_calls(override):
    seen, inside = [], threading.Barrier(4, timeout=20)

    def handle(op, native, args, kwargs):
        inside.wait()  # all four are within a handler at once
        seen.append(threading.get_ident())
        return native(*args, **kwargs)

    override(handle)
    a = torch.ones(2, 2)
    threads = [threading.Thread(target=torch.mm, args=(a, a)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(seen)) == 4


def test_a_handler_that_raises_leaves_the_call_as_it_was(override, capsys):
    def handle(op, native, args, kwargs):
        raise KeyError("mine")

    placed = override(handle)
    a = torch.eye(2)
    for _ in range(3):
        assert torch.equal(torch.mm(a, a), a)
    assert placed.faults == 3
    assert capsys.readouterr().err == (
        "gemmtune: handling mm: KeyError: 'mine': the job goes on as it is\n"
    )


def test_remove_gives_back_torchs_kernels_and_may_be_repeated():
    names = ("aten::mm", "aten::addmm_", "aten::bmm.out", "aten::convolution")

    def registered():
        return [torch._C._dispatch_dump(name) for name in names]

    before = registered()
    placed = kernels.Override(passing, others=True)
    assert all(a != b for a, b in zip(registered(), before, strict=True))
    placed.remove()
    placed.remove()
    assert registered() == before


def test_a_torch_that_hands_out_no_kernels_is_overridden_above_them(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel", raising=False)
    seen = []

    def handle(op, native, args, kwargs):
        seen.append(op)
        return native(*args, **kwargs)

    placed = kernels.Override(handle)
    try:
        a = torch.randn(3, 3)
        c = a.clone()
        assert torch.equal(torch.mm(a, a), c.addmm_(a, a, beta=0))
        with torch._subclasses.fake_tensor.FakeTensorMode():
            torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    finally:
        placed.remove()
    assert seen == ["mm", "addmm"]


def test_fake_and_meta_tensors_run_no_kernel(calls):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert (torch.ones(2, 3) @ torch.ones(3, 4)).shape == (2, 4)
    assert (torch.ones(2, 3, device="meta") @ torch.ones(3, 4, device="meta")).shape == (2, 4)
    assert calls == []


def test_transforms_modes_and_subclasses_see_the_same(calls):
    a, b = torch.randn(4, 3, 5), torch.randn(5, 2)
    expected = a @ b
    calls.clear()
    with torch.inference_mode():
        assert torch.equal(torch.mm(a[0], b), expected[0])
    assert torch.allclose(torch.vmap(torch.mm, (0, None))(a, b), expected)
    gradient = torch.func.grad(lambda w: torch.mm(a[0], w).sum())(b)
    assert torch.allclose(gradient, a[0].sum(0)[:, None].expand(5, 2))
    _, tangent = torch.func.jvp(lambda w: torch.mm(a[0], w), (b,), (b,))
    assert torch.allclose(tangent, expected[0])
    assert torch.allclose(Wrapped(a[0]).mm(b).held, expected[0])
    assert len(calls) == 8  # of which the gradient runs two and the jvp three
    assert all(type(t) is torch.Tensor for _, args, _ in calls for t in args)


class Wrapped(torch.Tensor):
    """A tensor that holds another, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.held = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(getattr(a, "held", a) for a in args), **(kwargs or {})))


def test_local_shapes_under_dtensor(calls):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        from torch.distributed.tensor import DTensor, Shard
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import DTensor, Shard

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.ones(3, 8), mesh, [Shard(1)])
        w = DTensor.from_local(torch.ones(8, 5), mesh, [Shard(0)])
        calls.clear()
        assert torch.mm(x, w).shape == (3, 5)
    finally:
        dist.destroy_process_group()
    (gemm,) = [g for call in calls for g in kernels.translate(*call)]
    assert (gemm.m, gemm.n, gemm.k) == (5, 3, 8)


def test_a_compiled_function_stays_compiled_and_its_products_are_seen(calls):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    @torch.compile
    def products(x, w):
        return torch.mm(torch.mm(x, w), w)

    x, w = torch.randn(6, 8), torch.randn(8, 8, requires_grad=True)
    expected = x @ w @ w
    calls.clear()
    seen = []
    for _ in range(3):
        products(x, w).sum().backward()
        seen.append(sum(g.flops for call in calls for g in kernels.translate(*call)))
        calls.clear()
    assert torch.allclose(products(x, w), expected, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert seen == [5 * 2 * 6 * 8 * 8] * 3


def test_packed_weights_of_a_frozen_graph_are_named(calls):
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch is built without MKL")
    from torch._inductor import config

    torch._dynamo.reset()
    model = torch.compile(nn.Linear(32, 32, bias=False))
    with config.patch(freezing=True), torch.no_grad():
        model(torch.ones(8, 32))
        calls.clear()
        model(torch.ones(8, 32))
    ((op, args, kwargs),) = calls
    assert op == "mkl::_mkl_linear"
    assert kernels.translate(op, args, kwargs) == ()


def test_a_sparse_operand_has_no_signature_of_a_dense_one() -> None:
    dense = torch.eye(4)
    for sparse in (dense.to_sparse_coo(), dense.to_sparse_csr()):
        assert kernels.signature("mm", (sparse, dense), {}) is None
        assert kernels.signature("addmm", (dense, sparse, dense), {"beta": 1}) is None
