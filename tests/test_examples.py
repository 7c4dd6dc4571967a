"""The example in every command's help does what it says, typed into a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_cli_help import example

from gemmtune import table
from gemmtune.cli import COMMANDS
from gemmtune.table import Shape, Tuned

FIXTURES = Path(__file__).parent / "fixtures" / "te_csv"
TRAIN = """
import sys, torch
torch.manual_seed(0)
rate = float(sys.argv[2]) if sys.argv[1:2] == ["--lr"] else 0.1
layer = torch.nn.Linear(96, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
for _ in range(400):
    layer(torch.randn(48, 96)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def shell(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command's example in a folder, as in a shell of an activated environment."""
    line = " ".join(example(name))
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    return subprocess.run(
        f"python -m gemmtune {line}",
        shell=True,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the examples of capture and sweep were run, one after the other."""
    folder = tmp_path_factory.mktemp("workflow")
    (folder / "train.py").write_text(TRAIN)
    for name in ("capture", "sweep"):
        done = shell(name, folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_examples_of_capture_and_sweep_make_the_tables(workflow: Path) -> None:
    assert len(table.read(workflow / "shapes.csv", Shape).rows) == 2  # fprop and wgrad
    assert table.read(workflow / "tuned.csv", Tuned).provenance["stage"] == "sweep"


@pytest.mark.slow
def test_example_of_replay_comes_to_a_verdict(workflow: Path) -> None:
    done = shell("replay", workflow)
    assert done.returncode in (0, 1), done.stderr
    assert any(word in done.stdout for word in ("faster by", "no difference", "slower by"))


@pytest.mark.slow
def test_example_of_tune_says_what_was_gained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("range(400)", "range(100000)"))
    done = shell("tune", tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("The step is faster by" in done.stdout) != ("Nothing to apply" in done.stdout)
    assert table.read(tmp_path / "tune" / "tuned.csv", Tuned).provenance["stage"] == "tune"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "env"])
def test_examples_of_run_and_env_apply_the_table(name: str, workflow: Path) -> None:
    done = shell(name, workflow)
    assert done.returncode == 0, done.stderr
    assert ("trained" if name == "run" else "export GEMMTUNE_JOB=") in done.stdout


@pytest.mark.parametrize(
    ("name", "made"), [("check", None), ("convert", "te.csv"), ("merge", None)]
)
def test_examples_on_tables_of_transformer_engine(name: str, made: str | None, tmp_path: Path):
    for copy in ("tuned.csv", "tuned-rank0.csv", "tuned-rank1.csv"):
        shutil.copy(FIXTURES / "v1_good.csv", tmp_path / copy)
    done = shell(name, tmp_path)
    assert done.returncode == 0, done.stderr
    good = (FIXTURES / "v1_good.csv").read_text().splitlines()
    result = (tmp_path / (made or "tuned.csv")).read_text().splitlines()
    assert [line for line in good if line[0] != "#"] == [line for line in result if line[0] != "#"]


def test_example_of_import_makes_a_table(tmp_path: Path) -> None:
    shutil.copy(FIXTURES.parent / "logs" / "hipblaslt_bench.log", tmp_path / "hipblaslt.log")
    done = shell("import", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = table.read(tmp_path / "shapes.csv", Shape).rows
    assert (len(rows), rows[0].calls) == (6, 0.1)


def test_example_of_doctor_is_json(tmp_path: Path) -> None:
    done = shell("doctor", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_every_command_is_among_these() -> None:
    workflow = {"tune", "capture", "sweep", "replay", "run", "env"}
    assert set(COMMANDS) == workflow | {"import", "check", "convert", "merge", "doctor"}
