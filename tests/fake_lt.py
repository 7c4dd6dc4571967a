"""The cuBLASLt backend on CPU memory, over fake_cublaslt.c; workers can import it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from gemmtune.backends.cublaslt import CublasLt

SOURCE = Path(__file__).with_name("fake_cublaslt.c")
FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def build(*flags: str) -> Path:
    """The library, built with these flags besides; skips the test where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    out = Path(tempfile.mkdtemp(prefix="fake-lt-")) / "libcublasLt.so.13"
    subprocess.run([compiler, *FLAGS, *flags, SOURCE, "-o", out, "-lm"], check=True)
    return out


class FakeLt(CublasLt):
    device = "cpu"

    def __init__(self, path: Path, **options: int | str) -> None:
        self.path = path
        super().__init__(**options)  # type: ignore[arg-type]

    def dev_cap(self) -> int:
        return 900

    def _open(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.path))

    def _stream(self) -> int:
        return 0

    def time_us(self, launch, operands, launches):
        start = time.perf_counter_ns()
        for i in range(launches):
            launch(operands[i % len(operands)])
        return (time.perf_counter_ns() - start) / launches / 1e3
