"""The cuBLASLt backend on a real GPU: every kind of Gemm, its default and others, verified."""

from __future__ import annotations

import random
import time

import pytest
import torch

from gemmtune import machine, nvml
from gemmtune.backends import lt
from gemmtune.backends.cublaslt import CublasLt
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep import operands
from gemmtune.sweep.verify import Checker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not torch.version.cuda, reason="no NVIDIA GPU"
    ),
]

TRIED = 10  # algorithms beside the default


def gemm(kind="bfloat16", m=768, n=512, k=1024, ops="TN", d="", pad=0, **more) -> Gemm:
    a, _, b = kind.partition("/")
    own = {"bias_type": "-", "api": "lt", **more}
    lda = (m if ops[0] == "N" else k) + pad
    ldb = (k if ops[1] == "N" else n) + pad
    bias = own.pop("bias_type")
    return Gemm(m, n, k, *ops, a, b or a, d or a, bias, lda, ldb, m + pad, **own)


def fp8(a="e4m3", b="e4m3", **more) -> Gemm:
    return gemm(f"float8{a}/float8{b}", **{"d": "bfloat16", **more})


GEMMS = {
    "bf16": gemm(),
    "bf16 N,N": gemm(ops="NN"),
    "bf16 N,T": gemm(ops="NT"),
    "bf16 to f32, beta": gemm(d="float32", ops="NT", beta=1),
    "bf16, beta": gemm(ops="NT", beta=1),
    "f16": gemm("float16"),
    "f32": gemm("float32"),
    "bias": gemm(epi="bias", bias_type="bfloat16"),
    "batched": gemm(batch=3, stride_a=768 * 1024, stride_b=512 * 1024, stride_d=768 * 512),
    "odd leading dimensions": gemm(m=767, n=511, k=1023, pad=2),
    "bare alignment": gemm(align=16),
    "no workspace to speak of": gemm(ws_bytes=1024),
    "one row": gemm(n=1),
    "geluaux": gemm(epi="geluaux"),
    "geluauxbias": gemm(epi="geluauxbias", bias_type="bfloat16"),
    "dgelu": gemm(ops="NN", epi="dgelu"),
    "dgelubgrad": gemm(ops="NN", epi="dgelubgrad", bias_type="bfloat16"),
    "bgradb": gemm(ops="NT", epi="bgradb", bias_type="bfloat16"),
    "FP8 fast": fp8(fast_accum=1),
    "FP8 exact": fp8(),
    "FP8 e4m3 e5m2": fp8(b="e5m2"),
    "FP8 e5m2 e4m3 to f32, beta": fp8(a="e5m2", d="float32", beta=1),
    "FP8 bias": fp8(epi="bias", bias_type="bfloat16", fast_accum=1),
}


@pytest.fixture(scope="module")
def backend() -> CublasLt:
    return CublasLt()


@pytest.mark.parametrize("name", GEMMS)
def test_the_default_and_others_compute_the_gemm(backend, name):
    g = GEMMS[name]
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
    reason = checker.whole(default)
    print(f"\n{g}: {len(algos)} algorithms, failed {failed or 'none'}")
    assert reason == ""
    assert len(failed) <= TRIED // 3, failed  # a bad one may be; that it is found is the point


def test_a_librarys_choice_rebuilt_from_its_spelling_is_the_same_to_the_byte(backend):
    for g in (gemm(), fp8(fast_accum=1), gemm(m=4096, n=4096, k=4096)):
        backend.algos(g)
        problem = backend._problems[g]
        for algo, _ in problem.heuristic():
            again = problem.algo(lt.parse(lt.spell(problem.settings(algo))))
            assert bytes(again) == bytes(algo), (bytes(again).hex(), bytes(algo).hex())


def test_its_default_is_what_torch_itself_computes(backend):
    g = gemm()
    o = operands.draw(g, 0, backend.device)
    backend.launcher(g, backend.algos(g)[0])(o)
    assert torch.allclose(o.d.float(), (o.x @ o.w).float(), rtol=2e-2, atol=2e-2)


def test_all_explored_configurations_launch(backend):
    g = gemm(m=2048, n=2048, k=2048)
    o = operands.draw(g, 0, backend.device)
    begun = time.monotonic()
    algos = backend.algos(g)
    seconds = time.monotonic() - begun
    refused = []
    for algo in algos:
        try:
            backend.launcher(g, algo)(o)
            torch.cuda.synchronize()
        except BackendError as e:
            refused.append(f"{algo.config}: {e}")
    print(f"\n{len(algos)} algorithms in {seconds:.1f} s, {len(refused)} refused at launch")
    assert len(algos) > 50 and len(refused) < len(algos) // 10, refused


def test_times_are_the_devices_and_not_the_hosts(backend):
    small, large = gemm(m=128, n=128, k=128), gemm(m=4096, n=4096, k=4096)

    def us(g: Gemm, launches: int) -> float:
        launch = backend.launcher(g, backend.algos(g)[0])
        sets = operands.copies(operands.draw(g, 0, backend.device), 4)
        backend.time_us(launch, sets, launches)
        return backend.time_us(launch, sets, launches)

    ratio = us(large, 1000) / us(large, 50)
    print(f"\nsmall {us(small, 200):.2f} us, large {us(large, 50):.1f} us, long over short {ratio}")
    assert us(small, 200) < 8  # a host that hands over each launch takes about 10
    assert 100 < us(large, 50) < 1000 and 0.8 < ratio < 1.6


def test_a_misaligned_scale_is_refused_by_name(backend):
    g = fp8()
    o = operands.draw(g, 0, backend.device)
    launch = backend.launcher(g, backend.algos(g)[0])
    with pytest.raises(
        BackendError, match=r"CUBLAS_STATUS_(INVALID_VALUE|NOT_SUPPORTED)"
    ):  # 13.1 says the latter
        launch(o._replace(scale_w=torch.ones(5, device=backend.device)[1:2].squeeze()))


def test_what_another_build_might_have_named_is_an_error_of_ours(backend):
    known = backend.algos(gemm())[0].config
    with pytest.raises(BackendError):
        backend.launcher(gemm(), Algo(9999, 0, known.replace("id=", "id=99")))


def test_the_driver_tells_the_gpus_state():
    reading = nvml.read(machine.gpus()[0].uuid)
    print(f"\n{reading}")
    assert reading.sm_mhz and reading.power_w and reading.free_bytes
