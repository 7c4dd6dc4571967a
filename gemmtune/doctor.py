"""What is on this machine, which backends work, and the next step for each that does not.

Reads the machine, the installed Python distributions and their libraries; writes nothing. A
backend works when a small GEMM of its default algorithm comes out right, not when it is installed.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gemmtune import __version__, machine
from gemmtune.backends import base, hipblaslt_ext
from gemmtune.errors import BackendError, GemmtuneError, UsageError
from gemmtune.gemm import Gemm

if TYPE_CHECKING:
    from types import ModuleType

# w (k, m) and x (n, k) as they lie in torch: the column-major library sees no transposition.
PROBE = Gemm(48, 32, 64, "N", "N", *("float32",) * 3, "-", lda=48, ldb=64, ldd=48)
TE = "transformer_engine"


class Fact(NamedTuple):
    """One thing that is here or missing. `next`: the step that gets it, "" if none is needed."""

    name: str
    value: str
    next: str = ""


class Status(NamedTuple):
    """Whether a backend works here; `next` is the step that gets it to work."""

    backend: str
    works: bool
    detail: str
    next: str = ""


class Report(NamedTuple):
    """All that doctor found. `default`: the backend that sweep takes unasked; None: it will ask."""

    facts: list[Fact]
    backends: list[Status]
    default: str | None


def examine(root: str | os.PathLike[str] = "/") -> Report:
    """Look at this machine; `root` is where /dev, /proc, /sys, /usr and /opt are. Never raises."""
    top = Path(root)
    found = machine.gpus(top)
    torch, broken = _torch()
    facts = [
        Fact("CPU", f"{machine.cpu_name(top)}, {machine.cores()} cores"),
        _gpu(found, top),
        *_libraries(found, top),
        *_amd(found),
        _torch_build(torch, broken, found),
        Fact("BLAS", ", ".join(_blas(torch)) or "unknown"),
        _transformer_engine(found),
        _package("transformers", "to run the tests and Hugging Face models"),
        _compiler(),
    ]
    names = [*base.BACKENDS, *(n for known in base.PREFERRED.values() for n in known)]
    statuses = [status(name, found) for name in dict.fromkeys(names)]
    try:
        default = base.detect(found)
    except UsageError:
        default = None
    return Report(facts, statuses, default)


def status(name: str, found: Sequence[machine.Gpu]) -> Status:
    """Try one backend, `found` being the GPUs here."""
    vendor = next((v for v, names in base.PREFERRED.items() if name in names), None)
    if vendor and vendor not in {gpu.vendor for gpu in found}:
        step = f"on a machine with an {vendor} GPU: gemmtune doctor"
        return Status(name, False, f"no {vendor} GPU seen here", step)
    if name not in base.BACKENDS:
        detail = f"not part of gemmtune {__version__} yet"
        if vendor == "AMD" and te_flavour() == "ROCm":
            step = (
                "until then Transformer Engine can tune itself: TE_HIPBLASLT_TUNING_RUN_COUNT=20 "
                "TE_HIPBLASLT_TUNING_ALGO_COUNT=100 TE_HIPBLASLT_ALGO_SAVE=tuned.csv python "
                "train.py; then: gemmtune check tuned.csv"
            )
        else:
            step = "until then the CPU can be tuned: gemmtune sweep --backend cpu shapes.csv"
        return Status(name, False, detail, step)
    try:
        return Status(name, True, trial(base.get(name)))
    except (GemmtuneError, ImportError) as e:
        return Status(name, False, str(e), _reinstall())
    except Exception as e:  # whatever a broken library throws is what doctor is asked to report
        return Status(name, False, f"{type(e).__name__}: {e}", _reinstall())


def trial(backend: base.Backend) -> str:
    """Run PROBE by the backend's default algorithm; says what worked. Raises BackendError."""
    import torch

    if reason := backend.unsupported(PROBE):
        raise BackendError(f"{PROBE}: {reason}")
    generator = torch.Generator().manual_seed(0)
    m, n, k = PROBE.m, PROBE.n, PROBE.k
    x, w = torch.randn(n, k, generator=generator), torch.randn(k, m, generator=generator)
    d = torch.full((n, m), float("nan"))
    operands = base.Operands(*(t.to(backend.device) for t in (x, w, d)))
    algos = backend.algos(PROBE)
    backend.launcher(PROBE, algos[0])(operands)
    error = (operands.d.cpu().double() - x.double() @ w.double()).abs().max().item()
    if not error < 1e-3:  # 64 products of about 1 in float32 err by 1e-5; tf32 by 1e-2 is refused
        raise BackendError(f"{PROBE}: the result is off by {error:.3g}")
    return f"{PROBE}: result right, {len(algos)} algorithms ({backend.library()})"


