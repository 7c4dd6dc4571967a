"""hipBLASLt: AMD's names, numbers and sizes for the Lt API, and what its C API does otherwise.

Numbers are those of hipblaslt.h and hipblas-common.h (ROCm 6.2 to 7) and hip/library_types.h, what
the functions do is that of rocblaslt_auxiliary.cpp, all in ROCm/rocm-libraries, projects/hipblaslt.
Events and memory are torch's, which on a ROCm build are HIP's. This path has been run over a strict
stand-in for the library (tests/fake_lt.c), and never yet on an AMD GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from gemmtune import machine
from gemmtune.backends.hipblaslt_ext import Extension
from gemmtune.backends.lt import Lt, spell
from gemmtune.backends.lt_api import Attribute, Config, Problem, Vendor
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm

HIPBLASLT = Vendor(
    title="hipBLASLt",
    prefix="hipblasLt",
    # The last is what torch's wheels for ROCm carry.
    libraries=("libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"),
    missing="install PyTorch's ROCm build: its site's install selector gives the command",
    capability=r"gfx([0-9]+)([0-9a-f])[0-9a-f]",  # gfx942 is 9.4
    algo_words=3,  # 16 bytes, and a size_t
    statuses={
        1: "HIPBLAS_STATUS_NOT_INITIALIZED",
        2: "HIPBLAS_STATUS_ALLOC_FAILED",
        3: "HIPBLAS_STATUS_INVALID_VALUE",
        4: "HIPBLAS_STATUS_MAPPING_ERROR",
        5: "HIPBLAS_STATUS_EXECUTION_FAILED",
        6: "HIPBLAS_STATUS_INTERNAL_ERROR",
        7: "HIPBLAS_STATUS_NOT_SUPPORTED",
        8: "HIPBLAS_STATUS_ARCH_MISMATCH",
        9: "HIPBLAS_STATUS_HANDLE_IS_NULLPTR",
        10: "HIPBLAS_STATUS_INVALID_ENUM",
        11: "HIPBLAS_STATUS_UNKNOWN",
    },
    ops={"N": 111, "T": 112},
    types={
        "float32": 0,
        "float16": 2,
        "bfloat16": 14,
        "float8e4m3": 28,
        "float8e5m2": 29,
    },
    compute={"f32": 2},  # HIPBLAS_COMPUTE_32F
    epilogues={
        "-": 1,
        "bias": 4,
        "geluaux": 160,
        "geluauxbias": 164,
        "dgelu": 192,
        "dgelubgrad": 208,
        "bgradb": 512,
    },
    layout={
        "batch": Attribute(0, c_int32),
        "stride": Attribute(1, c_int64),
    },
    desc={  # no fast accumulation: it has one way to add up
        "trans_a": Attribute(0, c_int32),
        "trans_b": Attribute(1, c_int32),
        "epilogue": Attribute(2, c_uint32),
        "bias": Attribute(3, c_void_p),
        "bias_type": Attribute(4, c_int32),
        "a_scale": Attribute(5, c_void_p),
        "b_scale": Attribute(6, c_void_p),
        "gelu_in": Attribute(10, c_void_p),
        "gelu_ld": Attribute(11, c_int64),
    },
    preference={"workspace": Attribute(1, c_uint64)},
    workspace_bytes=32 << 20,  # what Transformer Engine gives a call on gfx9
    heuristics=10_000,  # it fills up what it finds best with all others that can run the problem
    # The first 8 bytes are Transformer Engine's algo_id: the solution's index, of 4 bytes. In the
    # others the workspace that a launch is held to lies here or there, from build to build.
    words=("id", "second", "third"),
)
FNUZ = {"float8e4m3": 1000, "float8e5m2": 1001}


class HipblasLt(Lt):
    """hipBLASLt on this process's first GPU. Not yet run on an AMD GPU."""

    name = "hipblaslt"
    vendor = HIPBLASLT
    version_needs_device = True  # hipblasLtGetVersion wants a handle, which is a device's
    _extension: Extension | None = None

    def table(self) -> Vendor:
        """FP8 is FNUZ on gfx942 and OCP on gfx950."""
        found = machine.gpus()
        if found and machine.fnuz(found[0].capability):
            return self.vendor._replace(types={**self.vendor.types, **FNUZ})
        return self.vendor

    def _version(self, loaded: ctypes.CDLL) -> str:
        """The version and the revision: solutions' indices hold for one revision."""
        library = self._loaded()
        if self._handle is None:
            self._wake()
        handle = self._handle or library.create("")
        number, revision = c_int(), ctypes.create_string_buffer(256)
        library.call("GetVersion", handle.value, ctypes.byref(number))
        library.call("GetGitRevision", handle.value, revision)
        major, rest = divmod(number.value, 100_000)
        return f"{major}.{rest // 100}.{rest % 100}-{revision.value.decode(errors='replace')}"

    def unlisted(self, gemm: Gemm, algo: Algo) -> bool:
        """Whether an algorithm of `algos` is beyond the list that the library gives a job."""
        return algo.aidx >= self._listed[gemm]

    def _beyond(self, problem: Problem, chosen: Sequence[Config]) -> Iterable[tuple[Config, int]]:
        """All others that the library has for these types, where its C++ interface can be built."""
        extension = self._extend()
        known = {config["id"] for config in chosen}
        for algo in extension.all(problem) if extension else ():
            config = {**chosen[0], "id": problem.settings(algo)["id"]}  # held to that workspace
            if config["id"] in known or extension is None:
                continue
            need = extension.need(problem, problem.algo(config))
            if need is not None and need <= problem.workspace_bytes:
                yield config, need

    def _need(self, problem: Problem, algo: Any) -> int:
        """No function of the C API checks an algorithm: what the library lists can run."""
        listed = problem.needs.get(bytes(algo))
        if listed is not None:
            return listed
        extension = self._extend()
        found = extension.need(problem, algo) if extension else None
        if found is None:
            spelled = spell(problem.settings(algo))
            raise BackendError(f"hipBLASLt does not list {spelled} for {problem.gemm}")
        return found

    def _extend(self) -> Extension | None:
        if self._extension is None:
            self._extension = Extension.of(self._loaded())
        return self._extension
