"""What hipBLASLt has otherwise: lists of all, ranks, FNUZ, its C++ interface. Over the stand-in."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from fake_lt import FLAGS, HERE, LIBRARIES, FakeHip, build
from test_lt import GEMMS, gemm

from gemmtune import machine
from gemmtune.backends import base, hipblaslt_ext
from gemmtune.backends.hipblaslt import HIPBLASLT, HipblasLt
from gemmtune.errors import BackendError
from gemmtune.sweep import operands

GFX942 = machine.Gpu("AMD", "AMD Instinct MI300X", "gfx942")
GFX950 = machine.Gpu("AMD", "AMD Instinct MI355X", "gfx950")


@pytest.fixture(scope="module")
def library() -> Path:
    return build("hipblaslt")


@pytest.fixture
def backend(library) -> FakeHip:
    return FakeHip(library)


@pytest.mark.parametrize(("gpu", "number"), [(GFX942, 904), (GFX950, 905)])
def test_the_device_number_is_transformer_engines(monkeypatch, gpu, number):
    monkeypatch.setattr(machine, "gpus", lambda: [gpu])
    assert HipblasLt().dev_cap() == number
    monkeypatch.setitem(base.PREFERRED, "AMD", ("hipblaslt",))
    assert base.detect() == "hipblaslt"


def test_thousands_are_asked_for_and_all_are_listed(backend):
    algos = backend.algos(gemm(pad=8))
    assert len(algos) > 30 and not any(backend.unlisted(gemm(pad=8), a) for a in algos)
    assert [a.aidx for a in algos] == list(range(len(algos)))
    # As Transformer Engine reads it: the first 8 bytes of the structure.
    problem = backend._problems[gemm(pad=8)]
    first = [int.from_bytes(bytes(algo)[:8], "little") for algo, _ in problem.heuristic()]
    assert [a.algo_id for a in algos] == first
    # A rank holds for whoever asks for one more than it, as Transformer Engine does.
    for algo in (algos[0], algos[7], algos[-1]):
        asked = problem.heuristic(algo.aidx + 1)
        assert problem.settings(asked[algo.aidx][0])["id"] == algo.algo_id


def test_a_launch_is_held_to_the_workspace_that_the_algorithm_was_listed_for(backend):
    small, large = gemm(ws_bytes=1 << 16), gemm(ws_bytes=1 << 20)
    known = backend.algos(large)[0]
    with pytest.raises(BackendError, match="does not list"):
        backend.launcher(small, known)


def test_fp8_is_fnuz_on_gfx942_and_ocp_on_gfx950(library, monkeypatch):
    g = GEMMS["FP8"]
    monkeypatch.setenv("FAKE_HIP_ARCH", "gfx942")
    with pytest.raises(BackendError, match="has no algorithm"):
        FakeHip(library).algos(g)  # no GPU seen: OCP
    monkeypatch.setattr(machine, "gpus", lambda: [GFX942])
    backend = FakeHip(library)
    o = operands.draw(g, 0)
    x, w = (t.float().to(torch.float8_e4m3fnuz) for t in (o.x, o.w))
    x = x.as_strided(o.x.shape, o.x.stride())
    w = torch.empty_like(w).as_strided(o.w.shape, o.w.stride()).copy_(w)
    backend.launcher(g, backend.algos(g)[0])(o._replace(x=x, w=w))
    expected = x.double() @ w.double() * o.scale_x.double() * o.scale_w.double()
    assert torch.allclose(o.d.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda c: c.hipblasLtMatmulDescSetAttribute(None, 0, b"1234", 4), 1),
        (lambda c: c.hipblasLtMatrixLayoutSetAttribute(None, 0, b"1234", 4), 1),
        (lambda c: c.hipblasLtMatmulAlgoGetHeuristic(*[None] * 7, 1, None, None), 1),
        (lambda c: c.hipblasLtMatmul(*[None] * 16), 1),
        (lambda c: c.hipblasLtGetVersion(None, None), 1),
        (lambda c: c.hipblasLtMatmulPreferenceSetAttribute(None, 1, b"12345678", 8), 3),
        (lambda c: c.hipblasLtMatmulDescCreate(ctypes.byref(ctypes.c_void_p()), 68, 0), 3),
        (lambda c: c.hipblasLtMatrixLayoutDestroy(None), 3),
    ],
)
def test_the_stand_in_answers_null_pointers_as_the_library_does(library, call, status):
    assert call(ctypes.CDLL(str(library))) == status


def test_a_layout_tells_its_batch_and_nothing_else(backend):
    backend.algos(gemm())
    problem = backend._problems[gemm()]
    get = ctypes.CDLL(str(backend.path)).hipblasLtMatrixLayoutGetAttribute
    to, written = ctypes.create_string_buffer(8), ctypes.c_size_t()
    told = [get(problem._a.value, at, to, 8, ctypes.byref(written)) for at in range(7)]
    assert told == [0, 0, 3, 3, 3, 3, 3]


# ------------------------------------------------------------------------- the C++ interface


@pytest.fixture
def old(monkeypatch, tmp_path) -> FakeHip:
    """A build whose C API does not list everything, with ROCm's headers beside it."""
    monkeypatch.setenv("FAKE_HIP_OLD", "1")
    monkeypatch.setenv("ROCM_PATH", str(HERE / "fake_rocm"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if hipblaslt_ext.missing():
        pytest.skip(hipblaslt_ext.missing())
    words, made = hipblaslt_ext.compiler(), tmp_path / LIBRARIES["hipblaslt"]
    inner = tmp_path / "fake_hipblaslt.o"
    source = HERE / "fake_hipblaslt.c"
    subprocess.run(["cc", "-std=c11", *FLAGS[:-2], "-fPIC", "-c", source, "-o", inner], check=True)
    include, face = HERE / "fake_rocm/include", HERE / "fake_rocm/hipblaslt-ext.cpp"
    named = f"-Wl,-soname,{made.name}"
    subprocess.run(
        [*words, *FLAGS, "-D__HIP_PLATFORM_AMD__", f"-I{include}", face, inner, named, "-o", made],
        check=True,
    )
    return FakeHip(made)


def test_what_the_list_leaves_out_is_found_by_the_cpp_interface(old, library, monkeypatch):
    g = gemm()
    algos = old.algos(g)
    beyond = [a for a in algos if old.unlisted(g, a)]
    listed = len(algos) - len(beyond)
    assert listed == 12 and len(beyond) > 20
    assert [a.aidx for a in algos] == list(range(len(algos)))
    o = operands.draw(g, 0)
    for algo in beyond:
        assert old.workspace_bytes(g, algo) <= HIPBLASLT.workspace_bytes
        o.d.fill_(float("nan"))
        old.launcher(g, algo)(o)
        assert torch.allclose(o.d.float(), (o.x @ o.w).float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(BackendError):
        old.launcher(GEMMS["odd leading dimensions"], beyond[0])
    monkeypatch.delenv("FAKE_HIP_OLD")
    filled_up = FakeHip(library, explored=0)
    assert [a.algo_id for a in algos] == [a.algo_id for a in filled_up.algos(g)]
    assert not any(filled_up.unlisted(g, a) for a in filled_up.algos(g))


def test_a_library_without_that_cpp_interface_is_said(old, library):
    with pytest.raises(BackendError, match=r"not that of ROCm's headers .*undefined symbol"):
        FakeHip(library).algos(gemm())


def test_without_rocms_headers_the_list_alone_is_used(old, monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert hipblaslt_ext.missing().startswith("no ROCm headers (hipblaslt/hipblaslt-ext.hpp)")
    assert len(old.algos(gemm())) == 12


def test_a_helper_that_the_compiler_refuses_is_said(old, monkeypatch, tmp_path):
    headers = tmp_path / "rocm/include" / hipblaslt_ext.HEADER
    headers.parent.mkdir(parents=True)
    headers.write_text("#error of another ROCm\n")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    with pytest.raises(BackendError, match=r"cannot build hipblaslt_ext.cpp: .*of another ROCm"):
        old.algos(gemm())