def te_flavour(folder: Path | None = None) -> str:
    """ROCm, CUDA, or "" where Transformer Engine is not installed or its library not found.

    Told by the libraries that its own names, so that it need not be loaded.
    """
    if folder is None:
        spec = importlib.util.find_spec(TE)
        if spec is None or not spec.submodule_search_locations:
            return ""
        folder = Path(next(iter(spec.submodule_search_locations)))
    # An editable build leaves the library beside the package's folder.
    for library in [*folder.rglob(f"lib{TE}*.so"), *folder.parent.glob(f"lib{TE}*.so")]:
        try:
            with open(library, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as b:
                for flavour, needed in (("ROCm", b"libamdhip64"), ("CUDA", b"libcublas")):
                    if b.find(needed) >= 0:
                        return flavour
        except (OSError, ValueError):
            continue
    return ""


def _torch() -> tuple[ModuleType | None, str]:
    try:
        import torch
    except Exception as e:  # a torch for other libraries than those here fails in many ways
        return None, " ".join(str(e).split()) or type(e).__name__
    return torch, ""


def _reinstall() -> str:
    return "pip install --force-reinstall torch numpy; if that does not help, report the line above"


def _gpu(found: Sequence[machine.Gpu], top: Path) -> Fact:
    if found:
        kinds = dict.fromkeys(gpu._replace(uuid="") for gpu in found)
        texts = []
        for kind in kinds:
            count = sum(gpu._replace(uuid="") == kind for gpu in found)
            driver = f"driver {kind.driver}" if kind.driver else "driver version unknown"
            cap = f", power cap {kind.power_cap_w:.0f} W" if kind.power_cap_w else ""
            texts.append(f"{count} x {kind.arch}, {driver}{cap}")
        return Fact("GPU", "; ".join(texts))
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in os.environ and any((top / d).exists() for d in ("dev/nvidiactl", "dev/kfd")):
            hidden = f"none visible ({variable}={os.environ[variable]})"
            return Fact("GPU", hidden, f"unset {variable}")
    if (top / "dev/nvidiactl").exists():
        return Fact("GPU", "an NVIDIA driver, but no GPU answers", "nvidia-smi")
    if _pci(top, "0x10de", "0x0302", "0x0300"):
        return Fact("GPU", "an NVIDIA GPU without a driver", "install NVIDIA's driver: nvidia-smi")
    if _pci(top, "0x1002", "0x1200", "0x0380"):
        step = "ls -l /dev/kfd /dev/dri; in a container: --device=/dev/kfd --device=/dev/dri"
        return Fact("GPU", "an AMD GPU that this process may not use", step)
    return Fact("GPU", "none")


def _pci(top: Path, vendor: str, *classes: str) -> bool:
    """Whether the PCI bus has a device of that vendor and one of those classes."""
    return any(
        machine.read_or_empty(device / "vendor") == vendor
        and machine.read_or_empty(device / "class").startswith(classes)
        for device in top.glob("sys/bus/pci/devices/*")
    )


def _libraries(found: Sequence[machine.Gpu], top: Path) -> Iterator[Fact]:
    """CUDA's and ROCm's GEMM libraries; none of them is missed on a machine without a GPU."""
    vendors = {gpu.vendor for gpu in found}
    site = Path(sysconfig.get_path("platlib"))
    places = {
        ("NVIDIA", "cuBLASLt", "libcublasLt.so*"): (
            *site.glob("nvidia/*/lib"),
            *top.glob("usr/local/cuda*/lib64"),
            *top.glob("usr/local/cuda*/targets/*/lib"),
            *top.glob("usr/lib/*-linux-gnu"),
        ),
        ("AMD", "hipBLASLt", "libhipblaslt.so*"): (*top.glob("opt/rocm*/lib"), site / "torch/lib"),
    }
    for (vendor, name, pattern), folders in places.items():
        files = [file for folder in folders for file in sorted(folder.glob(pattern))]
        if files:  # the longest name gives the whole version
            best = max(files, key=lambda file: len(file.name))
            release = (
                machine.read_or_empty(top / "opt/rocm/.info/version") if vendor == "AMD" else ""
            )
            yield Fact(name, f"{best}" + (f" (ROCm {release})" if release else ""))
        elif vendor in vendors:
            yield Fact(name, "not found", "install the torch that fits this GPU: it brings it")


def _amd(found: Sequence[machine.Gpu]) -> Iterator[Fact]:
    """What an AMD GPU is better served with."""
    if "AMD" not in {gpu.vendor for gpu in found}:
        return
    what, _, step = hipblaslt_ext.missing().partition(": ")
    older = f"cannot be built, {what} (only hipBLASLt before 2025 lists too little without)"
    yield Fact("hipBLASLt's C++ interface", older if what else "can be built", step)
    yield _package("amdsmi", "for the GPU's clock and power")


def _torch_build(torch: ModuleType | None, broken: str, found: Sequence[machine.Gpu]) -> Fact:
    if torch is None:
        return Fact("torch", f"does not load: {broken}", "pip install --force-reinstall torch")
    hip, cuda = torch.version.hip, torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU only"
    value = f"{torch.__version__} ({build}), {torch.get_num_threads()} threads"
    vendors = {gpu.vendor for gpu in found}
    wrong = ("AMD" in vendors and not hip) or ("NVIDIA" in vendors and not cuda)
    if not wrong:
        return Fact("torch", value)
    needed = "ROCm" if "AMD" in vendors else "CUDA"
    step = f"install PyTorch's {needed} build: its site's install selector gives the command"
    return Fact("torch", f"{value}: it cannot use the GPU", step)


def _blas(torch: ModuleType | None) -> Iterator[str]:
    shown = torch.__config__.show() if torch else ""
    for name, pattern in (
        ("oneDNN", r"MKL-DNN v([\d.]+)"),
        ("MKL", r"Math Kernel Library Version ([\d.]+)"),
        ("torch's OpenBLAS", r"BLAS_INFO=open()"),
    ):
        if version := re.search(pattern, shown):
            yield f"{name} {version[1]}".strip()
    try:
        import numpy

        used = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
        yield f"numpy's {used['name']} {used['version']}"
    except Exception:  # no numpy, or one before 1.25, which only prints
        return


def _transformer_engine(found: Sequence[machine.Gpu]) -> Fact:
    name = "Transformer Engine"
    if importlib.util.find_spec(TE):
        version = machine.version_of(TE) or "of unknown version"
        return Fact(name, f"{version} ({te_flavour() or 'its library was not found'})")
    if not found:
        return Fact(name, "not installed (needs a GPU)")
    if found[0].vendor == "AMD":
        step = "in a clone of ROCm/TransformerEngine: pip install --no-build-isolation ."
    else:
        step = f"pip install --no-build-isolation '{TE}[pytorch]'"
    return Fact(name, "not installed (only FP8 training needs it)", step)


def _package(name: str, purpose: str) -> Fact:
    if version := machine.version_of(name):
        return Fact(name, version)
    return Fact(name, f"not installed (needed {purpose})", f"pip install {name}")


def _compiler() -> Fact:
    """The C compiler: CC, else the usual names."""
    name = "C compiler"
    own = shlex.split(os.environ.get("CC", ""))[:1]
    for command in own or ["cc", "gcc", "clang"]:
        if path := shutil.which(command):
            try:
                done = subprocess.run(
                    [path, "--version"], capture_output=True, text=True, timeout=10, check=True
                )
            except (OSError, subprocess.SubprocessError) as e:
                return Fact(name, f"{path} does not run ({e})", "apt install gcc")
            return Fact(name, f"{path}: {done.stdout.splitlines()[0]}")
    missing = f"none: CC={own[0]} is not there" if own else "none (only GPU backends need one)"
    return Fact(name, missing, "unset CC" if own else "apt install gcc")
