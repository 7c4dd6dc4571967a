"""The drivers' readings, over stand-ins for pynvml and amdsmi: what is not answered is left out."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import scripted

from gemmtune import gpu, nvml
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
        nvmlDeviceGetEnforcedPowerLimit=700_000,
        nvmlDeviceGetMaxClockInfo=1980,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetTotalEnergyConsumption=5_000_250,
        nvmlDeviceGetMemoryInfo=SimpleNamespace(free=6 << 30),
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=41)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_a_reading_is_in_the_units_of_its_names(busy):
    state = (1755, 688.0, 61, ("power cap",), 6 << 30, (41,), 700.0, 1980, 1755, 97, 5000.25)
    assert nvml.read(UUID) == state
    with nvml.meter(UUID) as read:
        assert read() == read() == nvml.Reading(*state)._replace(free_bytes=0, others=())
    assert busy.state.open == 0


@pytest.mark.parametrize("found", [None, driver()])
def test_what_the_driver_does_not_say_is_left_out(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "pynvml", found)  # None: the import fails
    assert nvml.read(UUID) == nvml.Reading()


def test_an_unknown_gpu_has_no_reading(busy):
    assert nvml.read("GPU-2") == nvml.Reading()
    with nvml.meter("GPU-2") as read:
        assert read is None
    assert busy.state.open == 0


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
    assert measure.memory_bytes(scripted.gemm(32)) < 600 << 20


AMD_UUID = "GPU-9a3f00c2deadbeef"


def amdsmi(**more):
    """A stand-in for AMD's package, with what it answers of two GPUs; exceptions are raised."""
    answers = {
        "amdsmi_get_gpu_enumeration_info": {"hip_uuid": AMD_UUID},
        "amdsmi_get_clock_info": {"clk": 1320, "max_clk": 2100, "clk_locked": "N/A"},
        "amdsmi_get_power_info": {"socket_power": "N/A", "current_socket_power": 748},
        "amdsmi_get_power_cap_info": {"power_cap": 750_000_000},
        "amdsmi_get_energy_count": {"energy_accumulator": 10_000_000, "counter_resolution": 15.26},
        "amdsmi_get_gpu_activity": {"gfx_activity": 97, "mm_activity": "N/A"},
        "amdsmi_get_temp_metric": 71,
        "amdsmi_get_gpu_vram_usage": {"vram_total": 196592, "vram_used": 196000},
        "amdsmi_get_gpu_process_list": [
            {"pid": 41, "memory_usage": {"vram_mem": 1 << 30}},
            {"pid": 42, "memory_usage": {"vram_mem": 0}},
        ],
        **more,
    }
    state = SimpleNamespace(open=0, asked=[])

    def answering(name):
        def call(handle, *args):
            if handle == "other":
                return {"hip_uuid": "GPU-0", "asic_serial": "0x0"}
            state.asked.append((name, *args))
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return call

    return SimpleNamespace(
        state=state,
        amdsmi_init=lambda: setattr(state, "open", state.open + 1),
        amdsmi_shut_down=lambda: setattr(state, "open", state.open - 1),
        amdsmi_get_processor_handles=lambda: ["other", "it"],
        AmdSmiClkType=SimpleNamespace(GFX="gfx", MEM="mem"),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT="hotspot"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="current"),
        **{name: answering(name) for name in answers},
    )


@pytest.fixture
def amd(monkeypatch):
    def use(**more):
        found = amdsmi(**more)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        monkeypatch.setitem(sys.modules, "amdsmi", found)
        return found.state

    return use


def test_an_amd_gpu_answers_through_the_same_interface(amd):
    state = amd()
    said = (1320, 748.0, 71, (), 592 << 20, (41,), 750.0, 2100, 1320, 97, 152.6)
    assert gpu.read(AMD_UUID) == said
    with gpu.meter(AMD_UUID) as read:
        assert read() == nvml.Reading(*said)._replace(free_bytes=0, others=())
    assert ("amdsmi_get_clock_info", "gfx") in state.asked and state.open == 0
    assert gpu.read("GPU-1") == nvml.Reading() and state.open == 0


def test_an_amd_gpu_of_older_packages_is_found_by_its_serial(amd):
    lacks = {"amdsmi_get_gpu_enumeration_info": AttributeError("older")}
    serial = {"amdsmi_get_gpu_asic_info": {"asic_serial": "0x9A3F00C2DEADBEEF"}}
    amd(**lacks, **serial, amdsmi_get_clock_info={"cur_clk": 900})
    assert gpu.read(AMD_UUID).sm_mhz == 900


def test_what_an_amd_gpu_does_not_answer_is_left_out(amd):
    amd(amdsmi_get_power_info=RuntimeError("N/A"), amdsmi_get_temp_metric="N/A")
    assert gpu.read(AMD_UUID)[:3] == (1320, 0.0, 0)


def test_a_package_without_its_library_says_nothing(amd, monkeypatch):
    amd()
    monkeypatch.setattr(sys.modules["amdsmi"], "amdsmi_init", lambda: sys.exit(1))
    assert gpu.read(AMD_UUID) == nvml.Reading()
