"""hipBLASLt's "all algorithms", by a small C++ library that is built where ROCm's headers are.

Reads ROCm's headers and the loaded library's path; writes the user's cache folder. Builds of
hipBLASLt from late 2024 on list all algorithms of a problem by the C API already; for older ones
this has those that the list leaves out. Not yet run on an AMD GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from gemmtune.backends.lt_api import Library, Problem
from gemmtune.errors import BackendError
from gemmtune.interposer import build

SOURCE = Path(__file__).with_suffix(".cpp")
HEADER = "hipblaslt/hipblaslt-ext.hpp"
HIPCC = "hipcc"  # takes C++ too
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-D__HIP_PLATFORM_AMD__")
RTLD_DI_LINKMAP = 2  # dlfcn.h


def missing() -> str:
    """What is missing here to build it; "" where nothing is."""
    if headers() is None:
        return f"no ROCm headers ({HEADER}): apt install hipblaslt-dev, or set ROCM_PATH"
    if not build.cxx(HIPCC):
        return f"no C++ compiler ({', '.join((*build.CXX_COMPILERS, HIPCC))}): apt install g++"
    return ""


def headers() -> Path | None:
    """ROCm's include folder, if it is here."""
    named = [os.environ[name] for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    folders = (Path(root) / "include" for root in (*named, "/opt/rocm"))
    return next((folder for folder in folders if (folder / HEADER).is_file()), None)


class Extension:
    """The C++ interface of a loaded hipBLASLt. Raises BackendError where it has another one."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as e:
            raise BackendError(
                f"hipBLASLt's C++ interface is not that of ROCm's headers ({e}): set ROCM_PATH to "
                "the ROCm that torch was built for, or to an empty folder"
            ) from None
        self._all, self._need = loaded.gemmtune_all_algos, loaded.gemmtune_algo_need
        self._all.argtypes = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p)
        self._need.argtypes = (c_void_p,) * 8

    @classmethod
    def of(cls, library: Library) -> Extension | None:
        """None where something is `missing`. Raises BackendError where it cannot be built."""
        include = headers()
        if include is None or missing():
            return None
        against = _path(library.loaded)
        words = [*build.cxx(HIPCC), *FLAGS, f"-I{include}", str(SOURCE), str(against)]
        key = f"{words} {against.stat().st_mtime_ns}".encode() + SOURCE.read_bytes()

        def make(out: Path) -> None:
            build.compiled([*words, "-o", str(out)], SOURCE.name)

        digest = hashlib.sha256(key).hexdigest()[:16]
        return cls(build.cached("hipblaslt_ext", digest, "libhipblaslt_ext.so", make))

    def all(self, problem: Problem) -> Iterator[Any]:
        """Every algorithm that the library has for the problem's types. Raises BackendError."""
        library, g = problem.library, problem.gemm
        ops = (library.vendor.ops[g.trans_a], library.vendor.ops[g.trans_b])
        compute, _, *operands = problem.types
        types = (c_int * 7)(*ops, *operands, compute)
        room, found = 0, c_size_t()
        while True:
            algos: Any = (library.algo_type * room)()
            args = (problem.handle.value, types, algos, room, byref(found))
            library.judge("_ext::getAllAlgos", self._all(*args))
            if found.value <= room:
                return iter(algos[: found.value])
            room = found.value

    def need(self, problem: Problem, algo: Any) -> int | None:
        """The workspace that an algorithm needs; None where it cannot run the problem."""
        need = c_size_t()
        args = (
            problem.handle.value,
            problem.desc.value,
            *problem.layouts,
            byref(algo),
            byref(need),
        )
        return None if self._need(*args) else need.value


class _LinkMap(ctypes.Structure):
    _fields_: ClassVar = [("addr", c_void_p), ("name", c_char_p)]


def _path(loaded: ctypes.CDLL) -> Path:
    """The file of a loaded library: what is linked to it finds the same one again."""
    found = POINTER(_LinkMap)()
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = (c_void_p, c_int, c_void_p)
    if dlinfo(loaded._handle, RTLD_DI_LINKMAP, byref(found)):
        raise BackendError("hipBLASLt is loaded, and from which file cannot be told")
    return Path(os.fsdecode(found.contents.name))
