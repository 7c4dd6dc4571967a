"""This machine: its GPUs, the fingerprint that tables carry, and what may differ between two.

Reads NVML (nvidia-ml-py), /proc/driver/nvidia, /sys/class/kfd and /sys/class/drm (AMD) and
/proc/cpuinfo; asks torch for GPUs only where a device file shows one that none of these describes.
Writes nothing. What cannot be read is left out: nothing here fails for want of a driver.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gemmtune.backends.base import Backend

# A desktop processor's own GPU, whose carve-out of memory is below this, is no place to train.
INTEGRATED_BYTES = 4 << 30

# Algorithm numbers mean nothing on another architecture or library build; the rest only shifts
# times. Fields that differ without a bearing on either (dev_cap follows arch) are not compared.
HARD = {"arch": "processor", "library": "GEMM library"}
SOFT = {
    "driver": "driver",
    "torch": "torch",
    "transformer_engine": "Transformer Engine",
    "threads": "threads",
    "cores": "cores",
    "gpus": "number of GPUs",
    "power_cap_w": "power cap (W)",
    "max_sm_clock_mhz": "highest SM clock (MHz)",
    "max_mem_clock_mhz": "highest memory clock (MHz)",
}
# Settings of a job that change its GEMMs or what runs beside them: kept with what was captured.
SETTINGS = (
    "GPU_MAX_HW_QUEUES",
    "HIP_FORCE_DEV_KERNARG",
    "HSA_NO_SCRATCH_RECLAIM",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HIPBLASLT_TUNING_OVERRIDE_FILE",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_EXT_MARGIN_SM",
    "NVTE_USE_CAST_TRANSPOSE_TRITON",
    "NVTE_USE_HIPBLASLT",
    "NVTE_USE_ROCBLAS",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "TE_HIPBLASLT_ALGO_LOAD",
    "TE_HIPBLASLT_ALGO_SELECTION",
    "TE_HIPBLASLT_TUNING_RUN_COUNT",
)


class Gpu(NamedTuple):
    """A GPU that this process may use. `capability` is sm_90, gfx942, …; 0 and "" are unknown."""

    vendor: str  # NVIDIA or AMD
    name: str
    capability: str = ""
    driver: str = ""
    power_cap_w: float = 0.0
    max_sm_clock_mhz: int = 0
    max_mem_clock_mhz: int = 0
    uuid: str = ""

    @property
    def arch(self) -> str:
        """Name and capability: what algorithm numbers depend on."""
        return f"{self.name} {self.capability}".strip()


def gpus(root: str | os.PathLike[str] = "/") -> list[Gpu]:
    """The GPUs that this process may use, in the driver's order; `root` is where /proc, /sys are.

    Obeys CUDA_VISIBLE_DEVICES, and for AMD also HIP_ and ROCR_VISIBLE_DEVICES. Never raises.
    """
    top = Path(root)
    nvidia = list(_nvml()) or list(_proc_nvidia(top))
    if nvidia:
        return _visible(nvidia, "CUDA_VISIBLE_DEVICES")
    if amd := list(_kfd(top)):
        # HIP reads CUDA's variable only where its own is not set.
        hip = "HIP" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA"
        return _visible(amd, "ROCR_VISIBLE_DEVICES", f"{hip}_VISIBLE_DEVICES")
    devices = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
    return list(_torch_gpus()) if any((top / d).exists() for d in devices) else []


def fnuz(capability: str) -> bool:
    """Whether a GPU's FP8 types are AMD's older ones, without infinities and negative zero."""
    return capability.startswith("gfx94")


def fingerprint(backend: Backend) -> dict[str, Any]:
    """What a table must say of the machine it was made on: JSON values, without a host name.

    Always: arch, library, dev_cap, torch, threads, cores. On a GPU also driver, gpus (how many),
    power_cap_w, max_sm_clock_mhz, max_mem_clock_mhz; transformer_engine where it is installed.
    """
    import torch

    found = gpus() if backend.device != "cpu" else []
    known: dict[str, Any] = {
        "arch": cpu_name(),
        "library": backend.library(),
        "dev_cap": backend.dev_cap(),
        "torch": torch.__version__,
        "transformer_engine": version_of("transformer_engine"),
        "threads": torch.get_num_threads(),
        "cores": cores(),
    }
    if found:
        gpu = found[0]
        known |= {
            "arch": gpu.arch,
            "driver": gpu.driver,
            "gpus": len(found),
            "power_cap_w": gpu.power_cap_w,
            "max_sm_clock_mhz": gpu.max_sm_clock_mhz,
            "max_mem_clock_mhz": gpu.max_mem_clock_mhz,
        }
    return {name: value for name, value in known.items() if value or name == "dev_cap"}


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of SETTINGS that are set."""
    return {name: environ[name] for name in SETTINGS if environ.get(name)}


