"""cuBLAS's own call as a default: over its stand-in, which is strict about what it is handed."""

from __future__ import annotations

import ctypes

import pytest
import torch
from fake_lt import FakeLt
from fakes import fakes

from gemmtune.backends.blas import PLAIN
from gemmtune.errors import BackendError
from gemmtune.gemm import Gemm
from gemmtune.sweep import operands

M, N, K = 24, 16, 40


class Fake(FakeLt):
    def _open_blas(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.path.with_name("libcublas.so.13")))

    def _workspace(self, size: int) -> torch.Tensor:
        """Aligned as cuBLAS asks for, and as CUDA's memory is."""
        space = torch.empty(size + 256, dtype=torch.uint8)
        return space[-space.data_ptr() % 256 :][:size]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(fakes("cublaslt", tmp_path_factory.mktemp("fakes")) / "libcublasLt.so.13")


def gemm(ops: str = "TN", batch: int = 1, pad: int = 0, kind: str = "float32", **more) -> Gemm:
    """Leading dimensions are `pad` more than they need be, strides as many columns."""
    rows = (M, K) if ops[0] == "N" else (K, M), (K, N) if ops[1] == "N" else (N, K), (M, N)
    lds = [r + pad for r, _ in rows]
    strides = [ld * c if batch > 1 else 0 for ld, (_, c) in zip(lds, rows, strict=True)]
    own = {"api": "gemmstridedbatchedex" if batch > 1 else "gemmex", "ws_bytes": 4096, **more}
    names = ("stride_a", "stride_b", "stride_d")
    own |= {"batch": batch, "align": 16, **dict(zip(names, strides, strict=True))}
    return Gemm(M, N, K, *ops, kind, kind, kind, "-", *lds, **own)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("ops", ["TN", "NN", "NT", "TT"])
@pytest.mark.parametrize(("batch", "pad"), [(1, 0), (1, 8), (3, 0), (3, 8)])
def test_the_plain_call_computes_the_gemm(backend, ops, batch, pad, kind) -> None:
    g = gemm(ops, batch, pad, kind)
    assert backend.algos(g)[0] == PLAIN and backend.workspace_bytes(g, PLAIN) == 0
    o = operands.draw(g, 0)
    o.d.fill_(float("nan"))
    backend.launcher(g, PLAIN)(o)
    want = o.x.double() @ o.w.double()
    torch.testing.assert_close(o.d.double(), want, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("size", [4096, 0])
def test_the_workspace_is_that_of_the_jobs_call_at_every_launch(backend, size) -> None:
    g = gemm(ws_bytes=size)
    launch = backend.launcher(g, PLAIN)
    for seed in range(2):
        launch(operands.draw(g, seed))
        assert backend._open_blas().fake_workspace() == size  # a new stream takes it away


def test_it_is_no_default_of_newer_calls_and_of_those_that_accumulate(backend) -> None:
    for g in (gemm(api="lt"), gemm(beta=1), gemm(api="mm")):
        assert PLAIN not in backend.algos(g)


def test_a_status_is_told_by_the_function_and_its_name(backend, monkeypatch) -> None:
    unaligned = torch.empty(4097 + 256, dtype=torch.uint8)
    odd = unaligned[1 - unaligned.data_ptr() % 256 :]
    monkeypatch.setattr(Fake, "_workspace", lambda self, size: odd)
    with pytest.raises(BackendError, match=r"^cublasSetWorkspace_v2: CUBLAS_STATUS_INVALID_VALUE"):
        backend.launcher(gemm(), PLAIN)(operands.draw(gemm(), 0))


def test_the_build_without_a_function_is_said(backend, monkeypatch) -> None:
    monkeypatch.setattr(Fake, "_open_blas", lambda self: ctypes.CDLL(str(self.path)))
    with pytest.raises(BackendError, match=r"this build of cuBLAS has no cublasCreate_v2"):
        backend.launcher(gemm(), PLAIN)
