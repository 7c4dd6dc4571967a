"""What cuBLASLt alone has: algorithms with settings, to explore. Over the stand-in."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from fake_lt import FakeLt, build
from test_lt import gemm

from gemmtune.backends import lt
from gemmtune.backends.cublaslt import CUBLASLT
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture
def backend(library) -> FakeLt:
    return FakeLt(library)


def test_the_default_is_the_librarys_first_choice_then_its_list_then_what_was_explored(backend):
    algos = backend.algos(gemm())
    listed = [a.config for a in algos[:8]]
    assert listed[0] == (
        "id=67 tile=20 stages=0 splitk=1 reduction=0 swizzle=0 custom=0 inner=0 cluster=0"
    )
    assert [a.algo_id for a in algos[:8]] == [67, 67, 66, 66, 66, 66, 20, 20]
    assert len(algos) == 8 + lt.EXPLORED
    assert len({a.config for a in algos}) == len(algos)
    assert [a.aidx for a in algos] == list(range(len(algos)))


def test_the_same_seed_explores_the_same_configurations(library, backend):
    g = gemm()
    assert backend.algos(g) == FakeLt(library).algos(g)
    other = FakeLt(library, seed=1).algos(g)
    assert other != backend.algos(g) and other[:8] == backend.algos(g)[:8]


def test_exploring_leaves_out_sums_in_16_bits_unless_asked(library, backend):
    def reductions(numerics: str) -> set[int]:
        algos = FakeLt(library, numerics=numerics).algos(gemm())
        return {lt.parse(a.config)["reduction"] for a in algos}

    assert reductions("type") == {0, 2}
    assert reductions("any") == {0, 1, 2, 4}


def test_a_split_that_needs_too_much_workspace_is_refused(backend):
    g = gemm(ws_bytes=48 * 32 * 4 * 2)
    hungry = lt.spell({**lt.parse(backend.algos(g)[2].config), "splitk": 3, "reduction": 2})
    with pytest.raises(BackendError, match="workspace"):
        backend.launcher(g, Algo(66, 0, hungry))


def test_a_less_aligned_call_gets_only_what_takes_it(backend):
    assert {a.algo_id for a in backend.algos(gemm(align=2))} == {20}
    assert {a.algo_id for a in backend.algos(gemm(align=16))} >= {66, 67}


def test_a_tile_that_the_algorithm_has_not_is_refused(backend):
    config = "id=66 tile=21 stages=36 splitk=1 reduction=0 swizzle=0 custom=0 inner=0 cluster=0"
    with pytest.raises(BackendError, match="NOT_SUPPORTED"):
        backend.launcher(gemm(), Algo(66, 0, config))


def test_a_setting_of_the_wrong_size_or_number_is_refused(backend):
    backend.algos(gemm())
    problem = backend._problems[gemm()]
    algo = problem.blank(66)
    set_attribute = problem.library.function("MatmulAlgoConfigSetAttribute")
    for attribute in CUBLASLT.config.values():
        for number, kind in ((99, attribute.kind), (attribute.number, ctypes.c_uint8 * 3)):
            value = kind()
            args = (ctypes.byref(algo), number, ctypes.byref(value), ctypes.sizeof(value))
            assert set_attribute(*args) == 7
