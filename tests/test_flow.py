"""Capture, sweep, replay and run of a job whose GEMMs go through the interposer: over the fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, torchrun
from fake_lt import FakeLt
from fakes import HERE, fakes

from gemmtune import table
from gemmtune.sweep import run
from gemmtune.sweep.plan import Options
from gemmtune.table import Shape, Table, Tuned

# The job gives its calls algorithm 20; each call is held up by its algorithm's microseconds.
SPEED = {"FAKE_LT_US": "20:3000,66:300,67:300"}
HERE_NOW = {"arch": "Fake H200 sm_90", "library": "cuBLASLt 13.1.1"}
TRAIN = """
import os, sys, torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions.gemm import Linear
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(Linear(32, 32, torch.bfloat16) for _ in range(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 32).bfloat16()
for step in range(int(sys.argv[1])):
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item().hex())
"""


class Job:
    """A folder with the job, on a machine that looks like one with a GPU."""

    def __init__(self, folder: Path, gemmtune: Run) -> None:
        self.folder, self._gemmtune = folder, gemmtune
        self.fakes = fakes("cublaslt", folder / "fakes")
        (folder / "train.py").write_text(TRAIN)
        own = os.pathsep.join(map(str, (HERE / "fake_gpu", HERE)))
        self.env = {
            "PYTHONPATH": os.pathsep.join((str(HERE.parent), own)),
            "GEMMTUNE_TEST_FAKES": str(self.fakes),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **SPEED,
        }

    def __call__(self, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self._gemmtune(*args, cwd=self.folder, code=code, **self.env)

    def table(self, name: str, **machine: str) -> str:
        """The tuned table, said to be made on another machine."""
        made = table.read(self.folder / "tuned.csv", Tuned)
        about = {**made.provenance, "machine": {**HERE_NOW, **machine}}
        table.write(self.folder / name, made.rows, Tuned, about)
        return name


@pytest.fixture(scope="module")
def job(gemmtune: Run, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("flow"), gemmtune)


@pytest.fixture(scope="module")
def captured(job: Job) -> Table[Shape]:
    job("capture", "--time", "--steps", "2", "--", *torchrun(), "train.py", "4")
    return table.read(job.folder / "shapes.csv", Shape)


@pytest.fixture(scope="module")
def tuned(job: Job, captured: Table[Shape]) -> Table[Tuned]:
    backend = FakeLt(job.fakes / "libcublasLt.so.13", SPEED, explored=0)
    candidates, made = job.folder / "candidates.csv", job.folder / "tuned.csv"
    here = {k: v for k, v in captured.provenance.items() if k != "machine"}  # it is the CPU's
    shapes = captured._replace(provenance=here)
    run.sweep(shapes, backend, candidates, made, Options(seconds_per_shape=1.0, force=True))
    job.table("tuned.csv")
    return table.read(made, Tuned)


def test_capture_has_every_call_of_both_ranks_with_its_default(captured: Table[Shape]) -> None:
    found: dict[tuple[Any, ...], float] = {}
    for row in captured.rows:
        key = row.pass_, row.site, row.ranks, row.default.partition(" ")[0], row.gemm.api
        found[key] = found.get(key, 0) + row.calls
    want = {(p, s) for p in ("fprop", "dgrad", "wgrad") for s in "01"}

    assert found == {(p, s, "0-1", "id=20", "lt"): 1 for p, s in want}


def test_shapes_of_another_machine_are_swept_against_the_librarys_own_default(
    job: Job, captured: Table[Shape], tmp_path: Path
) -> None:
    assert captured.provenance["machine"].items() >= HERE_NOW.items()
    backend = FakeLt(job.fakes / "libcublasLt.so.13", SPEED, explored=0)
    options = Options(seconds_per_shape=0.2, top=1, force=True)
    events: list[Any] = []
    tables = tmp_path / "c.csv", tmp_path / "t.csv"
    run.sweep(captured, backend, *tables, options, events.append)
    said = [event.note for event in events if "were captured elsewhere" in event.note]
    assert len(said) == 1 and "processor: Fake H200 sm_90 when the table was made" in said[0]
    assert backend.given == {}


def test_replay_of_the_swept_table_is_faster_with_its_rows_launched(job: Job, tuned) -> None:
    assert tuned.rows and {row.algo.algo_id for row in tuned.rows} <= {66, 67}
    words = ("--pairs", "3", "--aa-pairs", "2", "--block", "4", "-o", "replay.json")
    done = job("replay", "tuned.csv", *words, "--", *torchrun(), "train.py", "500")
    assert done.stdout.splitlines()[-1].startswith("faster by ")
    values = json.loads((job.folder / "replay.json").read_text())
    assert all(row["ranks"] == [0, 1] and row["calls"] > 0 for row in values["rows"])


def test_run_launches_the_rows_on_all_ranks(job: Job, tuned) -> None:
    plain = job("run", job.table("as-is.csv"), "--", sys.executable, "train.py", "6")
    done = job("run", "tuned.csv", "--", *torchrun(), "train.py", "6")
    rows = len(tuned.rows)
    assert f"{rows} of {rows} rows used, on 2 ranks, 6 calls per step" in done.stderr
    assert f"{rows} of {rows} rows used, on 1 rank, 6 calls per step" in plain.stderr


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"library": "cuBLASLt 12.6.4"}, "GEMM library: cuBLASLt 12.6.4 when the table was made"),
        ({"arch": "NVIDIA A100 sm_80"}, "processor: NVIDIA A100 sm_80 when the table was made"),
    ],
)
def test_a_table_of_another_build_or_gpu_is_left_out_or_refused(job: Job, tuned, machine, words):
    foreign = job.table("foreign.csv", **machine)
    alone = ("--", sys.executable, "train.py", "3")
    done = job("run", foreign, "--", *torchrun(), "train.py", "3")
    assert done.stdout.count("loss ") == 2
    loud = [line for line in done.stderr.splitlines() if "goes on untuned" in line]
    assert len(loud) == 1 and words in loud[0]
    assert f"0 of {len(tuned.rows)} rows used: {words}" in done.stderr
    for start in ((sys.executable,), tuple(torchrun())):
        strict = job("run", "--strict", foreign, "--", *start, "train.py", "3", code=3)
        assert "loss" not in strict.stdout and strict.stderr.count(words) == 1
    replay = job("replay", foreign, *alone, code=3)
    assert "loss" not in replay.stdout and f"cannot be replayed here: {words}" in replay.stderr


def test_a_job_that_lost_the_interposer_runs_untuned_or_is_refused(job: Job, tuned) -> None:
    start = ("--", "env", "-u", "LD_PRELOAD", sys.executable, "train.py", "2")
    done = job("run", "tuned.csv", *start)
    loud = [line for line in done.stderr.splitlines() if "goes on untuned" in line]
    assert "loss" in done.stdout and len(loud) == 1
    assert "cannot be applied (the interposer is not in this process" in loud[0]
    strict = job("run", "--strict", "tuned.csv", *start, code=3)
    assert "loss" not in strict.stdout and "refused, as --strict asks" in strict.stderr
