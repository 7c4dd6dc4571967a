"""The kernels of mm and bmm on a CPU that note their calls, in C++: built once for each torch.

They are a Python module (noting.cpp), made of torch's headers with the C++ compiler found. Building
takes some seconds, so `gemmtune capture` does it before the job begins, and the job has it only
where it is there. Without it, all is noted in Python (ops.Recorder), which costs a short step more.
Torch is looked at from outside: it is not imported here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from gemmtune.errors import BackendError
from gemmtune.interposer import build
from gemmtune.job.files import complain

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("torch_python", "torch_cpu", "c10")
NAME = "noting.so"
# What hands out the kernel that is there (torch 2.9 and later), and where it is declared.
NEEDED = "SafeKernelFunction"
HEADER = "ATen/core/boxing/KernelFunction.h"


def prepare(say: Callable[[str], None]) -> None:
    """Build the module where it is not yet in the cache; `say` is told so, or why it cannot be."""
    torch = _torch()
    if torch is None or _made(torch).exists():
        return
    if build.cxx():
        say("building capture's C++ part, once for this torch: some 15 seconds")
    try:
        library()
    except BackendError as error:
        say(f"{error}. Recording works without it, in Python, and costs a short step more")


def library() -> Path | None:
    """The module's path, built where it is not yet in the cache; None where torch is too old.

    Raises BackendError: no C++ compiler, a compiler or headers that refuse, a full cache.
    """
    torch = _torch()
    if torch is None:
        return None
    if not build.cxx():
        named = os.environ.get("CXX") or ", ".join(build.CXX_COMPILERS)
        raise BackendError(f"no C++ compiler ({named}) for capture's C++ part: apt install g++")

    def make(out: Path) -> None:
        build.compiled([*words(torch), "-o", str(out)], "capture's C++ part")

    return build.cached("noting", _digest(torch), NAME, make)


def words(torch: Path) -> list[str]:
    """The compiler's command line against a torch's folder, without where it writes to."""
    return [
        *(*build.cxx(), *FLAGS, str(SOURCE)),
        *("-isystem", str(torch / "include"), "-isystem", sysconfig.get_paths()["include"]),
        *(f"-L{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
    ]


def load() -> Any:
    """The module, where it has been built; else None."""
    torch = _torch()
    path = _made(torch) if torch is not None else None
    if path is None or not path.exists():
        return None
    loader = ExtensionFileLoader("noting", str(path))
    spec = importlib.util.spec_from_loader("noting", loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        complain("loading capture's C++ part", error)
        return None
    return module


def _torch() -> Path | None:
    """The folder of a torch that has what is needed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    folder = Path(spec.origin).parent
    try:
        return folder if NEEDED in (folder / "include" / HEADER).read_text() else None
    except OSError:
        return None


def _made(torch: Path) -> Path:
    return build.cache("noting", _digest(torch)) / NAME


def _digest(torch: Path) -> str:
    """Of all that the module is made from: another torch or Python has another module."""
    here = platform.machine(), *platform.libc_ver(), sysconfig.get_config_var("SOABI")
    made_for = f"{FLAGS} {torch} {here}".encode()
    version = (torch / "version.py").read_bytes()
    return hashlib.sha256(made_for + version + SOURCE.read_bytes()).hexdigest()[:16]
