"""The Lt backends: over strict stand-ins for their libraries, and cuBLASLt itself where it is."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_lt import FAKES, build

from gemmtune import table
from gemmtune.backends import lt
from gemmtune.backends.cublaslt import CublasLt
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep import operands, run
from gemmtune.sweep.plan import Options
from gemmtune.sweep.verify import Checker
from gemmtune.table import Shape, Table

HERE = Path(__file__).parent
TRIED = 12  # algorithms of a GEMM
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not (torch.cuda.is_available() and torch.version.cuda), reason="no NVIDIA GPU"
        ),
    ],
)


@pytest.fixture(scope="module", params=[*FAKES, REAL])
def vendor(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def library(vendor) -> Path:
    """The stand-in."""
    if vendor == "real":
        pytest.skip("of the stand-ins alone")
    return build(vendor)


@pytest.fixture
def backend(request, vendor) -> lt.Lt:
    return CublasLt() if vendor == "real" else FAKES[vendor](request.getfixturevalue("library"))


def gemm(kind="bfloat16", m=48, n=32, k=64, ops="TN", d="", pad=0, **more) -> Gemm:
    a, _, b = kind.partition("/")
    own = {"bias_type": "-", "api": "lt", "ws_bytes": 32 << 20, **more}
    lda = (m if ops[0] == "N" else k) + pad
    ldb = (k if ops[1] == "N" else n) + pad
    bias = own.pop("bias_type")
    return Gemm(m, n, k, *ops, a, b or a, d or a, bias, lda, ldb, m + pad, **own)


def gemms(m: int, n: int, k: int) -> dict[str, Gemm]:
    """Every kind of Gemm, in that size."""

    def of(*kind, **more) -> Gemm:
        return gemm(*kind, **{"m": m, "n": n, "k": k, **more})

    bias = {"epi": "bias", "bias_type": "bfloat16"}
    batched = {"batch": 3, "stride_a": m * k, "stride_b": n * k, "stride_d": m * n}
    return {
        "bf16": of(),
        "bf16 N,T": of(ops="NT"),
        "bf16 N,N": of(ops="NN"),
        "f16": of("float16"),
        "f32": of("float32"),
        "bf16, accumulating": of(ops="NT", beta=1),
        "bf16 to f32, accumulating": of(d="float32", ops="NT", beta=1),
        "bias": of(**bias),
        "bias and beta": of(beta=1, **bias),
        "wide leading dimensions": of(pad=8),
        "odd leading dimensions": of(m=m - 1, n=n - 1, k=k - 1, pad=2),
        "bare alignment": of(align=16),
        "hardly any workspace": of(ws_bytes=1024),
        "one row": of(n=1),
        "batched": of(**batched),
        "batched with one A": of(**{**batched, "stride_a": 0}),
        "a batch of one": of(api="bmm"),
        "geluaux": of(epi="geluaux"),
        "geluauxbias": of(epi="geluauxbias", bias_type="bfloat16"),
        "geluauxbias f16": of("float16", epi="geluauxbias", bias_type="float16"),
        "geluaux, m no multiple of 8": of(m=m - 4, epi="geluaux", ops="NN"),
        "dgelu": of(ops="NN", epi="dgelu"),
        "dgelubgrad": of(ops="NN", epi="dgelubgrad", bias_type="bfloat16"),
        "bgradb": of(ops="NT", epi="bgradb", bias_type="bfloat16"),
        "FP8": of("float8e4m3/float8e4m3", d="bfloat16", fast_accum=1),
        "FP8, exact": of("float8e4m3/float8e4m3", d="bfloat16"),
        "FP8 of two kinds": of("float8e4m3/float8e5m2", d="bfloat16"),
        "FP8, accumulating": of("float8e5m2/float8e4m3", d="float32", beta=1),
        "FP8, bias": of("float8e4m3/float8e4m3", d="bfloat16", fast_accum=1, **bias),
    }


GEMMS, LARGE = gemms(48, 32, 64), gemms(768, 512, 1024)


@pytest.mark.parametrize("name", GEMMS)
def test_every_algorithm_computes_the_gemm(vendor, backend, name):
    real = vendor == "real"
    g = (LARGE if real else GEMMS)[name]
    assert backend.unsupported(g) is None
    algos = list(backend.algos(g))
    o = operands.draw(g, 0, backend.device)
    default = backend.launcher(g, algos[0])
    checker = Checker(g, default, o, 0)
    assert checker.quick(default) == ""
    failed = {}
    for algo in random.Random(0).sample(algos[1:], min(TRIED, len(algos) - 1)):
        try:
            reason = checker.quick(backend.launcher(g, algo))
        except BackendError as e:
            reason = str(e)
        if reason:
            failed[algo.config] = reason
    assert checker.whole(default) == ""
    # Of the real library a bad one may be; that it is found is the point.
    assert len(failed) <= (TRIED // 3 if real else 0), failed


def test_the_default_is_what_torch_itself_computes(vendor, backend):
    g = (LARGE if vendor == "real" else GEMMS)["bf16"]
    o = operands.draw(g, 0, backend.device)
    backend.launcher(g, backend.algos(g)[0])(o)
    assert torch.allclose(o.d.float(), (o.x @ o.w).float(), rtol=2e-2, atol=2e-2)


def test_algorithms_have_their_rank_in_the_librarys_list_and_the_default_leads(library, backend):
    algos = backend.algos(gemm())
    assert len({a.config for a in algos}) == len(algos)
    assert algos[0].aidx == 0 and all(a.aidx >= 0 for a in algos)
    assert [a.aidx for a in algos] == sorted(a.aidx for a in algos)
    problem = backend._problems[gemm()]
    listed = [lt.spell(problem.settings(algo)) for algo, _ in problem.heuristic()]
    assert [listed[a.aidx] for a in algos if a.aidx < len(listed)] == list(dict.fromkeys(listed))
    assert algos[0].config == lt.spell(problem.settings(problem.heuristic(1)[0][0]))


def test_a_default_that_cannot_run_here_gives_way_to_the_librarys_own(library, backend):
    g = gemm()
    first, *others = backend.algos(g)
    backend.given = {g: others[-1].config}
    assert backend.algos(g)[0].config == others[-1].config
    for number in ("4242", "77"):
        backend.given = {g: re.sub("id=[0-9]+", f"id={number}", first.config)}
        assert backend.algos(g)[0] == first


def test_no_algorithm_needs_more_workspace_than_the_call_has(library, backend):
    g = gemm(ws_bytes=48 * 32 * 4 * 2)
    needs = {a: backend.workspace_bytes(g, a) for a in backend.algos(g)}
    assert 0 < max(needs.values()) <= g.ws_bytes
    hungry = max(needs, key=lambda a: needs[a])
    with pytest.raises(BackendError):
        backend.launcher(g._replace(ws_bytes=needs[hungry] - 1), hungry)


def test_a_call_without_an_algorithm_says_so(backend):
    odd = gemm("float8e4m3/float8e4m3", n=33, k=63, d="bfloat16")
    with pytest.raises(
        BackendError, match=r"NOT_SUPPORTED|INVALID_VALUE|no algorithm for 48x33x63"
    ):
        backend.algos(odd)


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
def test_what_it_cannot_run_is_said(backend, g, reason):
    assert reason in backend.unsupported(g)


def test_a_misaligned_scale_is_refused_by_name(vendor, backend):
    g = GEMMS["FP8"]
    o = operands.draw(g, 0, backend.device)
    launch = backend.launcher(g, backend.algos(g)[0])
    offset = 1 if vendor == "hipblaslt" else 4  # bytes: hipBLASLt's own calls look at no address
    memory = torch.ones(8, dtype=torch.uint8, device=backend.device)
    shifted = memory[offset : offset + 4] if offset % 4 else memory.view(torch.float32)[1:2]
    with pytest.raises(BackendError, match=r"LtMatmul: \w+_STATUS_(INVALID_VALUE|NOT_SUPPORTED)"):
        launch(o._replace(scale_w=shifted.squeeze()))
    launch(o)


@pytest.mark.parametrize("change", ["unknown id", "no setting of its", "another's", "nothing"])
def test_an_unknown_configuration_is_an_error_of_ours(backend, change):
    known = backend.algos(gemm())[0]
    config = {
        "unknown id": known.config.replace("id=", "id=99"),
        "no setting of its": known.config.rpartition(" ")[0],
        "another's": "aten",
        "nothing": "",
    }[change]
    with pytest.raises(BackendError):
        backend.launcher(gemm(), Algo(known.algo_id, 0, config))


@pytest.mark.parametrize("of", ["desc", "layout", "preference"])
def test_an_attribute_too_small_or_unknown_is_refused(vendor, backend, of):
    backend.algos(gemm())
    problem = backend._problems[gemm()]
    library, preference = problem.library, problem.library.create("MatmulPreference")
    name, target = {
        "desc": ("MatmulDesc", problem.desc.value),
        "layout": ("MatrixLayout", problem._a.value),
        "preference": ("MatmulPreference", preference.value),
    }[of]
    invalid = {
        number for number, word in library.vendor.statuses.items() if "INVALID_VALUE" in word
    }
    set_attribute = library.function(f"{name}SetAttribute")
    for attribute in getattr(library.vendor, of).values():
        value = attribute.kind()
        size = ctypes.sizeof(value)
        sizes = [(attribute.number, size - 1), (99, size), (attribute.number, 0)]
        for number, given in sizes:
            assert set_attribute(target, number, ctypes.byref(value), given) in invalid


def test_a_librarys_choice_rebuilt_from_its_spelling_is_the_same_to_the_byte(backend):
    for g in (gemm(), GEMMS["FP8"]):
        backend.algos(g)
        problem = backend._problems[g]
        for algo, _ in problem.heuristic():
            again = problem.algo(lt.parse(lt.spell(problem.settings(algo))))
            assert bytes(again) == bytes(algo), (bytes(again).hex(), bytes(algo).hex())


def test_it_can_be_pickled_after_use_and_forgets_the_device(library, backend):
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


VERSIONS = {"cublaslt": "cuBLASLt 13.1.1", "hipblaslt": "hipBLASLt 0.10.1-fa4e0001"}


def test_a_sweep_runs_in_worker_processes(vendor, library, tmp_path):
    shapes = [Shape(g._replace(api="mm")) for g in (gemm(m=32, n=16, k=32), GEMMS["FP8"])]
    backend = FAKES[vendor](library, explored=6)
    candidates, tuned = tmp_path / "candidates.csv", tmp_path / "tuned.csv"
    options = Options(seconds_per_shape=0.3)
    summary = run.sweep(Table(shapes, {"device": "cpu"}), backend, candidates, tuned, options)
    assert [line.reason for line in summary.lines] == ["", ""]
    assert summary.provenance["machine"]["library"] == VERSIONS[vendor]
    rows = table.read(candidates, table.Candidate).rows
    assert {row.status for row in rows} <= {"default", "dropped", "finalist", "winner"}


@pytest.mark.parametrize("name", FAKES)
def test_the_library_is_the_one_that_torch_has_loaded(name):
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has it")
    # In a process of its own: another test may have loaded a stand-in of that name.
    code = f"from gemmtune.backends import base; base.get({name!r}).library()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(r"BackendError: this torch has not loaded (cu|hip)BLASLt .*: ", done.stderr)


@pytest.mark.parametrize("name", FAKES)
def test_the_stand_in_is_clean_under_sanitizers(name):
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    path = build(name, *flags)
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
        "from test_lt import FAKES, GEMMS, operands\n"
        f"b = FAKES[{name!r}]({str(path)!r}, explored=10)\n"
        "for g in GEMMS.values():\n"
        "    for a in b.algos(g):\n"
        "        b.launcher(g, a)(operands.draw(g, 0))\n"
        "print('clean')\n"
    )
    env = {
        **os.environ,
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent))),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "clean\n", done.stderr[-3000:]
