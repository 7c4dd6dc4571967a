"""The driver's readings, over a stand-in for pynvml: what is not answered is left out."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import scripted

from gemmtune import nvml
from gemmtune.sweep import measure, plan, run
from gemmtune.sweep.plan import Options
from gemmtune.table import Shape, Table

UUID = "GPU-1"


def driver(**answers) -> SimpleNamespace:
    """A pynvml that knows one GPU; a call that is not in `answers` raises, as NVML's errors do."""
    state = SimpleNamespace(open=0)

    def by_uuid(uuid):
        if uuid != UUID:
            raise RuntimeError("NVMLError_NotFound")
        return "handle"

    def opened(step):
        state.open += step

    calls = {name: lambda handle, *args, value=value: value for name, value in answers.items()}
    return SimpleNamespace(
        nvmlInit=lambda: opened(1),
        nvmlShutdown=lambda: opened(-1),
        nvmlDeviceGetHandleByUUID=by_uuid,
        state=state,
        **calls,
    )


@pytest.fixture
def busy(monkeypatch):
    found = driver(
        nvmlDeviceGetClockInfo=1755,
        nvmlDeviceGetPowerUsage=688_000,
        nvmlDeviceGetTemperature=61,
        nvmlDeviceGetCurrentClocksEventReasons=0x4 | 0x1,
        nvmlDeviceGetMemoryInfo=SimpleNamespace(free=6 << 30),
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=41)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_a_reading_is_in_the_units_of_its_names(busy):
    assert nvml.read(UUID) == (1755, 688.0, 61, ("power cap",), 6 << 30, (41,))
    assert busy.state.open == 0


@pytest.mark.parametrize("found", [None, driver()])
def test_what_the_driver_does_not_say_is_left_out(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "pynvml", found)  # None: the import fails
    assert nvml.read(UUID) == nvml.Reading()


def test_an_unknown_gpu_has_no_reading(busy):
    assert nvml.read("GPU-2") == nvml.Reading() and busy.state.open == 0


def test_a_sweep_keeps_readings_and_names_who_shares_the_gpu(busy, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "gpu_uuid", lambda backend: UUID)
    monkeypatch.setattr(run, "READ_S", 0.0)
    notes, paths = [], (tmp_path / "candidates.csv", tmp_path / "tuned.csv")
    shapes = Table([Shape(scripted.gemm(32))], {"threads": 1})
    quick = Options(seconds_per_shape=0.01)

    def sweep():
        tell = lambda event: notes.append(event.note)  # noqa: E731
        return run.sweep(shapes, scripted.Scripted(), *paths, quick, tell)

    first = sweep()
    assert any("shared with process 41" in note for note in notes)
    lines = (tmp_path / "candidates.samples.jsonl").read_text().splitlines()
    gpu = [entry["gpu"] for entry in map(json.loads, lines) if "gpu" in entry]
    assert gpu and gpu[0]["throttled"] == ["power cap"]
    assert sweep().lines == first.lines  # what was kept is read again


def test_a_gemm_that_does_not_fit_is_said_to_be_unsupported(busy, monkeypatch):
    backend = scripted.Scripted()
    backend.device = "cuda"
    monkeypatch.setattr(plan.machine, "gpus", lambda: [SimpleNamespace(uuid=UUID)])
    small, large = scripted.gemm(32), scripted.gemm(32)._replace(n=1 << 25, k=256, ldb=256)
    made = plan.make_plan([Shape(small), Shape(large)], backend, Options())
    assert made.gemms == [small]
    assert "half of what is free is 3.0 GiB" in made.unsupported[large]


def test_memory_grows_with_operands_and_the_whole_check_is_bounded():
    head = scripted.gemm(128_256)._replace(n=8192, k=4096, lda=128_256, ldb=4096, ldd=128_256)
    assert 10 << 30 < measure.memory_bytes(head) < 60 << 30
    assert measure.memory_bytes(scripted.gemm(32)) < 300 << 20
