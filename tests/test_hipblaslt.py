"""What hipBLASLt has otherwise: lists of all, ranks, FNUZ, its C++ interface. Over the stand-in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from fake_lt import FLAGS, HERE, LIBRARIES, FakeHip, build
from test_lt import GEMMS, gemm

from gemmtune import machine, table
from gemmtune.backends import base, hipblaslt_ext
from gemmtune.backends.hipblaslt import HIPBLASLT, HipblasLt
from gemmtune.dialects import te
from gemmtune.dialects.convert import te_of
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo
from gemmtune.interposer.build import cxx
from gemmtune.sweep import operands, run, worker
from gemmtune.sweep.plan import Options
from gemmtune.table import Shape, Table

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
    # The workers' server outlives the test, with the environment that it was started in.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "fake_lt"])
    with worker._undisturbed():
        forkserver.ensure_running()
    monkeypatch.setenv("FAKE_HIP_OLD", "1")
    monkeypatch.setenv("ROCM_PATH", str(HERE / "fake_rocm"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if hipblaslt_ext.missing():
        pytest.skip(hipblaslt_ext.missing())
    words, made = cxx(), tmp_path / LIBRARIES["hipblaslt"]
    inner = tmp_path / "fake_hipblaslt.o"
    source = HERE / "fake_hipblaslt.c"
    subprocess.run(["cc", "-std=c11", *FLAGS[:-2], "-fPIC", "-c", source, "-o", inner], check=True)
    include, face = HERE / "fake_rocm/include", HERE / "fake_rocm/hipblaslt-ext.cpp"
    named = f"-Wl,-soname,libhipblaslt-{tmp_path.name}.so"  # the linker knows one of each name
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


def test_a_winner_beyond_the_list_is_marked_and_in_the_table_only_where_te_takes_ids(
    old, tmp_path, monkeypatch
):
    us = {1000 + 17 * i: 900 for i in range(40)} | {1000 + 17 * 20: 300, 1017: 600}
    names = ("FAKE_HIP_OLD", "ROCM_PATH", "XDG_CACHE_HOME")
    monkeypatch.setenv("FAKE_LT_US", ",".join(f"{index}:{held}" for index, held in us.items()))
    backend = FakeHip(old.path, env={n: os.environ[n] for n in (*names, "FAKE_LT_US")})
    shapes = Table([Shape(gemm(m=16, n=16, k=32, api="mm"))], {"device": "cpu"})
    candidates, tuned = tmp_path / "candidates.csv", tmp_path / "tuned.csv"
    run.sweep(shapes, backend, candidates, tuned, Options(seconds_per_shape=0.5))

    def won() -> tuple[int, int, int]:
        (row,) = table.read(tuned, table.Tuned).rows
        return row.algo.algo_id, row.algo.aidx, row.ws_min

    assert won() == (1017, 2, 0)  # no need of workspace, so its rank of 1 and one more
    rows = {row.algo.algo_id: row for row in table.read(candidates, table.Candidate).rows}
    assert "--te-direct" in rows[1340].reason and rows[1340].status == "finalist"
    assert rows[1340].ratio > rows[1017].ratio and rows[1017].status == "winner"
    run.reanalyse(candidates, tuned, 0.005, te_direct=True)
    assert won()[0] == 1340
    row = te.line_of(te_of(table.read(tuned, table.Tuned).rows[0]._replace(gemm=gemm())), "te-v1")
    assert row.row.algo_id == 1340 and row.row.aidx >= 0


@pytest.mark.parametrize(
    ("need", "rank", "row"), [(0, 0, (0, 1)), (0, 7, (0, 8)), (64, 7, (0, 7)), (1, 0, (0, 0))]
)
def test_a_row_says_one_thing_that_transformer_engine_has_to_put_right(need, rank, row):
    made = te.te_row(table.Tuned(904, gemm(), need, table.WS_MAX, Algo(5, rank, "id=5")))
    assert (made.ws_min, made.algo.aidx) == row
    # TE stores what it looked up where the need or the place in the list is another than the row's;
    # its search starts at aidx, or at 0 where the list is shorter (rocm_gemm.cu).
    listed = [0] * rank + [5]
    start = made.algo.aidx if made.algo.aidx < len(listed) else 0
    found = next(
        i % len(listed) for i in range(start, start + len(listed)) if listed[i % len(listed)]
    )
    assert found == rank and (need, found) != (made.ws_min, made.algo.aidx)


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
