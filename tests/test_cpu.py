"""Every configuration of the CPU backend against float64: types, layouts, batches, epilogues."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.backends import base, cpu, openblas
from gemmtune.errors import BackendError
from gemmtune.gemm import Gemm
from gemmtune.sweep import operands
from gemmtune.sweep.verify import launch_clean

TYPES = ("float64", "float32", "bfloat16", "float16")
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
# Numbers that tables in the field carry.
NUMBERS = (
    *("aten", "onednn", "native", "transposed", "copy-x", "copy-w", "openblas", "split-k2"),
    *("split-k4", "split-k8", "split-n2", "split-n4", "split-m2", "split-m4", "mv", "bmm"),
    *("loop", "fold", "upcast"),
)


def gemm(
    m: int, n: int, k: int, kind: str = "float32", layout: str = "NN", *, pad: int = 0, **more
) -> Gemm:
    lda = (k if layout[0] == "T" else m) + pad
    ldb = (n if layout[1] == "T" else k) + pad
    bias = kind if more.get("epi") == "bias" else "-"
    comp = "f64" if kind == "float64" else "f32"
    lds = max(lda, 1), max(ldb, 1), max(m, 1) + pad
    return Gemm(m, n, k, *layout, kind, kind, kind, bias, *lds, comp=comp, **more)


def batched(batch: int, shared: bool, *args, **more) -> Gemm:
    g = gemm(*args, api="baddbmm" if more.get("beta") else "bmm", **more)
    rows_a = g.m if g.trans_a == "T" else g.k
    rows_b = g.k if g.trans_b == "T" else g.n
    return g._replace(
        batch=batch,
        stride_a=0 if shared else rows_a * g.lda,
        stride_b=rows_b * g.ldb,
        stride_d=g.n * g.ldd,
    )


def expected(o: base.Operands) -> torch.Tensor:
    value = o.x.double() @ o.w.double()
    for addend in (o.c, o.bias):
        value = value if addend is None else value + addend.double()
    return value


def check(g: Gemm) -> set[str]:
    """Launch all that the Gemm has, over NaN; returns the configurations."""
    backend = cpu.Cpu("any")
    assert backend.unsupported(g) is None
    algos = backend.algos(g)
    assert algos[0].config == cpu.DEFAULT
    o = operands.draw(g, seed=1)
    inputs = [t for t in o if t is not None and t is not o.d]
    before = [t.clone() for t in inputs]
    close = TOLERANCE[g.type_d]
    for algo in algos:
        assert launch_clean(g, backend.launcher(g, algo), o) == "", algo
        torch.testing.assert_close(o.d.double(), expected(o), rtol=close, atol=close, msg=str(algo))
    assert all(map(torch.equal, inputs, before))
    return {a.config for a in algos}


def test_the_numbers_of_configurations_are_those_of_published_tables():
    assert tuple(cpu.IDS) == NUMBERS
    assert list(cpu.IDS.values()) == list(range(len(NUMBERS)))


def test_every_configuration_is_offered_somewhere_and_right():
    seen = set()
    for kind in TYPES:
        for layout in ("TN", "NN", "NT", "TT"):
            seen |= check(gemm(64, 96, 128, kind, layout))
        seen |= check(gemm(64, 1, 32, kind, "TN")) | check(gemm(1, 64, 32, kind, "NT"))
        seen |= check(batched(3, True, 24, 16, 32, kind, "TN"))
        seen |= check(batched(3, False, 24, 16, 32, kind, "NT"))
    # On a CPU on which oneDNN has no 16-bit products, going without it is no alternative.
    without = set() if cpu._has_onednn("bfloat16") or cpu._has_onednn("float16") else {"native"}
    assert seen == set(cpu.IDS) - without


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("more", [{"beta": 1, "api": "addmm"}, {"epi": "bias", "api": "addmm"}])
def test_addends(kind, more):
    for layout, pad in (("TN", 0), ("NN", 3), ("NT", 3)):
        check(gemm(64, 64, 64, kind, layout, pad=pad, **more))
    check(gemm(48, 1, 32, kind, "TN", **more))
    if "beta" in more:
        check(batched(4, False, 17, 5, 9, kind, "NT", pad=2, beta=1))
        check(batched(4, True, 17, 5, 9, kind, "NN", beta=1))


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(*[st.integers(0, 40)] * 3),
    kind=st.sampled_from(TYPES),
    layout=st.sampled_from(("NN", "NT", "TN", "TT")),
    pad=st.integers(0, 5),
    addend=st.sampled_from(({}, {"beta": 1}, {"epi": "bias"})),
    batch=st.integers(0, 3),
)
def test_odd_and_empty_sizes(*, size, kind, layout, pad, addend, batch):
    """Sizes of 0 and 1, odd ones, leading dimensions above the matrix, with and without batch."""
    if not batch or "epi" in addend:
        api = {"api": "addmm"} if addend else {}
        check(gemm(*size, kind, layout, pad=pad, **addend, **api))
    else:
        g = batched(batch, False, *size, kind, layout, pad=pad, **addend)
        check(g if batch > 1 else g._replace(stride_a=0, stride_b=0, stride_d=0))


@pytest.mark.parametrize("config", NUMBERS)
def test_run_in_a_job_takes_any_factors_and_addends(config):
    """As apply calls it: alpha and beta, c that is d, c and bias that broadcast."""
    shape = (2, 32, 64, 48) if config in ("loop", "fold") else (32, 64, 48)
    *lead, n, k, m = shape
    if config == "mv":
        n = 1
    x = torch.randn(*lead, n, k, dtype=torch.float32)
    w = torch.randn(k, m).expand(*lead, k, m)
    d = torch.empty(*lead, n, m)
    c = torch.randn(*lead, n, m)
    exact = x.double() @ w.double()
    row, column = torch.randn(m), torch.randn(n, 1)
    close = {"rtol": 1e-4, "atol": 1e-4}
    cpu.run(config, x, w, d)
    torch.testing.assert_close(d.double(), exact, **close)
    cpu.run(config, x, w, d, c, 0.5, 2.0, row)
    torch.testing.assert_close(d.double(), 0.5 * exact + 2 * c.double() + row, **close)
    for part in (row, column):
        cpu.run(config, x, w, d, part, 2.0, -1.0)
        torch.testing.assert_close(d.double(), 2 * exact - part.double(), **close)
    both = c.clone()
    cpu.run(config, x, w, both, both)
    torch.testing.assert_close(both.double(), exact + c.double(), **close)
    cpu.run(config, x, w, d, torch.full_like(c, torch.nan), 3.0, 0.0)
    torch.testing.assert_close(d.double(), 3 * exact, **close)


def test_run_says_what_does_not_fit():
    x, w, d = torch.ones(4, 6), torch.ones(6, 4), torch.empty(4, 4)
    with pytest.raises(BackendError, match="split-k4 does not fit"):
        cpu.run("split-k4", x, w, d)
    with pytest.raises(BackendError, match="no configuration 'cublas'"):
        cpu.run("cublas", x, w, d)


def test_openblas_has_the_threads_of_torch_and_leaves_the_jobs_numpy_its_own(monkeypatch):
    library = openblas.find()
    if library is None:
        pytest.skip("numpy does not use OpenBLAS here")
    x, before, own = torch.ones(64, 64), torch.get_num_threads(), library._get()
    had = []
    array = openblas.array
    monkeypatch.setattr(openblas, "array", lambda t: had.append(library._get()) or array(t))
    try:
        library._set(2)
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            cpu.run("openblas", x, x, torch.empty(64, 64))
            assert set(had) == {threads}
            assert library._get() == 2
            had.clear()
    finally:
        torch.set_num_threads(before)
        library._set(own)


@pytest.mark.parametrize(
    ("config", "kind"), [("openblas", torch.bfloat16), ("split-k2", torch.float16), ("mv", None)]
)
def test_a_configuration_that_would_be_wrong_for_the_call_refuses_it(config, kind):
    x = torch.ones(32, 32, dtype=kind)
    with pytest.raises(BackendError):
        cpu.run(config, x, x, torch.empty_like(x))


def test_onednn_stays_on_after_it_was_off_for_a_call():
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    cpu.run("native", x, x, torch.empty_like(x))
    with pytest.raises(BackendError):
        cpu.run("native", x, x[:3], torch.empty_like(x))
    assert torch._C._get_mkldnn_enabled()


def test_a_wider_type_is_used_only_when_asked_for():
    g = gemm(64, 64, 64, "bfloat16", "TN")
    assert "upcast" not in {a.config for a in base.get("cpu").algos(g)}
    assert "upcast" in {a.config for a in cpu.Cpu("any").algos(g)}
    assert not {a.config for a in cpu.Cpu().algos(g)} & {"split-k2", "split-k4", "openblas"}


def test_fp8_has_the_default_alone():
    types = ("float8e4m3", "float8e5m2", "bfloat16")
    g = Gemm(48, 32, 64, "T", "N", *types, "-", 64, 64, 48, api="scaled_mm")
    backend = cpu.Cpu()
    if reason := backend.unsupported(g):
        assert "FP8" in reason
        return
    assert [a.config for a in backend.algos(g)] == ["aten"]
    o = operands.draw(g, 0)
    backend.launcher(g, backend.algos(g)[0])(o)
    scale = o.scale_x.double() * o.scale_w.double()
    exact = o.x.float().double() @ o.w.float().double() * scale
    torch.testing.assert_close(o.d.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"api": "grouped_mm"}, "grouped_mm"),
        ({"epi": "dgelu"}, "epilogue dgelu"),
        ({"type_a": "bfloat16"}, "mixed types"),
        ({"bias_type": "bfloat16", "epi": "bias"}, "bfloat16 bias"),
        ({"batch": 2}, "overlap"),
        ({"ldd": 7}, "overlap"),
        ({"type_a": "float8e4m3", "type_b": "float8e4m3", "scale_mode": 3}, "FP8"),
    ],
)
def test_what_a_cpu_cannot_run_is_said(change, words):
    assert words in cpu.Cpu().unsupported(gemm(16, 16, 16)._replace(**change))


def test_the_library_names_every_build_that_algorithms_come_from():
    library = cpu.Cpu().library()
    assert torch.__version__ in library and "oneDNN" in library and "numpy" in library
    assert cpu.Cpu().dev_cap() == 0


@pytest.mark.parametrize("config", [name for name in cpu.IDS if name != cpu.DEFAULT])
def test_a_jobs_storage_can_still_be_resized_after_a_launch(config: str) -> None:
    """FSDP frees and refills its parameters' storage at every step."""
    x, w, d = torch.randn(64, 64), torch.randn(64, 64), torch.empty(64, 64)
    try:
        cpu.run(config, x, w, d)
    except BackendError:
        pytest.skip("does not fit this GEMM")
    for t in (x, w, d):
        assert t.untyped_storage().resizable()
