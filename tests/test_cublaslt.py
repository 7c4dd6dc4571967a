"""The cuBLASLt backend over a strict stand-in for its library (tests/fake_cublaslt.c)."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_lt import FakeLt, build

from gemmtune import table
from gemmtune.backends import base, lt
from gemmtune.backends.cublaslt import CUBLASLT, CublasLt
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep import operands, run
from gemmtune.sweep.plan import Options
from gemmtune.sweep.verify import Checker
from gemmtune.table import Shape, Table


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture
def backend(library) -> FakeLt:
    return FakeLt(library)


def gemm(kind: str = "bfloat16", m=48, n=32, k=64, ops="TN", d: str = "", pad=0, **more) -> Gemm:
    types = kind.split("/") if "/" in kind else [kind, kind]
    own = {"bias_type": "-", "api": "lt", **more}
    lda = (m if ops[0] == "N" else k) + pad
    ldb = (k if ops[1] == "N" else n) + pad
    bias = own.pop("bias_type")
    return Gemm(m, n, k, *ops, *types, d or types[0], bias, lda, ldb, m + pad, **own)


GEMMS = {
    "bf16": gemm(),
    "bf16 N,T": gemm(ops="NT"),
    "bf16 N,N": gemm(ops="NN"),
    "f16": gemm("float16"),
    "f32": gemm("float32"),
    "bf16 to f32, accumulating": gemm(d="float32", beta=1),
    "bias": gemm(epi="bias", bias_type="bfloat16"),
    "bias and beta": gemm(epi="bias", bias_type="bfloat16", beta=1),
    "wide leading dimensions": gemm(pad=8),
    "odd leading dimensions": gemm(m=47, n=31, k=63, pad=2),
    "batched": gemm(batch=3, stride_a=64 * 48, stride_b=64 * 32, stride_d=48 * 32),
    "batched with one A": gemm(batch=3, stride_b=64 * 32, stride_d=48 * 32),
    "a batch of one": gemm(api="bmm"),
    "geluaux": gemm(epi="geluaux"),
    "geluauxbias": gemm(epi="geluauxbias", bias_type="bfloat16"),
    "geluauxbias f16": gemm("float16", epi="geluauxbias", bias_type="float16"),
    "geluaux, m no multiple of 8": gemm(m=44, epi="geluaux", ops="NN"),
    "dgelu": gemm(ops="NN", epi="dgelu"),
    "dgelubgrad": gemm(ops="NN", epi="dgelubgrad", bias_type="bfloat16"),
    "bgradb": gemm(ops="NT", epi="bgradb", bias_type="bfloat16"),
    "FP8": gemm("float8e4m3/float8e4m3", d="bfloat16", fast_accum=1),
    "FP8, exact": gemm("float8e4m3/float8e5m2", d="bfloat16"),
    "FP8, bias, accumulating": gemm(
        "float8e5m2/float8e4m3", d="float32", beta=1, epi="bias", bias_type="bfloat16"
    ),
}


@pytest.mark.parametrize("name", GEMMS)
def test_every_algorithm_computes_the_gemm(backend, name):
    g = GEMMS[name]
    assert backend.unsupported(g) is None
    algos = backend.algos(g)
    o = operands.draw(g, 0)
    checker = Checker(g, backend.launcher(g, algos[0]), o, 0)
    for algo in algos[:: max(1, len(algos) // 12)]:
        launch = backend.launcher(g, algo)
        assert checker.quick(launch) == "", algo
    assert checker.whole(launch) == ""


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


def test_no_algorithm_needs_more_workspace_than_the_call_has(backend):
    g = gemm(ws_bytes=48 * 32 * 4 * 2)
    needs = [backend.workspace_bytes(g, a) for a in backend.algos(g)]
    assert max(needs) == g.ws_bytes
    hungry = lt.spell({**lt.parse(backend.algos(g)[2].config), "splitk": 3, "reduction": 2})
    with pytest.raises(BackendError, match="workspace"):
        backend.launcher(g, Algo(66, 0, hungry))


def test_a_less_aligned_call_gets_only_what_takes_it(backend):
    assert {a.algo_id for a in backend.algos(gemm(align=2))} == {20}
    assert {a.algo_id for a in backend.algos(gemm(align=16))} >= {66, 67}


def test_a_call_without_an_algorithm_says_so(backend):
    with pytest.raises(BackendError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
        backend.algos(gemm("float8e4m3/float8e4m3", n=33, d="bfloat16"))


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (gemm("float64", comp="f64", scale="float64"), "compute type"),
        (gemm("float8e4m3/float8e4m3", d="bfloat16", scale_mode=2), "scale mode 2"),
        (gemm("float8e4m3/float8e4m3"), "FP8 result"),
        (gemm("float8e5m2/float8e5m2", d="bfloat16"), "float8e5m2"),
        (gemm("float8e4m3/float8e4m3", d="bfloat16", epi="geluaux"), "epilogue geluaux of an FP8"),
        (gemm(bias_type="bfloat16"), "bias epilogue"),
        (gemm("bfloat16/float16"), "mixed types"),
        (gemm(api="grouped_mm"), "grouped_mm"),
    ],
)
def test_what_it_cannot_run_is_said_without_a_device(g, reason):
    assert reason in CublasLt().unsupported(g)


def test_a_misaligned_scale_is_refused_by_name(backend):
    g = GEMMS["FP8"]
    o = operands.draw(g, 0)
    shifted = torch.ones(5)[1:2].squeeze()
    launch = backend.launcher(g, backend.algos(g)[0])
    with pytest.raises(BackendError, match=r"cublasLtMatmul: CUBLAS_STATUS_INVALID_VALUE"):
        launch(o._replace(scale_w=shifted))
    launch(o)


@pytest.mark.parametrize(
    "config",
    [
        "id=66 tile=21 stages=36 splitk=1 reduction=0 swizzle=0 custom=0 inner=0 cluster=0",
        "id=99 tile=20 stages=36 splitk=1 reduction=0 swizzle=0 custom=0 inner=0 cluster=0",
        "id=66 tile=20",
        "aten",
        "",
    ],
)
def test_an_unknown_configuration_is_an_error_of_ours(backend, config):
    with pytest.raises(BackendError):
        backend.launcher(gemm(), Algo(66, 0, config))


@pytest.mark.parametrize("of", ["desc", "layout", "preference", "config"])
def test_an_attribute_of_the_wrong_size_or_number_is_refused(backend, of):
    backend.algos(gemm())
    problem = backend._problems[gemm()]
    library = problem.library
    preference = library.create("MatmulPreference")
    algo = problem.blank(66)
    name, target = {
        "desc": ("MatmulDesc", problem.desc.value),
        "layout": ("MatrixLayout", problem._a.value),
        "preference": ("MatmulPreference", preference.value),
        "config": ("MatmulAlgoConfig", ctypes.byref(algo)),
    }[of]
    for attribute in getattr(CUBLASLT, of).values():
        for wrong in (
            attribute._replace(number=99),
            attribute._replace(kind=ctypes.c_uint8 * 3),
        ):
            value = [0, 0, 0] if wrong.number != 99 else [0]
            buffer = wrong.kind(*value)
            status = library.function(f"{name}SetAttribute")(
                target, wrong.number, ctypes.byref(buffer), ctypes.sizeof(buffer)
            )
            assert status == 7


def test_a_librarys_choice_rebuilt_from_its_spelling_is_the_same_to_the_byte(backend):
    for g in (gemm(), GEMMS["FP8"]):
        backend.algos(g)
        problem = backend._problems[g]
        for algo, _ in problem.heuristic():
            again = problem.algo(lt.parse(lt.spell(problem.settings(algo))))
            assert bytes(again) == bytes(algo), (bytes(again).hex(), bytes(algo).hex())


def test_it_can_be_pickled_after_use_and_forgets_the_device(backend):
    backend.algos(gemm())
    again = pickle.loads(pickle.dumps(backend))
    assert again._handle is None and again.algos(gemm()) == backend.algos(gemm())


def test_descriptors_are_given_back(backend, library):
    live = ctypes.CDLL(str(library)).fake_live
    before = live()
    g = GEMMS["FP8"]
    launch = backend.launcher(g, backend.algos(g)[0])
    for o in operands.copies(operands.draw(g, 0), 5):
        launch(o)
    assert live() > before
    del launch
    backend._forget()
    assert live() == before


def test_a_sweep_runs_in_worker_processes(library, tmp_path):
    shapes = Table([Shape(gemm(m=32, n=16, k=32)), Shape(GEMMS["FP8"])], {"device": "cuda"})
    tuned = tmp_path / "tuned.csv"
    options = Options(seconds_per_shape=0.3)
    backend = FakeLt(library, explored=6)
    backend.device = "cpu"
    shapes.provenance["device"] = "cpu"
    swept = [row._replace(gemm=row.gemm._replace(api="mm")) for row in shapes.rows]
    summary = run.sweep(
        Table(swept, shapes.provenance), backend, tmp_path / "candidates.csv", tuned, options
    )
    assert [line.reason for line in summary.lines] == ["", ""]
    assert summary.provenance["machine"]["library"] == "cuBLASLt 13.1.1"
    rows = table.read(tmp_path / "candidates.csv", table.Candidate).rows
    assert {row.status for row in rows} <= {"default", "dropped", "finalist", "winner"}


def test_the_library_is_the_one_that_torch_has_loaded(monkeypatch):
    if torch.version.cuda:
        pytest.skip("this torch has it")
    with pytest.raises(BackendError, match="pip install torch"):
        base.get("cublaslt").library()


def test_the_stand_in_is_clean_under_sanitizers():
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    path = build(*flags)
    asan = subprocess.run(
        [os.environ.get("CC", "cc"), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not os.path.isabs(asan):
        pytest.skip("no libasan")
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from test_cublaslt import GEMMS, FakeLt, operands\n"
        f"b = FakeLt({str(path)!r}, explored=10)\n"
        "for g in GEMMS.values():\n"
        "    for a in b.algos(g):\n"
        "        b.launcher(g, a)(operands.draw(g, 0))\n"
        "print('clean')\n"
    )
    here = str(Path(__file__).parent)
    env = {
        **os.environ,
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join((here, str(Path(here).parent))),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "clean\n", done.stderr[-3000:]
