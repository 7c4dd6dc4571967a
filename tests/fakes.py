"""Builds the fakes of the vendors' libraries and of a job that is linked to them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import fake_lt
import pytest

from gemmtune.errors import BackendError
from gemmtune.interposer import build

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror")


def cc(out: Path, *words: str | Path) -> Path:
    try:
        compiler = build.compiler()
    except BackendError as e:
        pytest.skip(str(e))
    subprocess.run([*compiler, *FLAGS, *words, "-o", out], check=True)
    return out


def fakes(vendor: str, folder: Path, *flags: str) -> Path:
    """The libraries under their real names, the interposer, and a job's library."""
    folder.mkdir(exist_ok=True)
    hip = vendor == "hipblaslt"
    flags = (*flags, *["-DHIP"] * hip)

    def shared(name: str, source: str, *needs: Path) -> Path:
        tied = ("-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}")
        source_file = HERE / source
        return cc(folder / name, *flags, "-shared", "-fPIC", source_file, *tied, *needs, "-lm")

    lt = shared(fake_lt.LIBRARIES[vendor], f"fake_{vendor}.c")
    driver = shared("libamdhip64.so.6" if hip else "libcuda.so.1", "fake_cuda.c")
    blas = [] if hip else [shared("libcublas.so.13", "fake_cublas.c", lt)]
    shared("libjob.so", "interposer_job.c", *blas, lt, driver)
    build.compile_to(folder / build.NAME, (*build.WARNINGS, *flags, *[build.HIP] * hip))
    return folder


def environment(folder: Path, *paths: Path, **more: str) -> dict[str, str]:
    """That of a process which the folder's interposer is preloaded into."""
    modules = os.pathsep.join(map(str, (HERE.parent, HERE, *paths)))
    preload = {"LD_PRELOAD": str(folder / build.NAME), "GEMMTUNE_TEST_FAKES": str(folder)}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules, **preload, **more}
