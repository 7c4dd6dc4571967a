"""capture, sweep, replay and run of a job that calls cuBLASLt and cuBLAS, over their stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_interposer import HERE, fakes

from gemmtune.backends import blas
from gemmtune.errors import BackendError
from gemmtune.interposer import build
from gemmtune.table import Shape, Tuned, read

# Each step launches the first twice through cuBLASLt, by way of what a Transformer Engine would
# call, and the second three times through cuBLAS, by way of nothing that Python knows.
TRAIN = """
import ctypes, sys, types
from pathlib import Path
import torch
import interposer_job

job = ctypes.CDLL(sys.argv[1] + "/libjob.so")
job.job_gemm.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
kinds = {"type_a": 14, "type_b": 14, "type_d": 14}
own = interposer_job.spec(16, 8, 16, settings=(66, 20, 1, 0, 0, 0, 0, 0, 0), **kinds)
older = interposer_job.spec(16, 8, 32, api=1, **kinds)

def run(spec, times):
    out = ctypes.c_float()
    assert not job.job_gemm(ctypes.byref(spec), times, ctypes.byref(out))

class Linear(torch.nn.Module):
    def forward(self, x):
        w, x8 = torch.ones(16, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        more = (False, None, False, None, 4096, False, True)
        te.tex.generic_gemm(w, True, x8, False, *[None] * 5, *more)
        run(older, 3)
        return x * self.weight

te = types.ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")
te.tex = types.SimpleNamespace(generic_gemm=lambda *args: run(own, 2))
sys.modules[te.__name__] = te
model = torch.nn.Sequential(Linear())
model[0].weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[2])):
    if "graph" in sys.argv:  # as a CUDA graph: after one capture nothing is called any more
        own.stream = older.stream = 1
        job.fake_capture(1)
        run = run if step < 1 else lambda *_: None
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    print("loss", model[0].weight.item())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        build.compiler()
    except BackendError as e:
        pytest.skip(str(e))
    made = fakes("cublaslt", tmp_path_factory.mktemp("flow"))
    (made / "train.py").write_text(TRAIN)
    words = ("--warmup", "1", "--steps", "2", "--time", "-o", "shapes.csv", *BACKEND)
    done = gemmtune(made, "capture", *words, steps="5")
    assert done.returncode == 0, done.stderr
    done = python(made, "-c", SWEEP)
    assert done.returncode == 0, done.stderr
    return made


BACKEND = ("--backend", "cublaslt")
QUICK = ("--pairs", "2", "--aa-pairs", "2", "--block", "3", "--warmup", "2")
# By the library, as the command refuses a GPU's shapes where operands are on the CPU.
SWEEP = """
from gemmtune.backends import base
from gemmtune.sweep import plan, run
from gemmtune.table import Shape, read
options = plan.Options(seconds_per_shape=2, force=True)
run.sweep(read("shapes.csv", Shape), base.get("cublaslt"), "candidates.csv", "tuned.csv", options)
"""


def gemmtune(folder: Path, *words: str, steps: str) -> subprocess.CompletedProcess[str]:
    job = ("--", sys.executable, "train.py", str(folder), *steps.split())
    return python(folder, "-m", "gemmtune", *words, *job)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    libraries = ("libcublasLt.so.13", "libcublas.so.13", "libcuda.so.1")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "lt_on_cpu", HERE, HERE.parent))),
        "LD_PRELOAD": ":".join(str(folder / name) for name in libraries),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "FAKE_LT_US": "66:60,67:500,20:2000",
    }
    argv = (sys.executable, *words)
    return subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_capture_has_the_librarys_own_calls_with_torchs_pass_and_site(folder: Path) -> None:
    shapes = read(folder / "shapes.csv", Shape)
    seen = {(r.gemm.api, r.pass_, r.site): (r.gemm.k, r.calls) for r in shapes.rows}
    assert seen == {("lt", "fprop", "0"): (16, 2), ("gemmex", "other", ""): (32, 3)}
    given = {r.gemm.api: r.default for r in shapes.rows}
    assert given["lt"].startswith("id=66 tile=20") and not given["gemmex"]
    assert all(r.time_us > 0 and r.gemm.ws_bytes == 4096 for r in shapes.rows)


@pytest.mark.slow
def test_its_rows_are_launched_in_replay_and_run(folder: Path) -> None:
    tuned = read(folder / "tuned.csv", Tuned)
    # The job's own algorithm is among the fastest; cuBLAS takes the stand-in's slow favourite.
    (row,) = [r for r in tuned.rows if r.gemm.api == "gemmex"]
    assert row.algo != blas.PLAIN and row.algo.config.startswith("id=66")
    rows = f"{len(tuned.rows)} of {len(tuned.rows)} row{'s' * (len(tuned.rows) > 1)}"
    done = gemmtune(folder, "replay", "tuned.csv", *QUICK, *BACKEND, steps="100")
    assert f"{rows} launched" in done.stdout, done.stderr
    assert re.search(r"^ +\d+ .*id=66 .* 3 +[\d.]+ +[\d.]+ +\+\d+", done.stdout, re.MULTILINE)
    done = gemmtune(folder, "run", "tuned.csv", *BACKEND, steps="4")
    calls = 3 + 2 * (len(tuned.rows) - 1)
    assert done.returncode == 0
    assert f"{rows} used, on 1 rank, {calls} calls per step" in done.stderr


@pytest.mark.slow
def test_a_replay_says_that_arms_cannot_take_turns_inside_a_cuda_graph(folder: Path) -> None:
    done = gemmtune(folder, "replay", "tuned.csv", *QUICK, *BACKEND, steps="100 graph")
    assert done.returncode == 2
    assert "nothing was compared: the job's GEMMs are in CUDA graphs" in done.stdout
    run = gemmtune(folder, "run", "tuned.csv", *BACKEND, steps="4 graph")
    rows = len(read(folder / "tuned.csv", Tuned).rows)
    assert f"{rows} of {rows} row" in run.stderr  # applied as the graph is captured


@pytest.mark.slow
def test_a_table_of_another_build_is_left_out_with_one_line(folder: Path) -> None:
    shape = read(folder / "tuned.csv", Tuned)
    text = (folder / "tuned.csv").read_text()
    library = shape.provenance["machine"]["library"]
    (folder / "other.csv").write_text(text.replace(json.dumps(library), '"cuBLASLt 12.9.0"'))
    done = gemmtune(folder, "run", "other.csv", steps="2")
    (said, used) = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout.count("loss") == 2
    assert "GEMM library: cuBLASLt 12.9.0 when the table was made" in said
    assert said.endswith("the job goes on untuned") and " 0 of " in used
    assert gemmtune(folder, "run", "--strict", "other.csv", steps="2").returncode == 3
    assert gemmtune(folder, "replay", "other.csv", steps="2").returncode == 3