def incompatible(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Why a table's algorithms cannot be trusted here: one line per hard difference.

    `made` and `here` are fingerprints. What `made` does not say is no difference: see
    `differences`.
    """
    return _compare(made, here, HARD)


def differences(made: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What may shift the times of a table, or cannot be told: one line per soft difference."""
    unknown = [
        f"{words}: not recorded in the table, {here[field]} here"
        for field, words in HARD.items()
        if field not in made and field in here
    ]
    return unknown + _compare(made, here, SOFT)


def _compare(
    made: Mapping[str, Any], here: Mapping[str, Any], fields: Mapping[str, str]
) -> list[str]:
    return [
        f"{words}: {made[field]} when the table was made, {here[field]} here"
        for field, words in fields.items()
        if field in made and field in here and made[field] != here[field]
    ]


def cores() -> int:
    """Logical cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def cpu_name(root: str | os.PathLike[str] = "/") -> str:
    """The CPU's model name; on Arm, which gives none, its implementer and part numbers."""
    fields: dict[str, str] = {}
    for line in read_or_empty(Path(root) / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if fields.get("model name"):
        return " ".join(fields["model name"].split())
    arm = [fields[f] for f in ("CPU implementer", "CPU part") if fields.get(f)]
    return " ".join([platform.machine(), *arm])


def version_of(distribution: str) -> str:
    """The installed version of a Python distribution, "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def read_or_empty(path: Path) -> str:
    """The text of a small file without blanks round it, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # sysfs also refuses to read what a container may not use
        return ""


def _nvml() -> Iterator[Gpu]:
    """GPUs as NVML sees them: all of the machine's, in PCI order."""
    try:
        import pynvml as nv

        nv.nvmlInit()
    except Exception:  # no package, no library, no driver, or not the driver's version
        return

    def ask(call: str, *args: Any) -> Any:
        try:
            value = getattr(nv, call)(*args)
        except Exception:  # what one driver or one GPU does not answer, another may
            return None
        return value.decode() if isinstance(value, bytes) else value

    try:
        for index in range(ask("nvmlDeviceGetCount") or 0):
            handle = ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                continue
            capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
            yield Gpu(
                vendor="NVIDIA",
                name=ask("nvmlDeviceGetName", handle) or "NVIDIA GPU",
                capability="sm_{}{}".format(*capability) if capability else "",
                driver=ask("nvmlSystemGetDriverVersion") or "",
                power_cap_w=(ask("nvmlDeviceGetEnforcedPowerLimit", handle) or 0) / 1000,
                max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nv.NVML_CLOCK_SM) or 0,
                max_mem_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nv.NVML_CLOCK_MEM) or 0,
                uuid=ask("nvmlDeviceGetUUID", handle) or "",
            )
    finally:
        ask("nvmlShutdown")


def _proc_nvidia(top: Path) -> Iterator[Gpu]:
    """GPUs as the NVIDIA kernel module lists them, where NVML is not at hand."""
    folder = top / "proc/driver/nvidia"
    words = read_or_empty(folder / "version").split("\n")[0].split()
    driver = next((w for w in words if w[:1].isdecimal() and "." in w), "")
    for information in sorted(folder.glob("gpus/*/information")):
        lines = (line.partition(":") for line in read_or_empty(information).splitlines())
        fields = {name.strip(): value.strip() for name, _, value in lines}
        name = fields.get("Model") or "NVIDIA GPU"
        yield Gpu("NVIDIA", name, driver=driver, uuid=fields.get("GPU UUID", ""))


def _kfd(top: Path) -> Iterator[Gpu]:
    """GPUs as AMD's kernel driver lists them; CPU nodes there have a gfx_target_version of 0."""
    if not (top / "dev/kfd").exists():
        return
    driver = read_or_empty(top / "sys/module/amdgpu/version")
    nodes = top / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(nodes.glob("*"), key=lambda p: (len(p.name), p.name)):
        words = (line.split() for line in read_or_empty(node / "properties").splitlines())
        fields = {w[0]: w[1] for w in words if len(w) == 2}
        target = _whole(fields.get("gfx_target_version"))
        device = top / f"sys/class/drm/renderD{fields.get('drm_render_minor')}/device"
        memory = _whole(read_or_empty(device / "mem_info_vram_total"))
        if not target or 0 < memory < INTEGRATED_BYTES:
            continue
        # 90402 is gfx942, 90010 is gfx90a: the last two places are hexadecimal digits.
        capability = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        caps = (
            _whole(read_or_empty(cap)) for cap in sorted(device.glob("hwmon/hwmon*/power1_cap"))
        )
        yield Gpu(
            vendor="AMD",
            name=read_or_empty(device / "product_name") or "AMD GPU",
            capability=capability,
            driver=driver,
            power_cap_w=next(caps, 0) / 1e6,
            max_sm_clock_mhz=_whole(fields.get("max_engine_clk_fcompute")),
            uuid=f"GPU-{_whole(fields.get('unique_id')):016x}",
        )


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _torch_gpus() -> Iterator[Gpu]:
    try:
        import torch

        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            if torch.version.hip:
                capability = properties.gcnArchName.split(":")[0]
                yield Gpu("AMD", properties.name or "AMD GPU", capability)
            else:
                capability = f"sm_{properties.major}{properties.minor}"
                yield Gpu("NVIDIA", properties.name, capability)
    except Exception:  # a torch that cannot be loaded or reach its driver sees no GPU
        return


def _visible(found: list[Gpu], *variables: str) -> list[Gpu]:
    """Those of `found` that the environment leaves visible; several variables narrow in turn.

    As the CUDA runtime does, the list ends at the first entry that names no GPU ("", -1). MIG
    names cannot be told from here: they leave all visible.
    """
    for variable in variables:
        wanted = os.environ.get(variable)
        if wanted is None or "MIG-" in wanted:
            continue
        kept: list[Gpu] = []
        for entry in wanted.split(","):
            name = entry.strip()
            if name.isdecimal():
                match = found[int(name) : int(name) + 1]
            else:
                match = [g for g in found if name and g.uuid.startswith(name)]
            if not match:
                break
            kept += match[:1]
        found = kept
    return found
