"""The machine's fingerprint, GPU detection from files and NVML, and what counts as different."""

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmtune import machine
from gemmtune.backends import base
from gemmtune.errors import UsageError
from gemmtune.machine import Gpu

H200 = Gpu("NVIDIA", "NVIDIA H200", "sm_90", "580.65.06", 700.0, 1980, 3201, "GPU-aaaa")


class CpuLike:
    """As much of a backend as a fingerprint asks for."""

    name, device = "cpu", "cpu"

    def dev_cap(self) -> int:
        return 0

    def library(self) -> str:
        return "lib 1.2"


@pytest.fixture(autouse=True)
def no_gpu_settings(monkeypatch):
    """No NVML and no visibility settings of the machine that runs the tests."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for api in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{api}_VISIBLE_DEVICES", raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def kfd(root: Path, nodes: dict[int, str]) -> Path:
    top = "sys/class/kfd/kfd/topology/nodes"
    files = {f"{top}/{n}/properties": text for n, text in nodes.items()}
    return tree(root, {"dev/kfd": "", "sys/module/amdgpu/version": "6.10.5\n", **files})


def fake_nvml(count=2):
    """NVML as nvidia-ml-py shows it, one call of which the driver does not support."""

    def unsupported(*_):
        raise RuntimeError("Not Supported")

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda h: b"NVIDIA H200",
        nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0),
        nvmlDeviceGetEnforcedPowerLimit=lambda h: 700_000,
        nvmlDeviceGetMaxClockInfo=unsupported,
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}{h}{h}",
    )


def test_fingerprint_is_json_and_names_everything_but_the_host():
    made = machine.fingerprint(CpuLike())
    assert {"arch", "library", "dev_cap", "torch", "threads", "cores"} <= set(made)
    assert made["dev_cap"] == 0 and made["library"] == "lib 1.2" and made["threads"] >= 1
    assert json.loads(json.dumps(made)) == made
    assert socket.gethostname() not in json.dumps(made)


def test_fingerprint_of_a_gpu_backend_describes_the_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    backend = CpuLike()
    backend.device = "cuda"
    made = machine.fingerprint(backend)
    assert (made["arch"], made["driver"]) == ("NVIDIA H200 sm_90", "580.65.06")
    assert (made["gpus"], made["power_cap_w"]) == (2, 700.0)
    assert "max_sm_clock_mhz" not in made  # not answered: left out


def test_same_machine_has_no_differences():
    made = machine.fingerprint(CpuLike())
    assert machine.incompatible(made, made) == machine.differences(made, made) == []


@pytest.mark.parametrize("field", ["arch", "library"])
def test_another_processor_or_library_is_incompatible_and_both_values_are_named(field):
    made = machine.fingerprint(CpuLike())
    here = made | {field: "another"}
    (line,) = machine.incompatible(made, here)
    assert str(made[field]) in line and "another" in line
    assert machine.differences(made, here) == []


@pytest.mark.parametrize("field", ["driver", "torch", "threads", "power_cap_w"])
def test_other_fields_are_soft(field):
    (line,) = machine.differences({field: 1, "arch": "a", "library": "l"}, {field: 2})
    assert "1" in line and "2" in line
    assert machine.incompatible({field: 1}, {field: 2}) == []


def test_a_table_that_does_not_say_its_machine_is_a_soft_difference():
    here = machine.fingerprint(CpuLike())
    assert machine.incompatible({}, here) == []
    assert len(machine.differences({}, here)) == 2


def test_no_gpu_means_the_cpu_backend(tmp_path):
    assert machine.gpus(tmp_path) == []
    assert base.detect([]) == "cpu"


def test_a_gpu_without_a_backend_is_refused_not_tuned_as_a_cpu(monkeypatch):
    monkeypatch.delitem(base.BACKENDS, "cublaslt", raising=False)
    with pytest.raises(UsageError, match=r"NVIDIA H200.*--backend cpu"):
        base.detect([H200])


def test_a_gpu_with_a_backend_gets_it(monkeypatch):
    monkeypatch.setitem(base.BACKENDS, "cublaslt", "nowhere:Nothing")
    assert base.detect([H200]) == "cublaslt"


def test_nvml_gives_name_capability_driver_and_power(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    first, second = machine.gpus(tmp_path)
    assert first == Gpu("NVIDIA", "NVIDIA H200", "sm_90", "580.65.06", 700.0, uuid="GPU-000")
    assert second.uuid == "GPU-111"


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        ("1", ["GPU-111"]),
        ("1,0", ["GPU-111", "GPU-000"]),
        ("GPU-1", ["GPU-111"]),
        ("0,-1,1", ["GPU-000"]),
        ("", []),
        ("7", []),
        ("MIG-5", ["GPU-000", "GPU-111"]),
    ],
)
def test_hidden_gpus_are_not_seen(monkeypatch, tmp_path, setting, uuids):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [gpu.uuid for gpu in machine.gpus(tmp_path)] == uuids


def test_a_driver_that_nvml_cannot_reach_leaves_no_gpu_and_no_error(monkeypatch, tmp_path):
    def broken():
        raise OSError("libnvidia-ml.so.1: not found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=broken))
    assert machine.gpus(tmp_path) == []


def test_nvidia_without_nvml_is_read_from_proc(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64"
            "  580.65.06  Release Build\nGCC version:  gcc 12.3.0\n",
            "proc/driver/nvidia/gpus/0000:04:00.0/information": "Model: \t\t NVIDIA H200\n"
            "IRQ:   \t\t 97\nGPU UUID: \t GPU-31f1\n",
        },
    )
    assert machine.gpus(root) == [Gpu("NVIDIA", "NVIDIA H200", driver="580.65.06", uuid="GPU-31f1")]


def test_amd_is_read_from_the_kernel_driver_and_cpu_nodes_left_out(tmp_path, monkeypatch):
    gpu = "gfx_target_version 90402\ndrm_render_minor 128\nunique_id 255\n"
    gpu += "max_engine_clk_fcompute 2100\n"
    root = kfd(tmp_path, {0: "cpu_cores_count 96\ngfx_target_version 0\n", 1: gpu})
    device = "sys/class/drm/renderD128/device"
    tree(
        root,
        {
            f"{device}/product_name": "AMD Instinct MI300X\n",
            f"{device}/mem_info_vram_total": str(192 << 30),
            f"{device}/hwmon/hwmon5/power1_cap": "750000000\n",
        },
    )
    (found,) = machine.gpus(root)
    assert found.arch == "AMD Instinct MI300X gfx942"
    assert (found.driver, found.power_cap_w, found.max_sm_clock_mhz) == ("6.10.5", 750.0, 2100)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert machine.gpus(root) == []


@pytest.mark.parametrize(("target", "name"), [(90010, "gfx90a"), (90500, "gfx950")])
def test_gfx_names(tmp_path, target, name):
    root = kfd(tmp_path, {1: f"gfx_target_version {target}\n"})
    assert machine.gpus(root)[0].capability == name


def test_hip_reads_cudas_variable_only_without_its_own(tmp_path, monkeypatch):
    root = kfd(tmp_path, dict.fromkeys(range(4), "gfx_target_version 90402\n"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert len(machine.gpus(root)) == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert len(machine.gpus(root)) == 1


def test_a_desktop_processors_own_gpu_does_not_count(tmp_path):
    root = kfd(tmp_path, {1: "gfx_target_version 100306\ndrm_render_minor 128\n"})
    tree(root, {"sys/class/drm/renderD128/device/mem_info_vram_total": str(512 << 20)})
    assert machine.gpus(root) == []


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC  9654 96-Core\nmodel name : x\n", "AMD EPYC 9654"),
        ("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "0x41 0xd4f"),
    ],
)
def test_cpu_name(tmp_path, cpuinfo, name):
    assert name in machine.cpu_name(tree(tmp_path, {"proc/cpuinfo": cpuinfo}))
