"""replay and run of a job whose GEMMs are in CUDA graphs: over the stand-ins for its libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import Run
from fakes import HERE, fakes
from interposer_job import algo, gemm

from gemmtune.table import WS_MAX, Tuned, write

# One GEMM through cuBLASLt and one through cuBLAS a step; with "graph" they are captured once, and
# the graph's launches in the other steps are calls of neither.
TRAIN = """
import ctypes, sys
from pathlib import Path
import torch
import fake_calls

job = fake_calls.library(Path(sys.argv[1]))
made = [fake_calls.spec(stream=1), fake_calls.spec(api=1, stream=1)]
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for step in range(int(sys.argv[2])):
    job.fake_capture(len(sys.argv) > 3)
    for spec in made if len(sys.argv) <= 3 or not step else ():
        assert not job.job_gemm(ctypes.byref(spec), 1, ctypes.byref(ctypes.c_float()))
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = fakes("cublaslt", tmp_path_factory.mktemp("fakes"))
    (made / "train.py").write_text(TRAIN)
    rows = [Tuned(900, gemm(api=api), 0, WS_MAX, algo(20)) for api in ("lt", "gemmex")]
    write(made / "tuned.csv", rows, Tuned, {"backend": "cublaslt"})
    return made


def said(gemmtune: Run, folder: Path, *words: str, steps: str, code: int = 0) -> list[str]:
    env = {
        "PYTHONPATH": f"{HERE / 'fake_gpu'}:{HERE}:{HERE.parent}",
        "GEMMTUNE_TEST_FAKES": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    job = ("--", sys.executable, "train.py", str(folder), *steps.split())
    done = gemmtune(*words, *job, cwd=folder, code=code, **env)
    return (done.stdout + done.stderr).splitlines()


QUICK = ("--pairs", "2", "--aa-pairs", "2", "--block", "3", "--warmup", "2")


def test_a_replay_says_that_arms_cannot_take_turns_inside_a_graph(
    gemmtune: Run, folder: Path
) -> None:
    lines = said(gemmtune, folder, "replay", "tuned.csv", *QUICK, steps="100 graph", code=2)
    (verdict,) = (line for line in lines if line.startswith("nothing was compared"))
    assert "CUDA graphs" in verdict and "gemmtune replay --a" in verdict
    plain = said(gemmtune, folder, "replay", "tuned.csv", *QUICK, steps="100")
    assert "2 of 2 rows launched" in plain and not any("CUDA graph" in line for line in plain)


def test_rows_are_launched_as_a_graph_is_captured(gemmtune: Run, folder: Path) -> None:
    lines = said(gemmtune, folder, "run", "tuned.csv", steps="4 graph")
    assert (
        "gemmtune: 2 of 2 rows used, on 1 rank, 0.5 calls per step, 2 of 2 as CUDA graphs were"
        " captured, which repeat them"
    ) in lines
    plain = said(gemmtune, folder, "run", "tuned.csv", steps="4")
    assert "gemmtune: 2 of 2 rows used, on 1 rank, 2 calls per step" in plain
