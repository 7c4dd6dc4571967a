"""The Lt backends on CPU memory, over fake_cublaslt.c and fake_hipblaslt.c; for workers too."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gemmtune.backends.cublaslt import CublasLt
from gemmtune.backends.hipblaslt import HipblasLt

HERE = Path(__file__).parent
FLAGS = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
LIBRARIES = {"cublaslt": "libcublasLt.so.13", "hipblaslt": "libhipblaslt.so.0"}


def build(vendor: str = "cublaslt", *flags: str) -> Path:
    """The library, built with these flags besides; skips the test where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    out = Path(tempfile.mkdtemp(prefix="fake-lt-")) / LIBRARIES[vendor]
    source = HERE / f"fake_{vendor}.c"
    subprocess.run([compiler, "-std=c11", *FLAGS, *flags, source, "-o", out, "-lm"], check=True)
    return out


class OnCpu:
    """What is taken from a backend so that it runs without a GPU."""

    device = "cpu"

    def __init__(self, path: Path, env: Mapping[str, str] | None = None, **options: Any) -> None:
        self.path, self.env = path, env or {}
        super().__init__(**options)

    def _open(self) -> ctypes.CDLL:
        os.environ.update(self.env)  # in worker processes too, whose server started before
        return ctypes.CDLL(str(self.path))

    def _stream(self) -> int:
        return 0

    def time_us(self, launch, operands, launches):
        start = time.perf_counter_ns()
        for i in range(launches):
            launch(operands[i % len(operands)])
        return (time.perf_counter_ns() - start) / launches / 1e3


class FakeLt(OnCpu, CublasLt):
    def dev_cap(self) -> int:
        return 900


class FakeHip(OnCpu, HipblasLt):
    def dev_cap(self) -> int:
        return 905


FAKES = {"cublaslt": FakeLt, "hipblaslt": FakeHip}
