"""doctor: what it finds on machines that are made of files, and what it says to do next."""

import importlib.util
import json
import sys
from pathlib import Path

import fake_lt
import pytest
from click.testing import CliRunner

from gemmtune import doctor, machine
from gemmtune.backends import base
from gemmtune.cli import main
from gemmtune.gemm import Algo
from gemmtune.machine import Gpu

H200 = Gpu("NVIDIA", "NVIDIA H200", "sm_90", "580.65.06")
MI300X = Gpu("AMD", "AMD Instinct MI300X", "gfx942", "6.10.5")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """No GPU, no NVML, no compiler, no visibility settings."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


class Matmul:
    """A backend that computes, and returns `factor` times the right answer."""

    name, device, factor = "cpu", "cpu", 1.0

    def dev_cap(self):
        return 0

    def library(self):
        return "torch"

    def unsupported(self, gemm):
        return None

    def algos(self, gemm):
        return [Algo(0, 0, "aten")]

    def launcher(self, gemm, algo):
        return lambda o: o.d.copy_(o.x @ o.w * self.factor)


class Wrong(Matmul):
    factor = 1.01


class Silent(Matmul):
    """Launches nothing: d stays as it was."""

    def launcher(self, gemm, algo):
        return lambda o: None


def facts(root: Path) -> dict[str, doctor.Fact]:
    return {fact.name: fact for fact in doctor.examine(root).facts}


def use(monkeypatch, cls, name="cpu"):
    monkeypatch.setitem(base.BACKENDS, name, f"{__name__}:{cls.__name__}")


def test_a_bare_machine_is_described_and_the_missing_compiler_named(tmp_path):
    found = facts(tmp_path)
    assert found["GPU"] == doctor.Fact("GPU", "none")
    assert found["C compiler"].next == "apt install gcc"
    assert "CPU only" in found["torch"].value or "CUDA" in found["torch"].value


def test_a_compiler_is_found_by_cc_and_named_with_its_version(tmp_path, monkeypatch):
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\necho mycc 7.7\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} -O2")
    assert facts(tmp_path)["C compiler"] == ("C compiler", f"{compiler}: mycc 7.7", "")
    monkeypatch.setenv("CC", "no-such-cc")
    assert facts(tmp_path)["C compiler"].next == "unset CC"


def test_a_torch_that_does_not_load_is_reported_not_raised(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = doctor.examine(tmp_path)
    (torch,) = [fact for fact in report.facts if fact.name == "torch"]
    assert "does not load" in torch.value and "pip install" in torch.next
    assert not any(status.works for status in report.backends)


def test_hidden_gpus_are_told_from_absent_ones(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert facts(tmp_path)["GPU"].next == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("vendor", "kind", "word"),
    [
        ("0x10de", "0x030200", "nvidia-smi"),
        ("0x1002", "0x120000", "--device=/dev/kfd"),
        ("0x1002", "0x030000", ""),
    ],
)
def test_a_gpu_without_a_driver_is_seen_on_the_bus(tmp_path, vendor, kind, word):
    device = tmp_path / "sys/bus/pci/devices/0000:04:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    fact = facts(tmp_path)["GPU"]
    assert word in fact.next and bool(word) == bool(fact.next)


def test_a_gpu_is_described_with_the_torch_and_libraries_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda root: [MI300X, MI300X])
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    found = facts(tmp_path)
    assert found["GPU"].value.startswith("2 x AMD Instinct MI300X gfx942, driver 6.10.5")
    assert "ROCm build" in found["torch"].next
    assert found["hipBLASLt"].value == "not found" and found["hipBLASLt"].next
    assert found["hipBLASLt's C++ interface"].next.startswith("apt install hipblaslt-dev")
    assert found["amdsmi"].next == "pip install amdsmi"
    library = tmp_path / "opt/rocm/lib/libhipblaslt.so.1.2.3"
    library.parent.mkdir(parents=True)
    library.touch()
    assert facts(tmp_path)["hipBLASLt"].value == str(library)


def test_a_backend_works_only_when_its_result_is_right(monkeypatch):
    use(monkeypatch, Matmul)
    assert doctor.status("cpu", []).works
    for cls in (Wrong, Silent):
        use(monkeypatch, cls)
        status = doctor.status("cpu", [])
        assert not status.works and "off by" in status.detail and status.next


def test_the_hipblaslt_backend_works_over_the_stand_in(monkeypatch):
    library = fake_lt.build("hipblaslt")
    monkeypatch.setattr(base, "get", lambda name: fake_lt.FakeHip(library))
    status = doctor.status("hipblaslt", [MI300X])
    assert status.works and status.detail.endswith("(hipBLASLt 0.10.1-fa4e0001)")


def test_a_backend_that_cannot_be_loaded_is_a_finding(monkeypatch):
    monkeypatch.setitem(base.BACKENDS, "cpu", "gemmtune.no_such_module:Cpu")
    status = doctor.status("cpu", [])
    assert not status.works and "no_such_module" in status.detail and status.next


def test_gpu_backends_say_what_they_lack(monkeypatch):
    monkeypatch.delitem(base.BACKENDS, "cublaslt", raising=False)
    absent = doctor.status("cublaslt", [])
    assert "no NVIDIA GPU" in absent.detail and "gemmtune doctor" in absent.next
    unbuilt = doctor.status("cublaslt", [H200])
    assert "not part of gemmtune" in unbuilt.detail and "--backend cpu" in unbuilt.next
    use(monkeypatch, Matmul, "cublaslt")
    assert doctor.status("cublaslt", [H200]).works


def test_an_amd_machine_with_te_is_told_how_te_tunes_itself(monkeypatch):
    monkeypatch.delitem(base.BACKENDS, "te", raising=False)
    monkeypatch.setattr(doctor, "te_flavour", lambda: "ROCm")
    assert "TE_HIPBLASLT_ALGO_SAVE" in doctor.status("te", [MI300X]).next


@pytest.mark.parametrize(
    ("needed", "flavour"),
    [(b"libamdhip64.so.6", "ROCm"), (b"libcublasLt.so.13", "CUDA"), (b"libm.so.6", "")],
)
def test_te_flavour_is_told_from_the_libraries_it_needs(tmp_path, needed, flavour):
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    (folder / "libtransformer_engine.so").write_bytes(b"\x7fELF\0" + needed + b"\0")
    (folder / "libtransformer_engine_empty.so").touch()
    assert doctor.te_flavour(folder) == flavour


def test_an_installed_te_is_named_with_its_flavour(tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no GPU here')\n")
    (package / "libtransformer_engine.so").write_bytes(b"libcublas.so.12\0")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert facts(tmp_path)["Transformer Engine"].value.endswith("(CUDA)")


@pytest.mark.parametrize(("cls", "code"), [(Matmul, 0), (Wrong, 1)])
def test_json_holds_the_findings_and_the_exit_code_says_whether_a_backend_works(
    monkeypatch, tmp_path, cls, code
):
    examine = doctor.examine
    monkeypatch.setattr(doctor, "examine", lambda: examine(tmp_path))
    use(monkeypatch, cls)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    assert answer["default"] == "cpu"
    (cpu,) = [b for b in answer["backends"] if b["backend"] == "cpu"]
    assert cpu["works"] == (code == 0)
    assert all(set(b) == {"backend", "works", "detail", "next"} for b in answer["backends"])


def test_text_gives_a_next_step_for_each_backend_that_does_not_work(monkeypatch, tmp_path):
    examine = doctor.examine
    monkeypatch.setattr(doctor, "examine", lambda: examine(tmp_path))
    use(monkeypatch, Matmul)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    backends = result.stdout.split("\nBackends\n")[1]
    assert "cpu         works" in backends
    assert backends.count("  no  ") == backends.count("next: ") > 0
    assert "Backend for this machine: cpu" in backends
    assert backends.endswith("\nNext, for a training job: gemmtune capture -- python train.py\n")
