"""The cuBLASLt backend on a real GPU: what tests/test_lt.py, which runs there too, has not."""

from __future__ import annotations

import time

import pytest
import torch
from test_lt import gemm

from gemmtune import machine, nvml
from gemmtune.backends.cublaslt import CublasLt
from gemmtune.errors import BackendError
from gemmtune.gemm import Gemm
from gemmtune.sweep import operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not torch.version.cuda, reason="no NVIDIA GPU"
    ),
]


@pytest.fixture(scope="module")
def backend() -> CublasLt:
    return CublasLt()


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


def test_the_driver_tells_the_gpus_state():
    reading = nvml.read(machine.gpus()[0].uuid)
    print(f"\n{reading}")
    assert reading.sm_mhz and reading.power_w and reading.free_bytes
