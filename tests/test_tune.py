"""`gemmtune tune`: the three stages in one, resumed, and never a table that the step lost by."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from gemmtune import table
from gemmtune.cli.tune import Stages
from gemmtune.errors import UsageError
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep.budget import parse_duration
from gemmtune.table import Shape, Tuned
from gemmtune.textfile import hold

TRAIN = """
import torch
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 96, bias=False))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
for _ in range(100000):
    layers(torch.randn(48, 96)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
JOB = ("python", "train.py")


def gemm(m: int) -> Gemm:
    return Gemm(m, 8, 4, "N", "N", *("float32",) * 3, "-", m, 4, m, api="mm")


def row(m: int, config: str = "split-n2") -> Tuned:
    return Tuned(0, gemm(m), 0, table.WS_MAX, Algo(m, 1, config), 8.0, 10.0, 1.1, 1.3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder where capture and sweep are done."""
    table.write(tmp_path / "shapes.csv", [], Shape, {"command": list(JOB)})
    table.write(tmp_path / "swept.csv", [row(16), row(32), row(48)], Tuned, {"stage": "sweep"})
    return tmp_path


def replayed(folder: Path, kind: str, drop: tuple[int, ...] = (), rows: int | None = None) -> None:
    """Leave the file of a replay of what trial.csv holds."""
    tried = table.read(folder / "trial.csv", Tuned).rows[:rows]
    cells = [{"gemm": r.gemm._asdict(), "config": r.algo.config} for r in tried]
    verdict = {"kind": kind, "text": f"{kind} by 2.0 % [1.0, 3.0]", "drop": drop}
    (folder / "replay.json").write_text(json.dumps({"rows": cells, "verdict": verdict}))


def test_a_verdict_counts_for_the_rows_that_were_replayed_alone(folder: Path) -> None:
    stages = Stages(folder, JOB, 0, fresh=False)
    rows = stages.try_out()
    assert [config for _, config in rows] == ["split-n2"] * 3
    assert stages.judged(rows) is None
    replayed(folder, "faster", rows=2)
    assert stages.judged(rows) is None
    replayed(folder, "unknown")
    assert stages.judged(rows) is None
    replayed(folder, "faster")
    assert (stages.judged(rows) or {})["kind"] == "faster"
    (folder / "replay.json").write_text('{"rows": [')  # a full disk
    assert stages.judged(rows) is None


def test_rows_that_made_the_step_slower_stay_out(folder: Path) -> None:
    stages = Stages(folder, JOB, 0, fresh=False)
    assert len(stages.try_out()) == 3
    text = (folder / "trial.csv").read_text().splitlines()
    line = next(i for i, cells in enumerate(text, 1) if cells.startswith("0,32,"))
    stages.drop([line])
    again = Stages(folder, JOB, 0, fresh=False)
    assert [gemm.m for gemm, _ in again.try_out()] == [16, 48]
    again.drop([])
    assert Stages(folder, JOB, 0, fresh=False).try_out() == []


def test_only_a_faster_step_fills_the_table_to_use(folder: Path) -> None:
    stages = Stages(folder, JOB, 0, fresh=False)
    stages.try_out()
    for kind, count in (("faster", 3), ("no difference", 0)):
        stages.conclude({"kind": kind, "text": kind, "drop": []})
        assert len(table.read(folder / "tuned.csv", Tuned).rows) == count
    stages.conclude(None)
    assert table.read(folder / "tuned.csv", Tuned).rows == []


def test_shapes_of_another_job_are_refused(folder: Path) -> None:
    assert Stages(folder, JOB, 0, fresh=False).captured()
    with pytest.raises(UsageError, match=r"shapes.csv is of another job \(python train.py\)"):
        Stages(folder, ("python", "other.py"), 0, fresh=False).captured()


def test_starting_over_keeps_the_old_folder(folder: Path) -> None:
    inner = folder / "tune"
    inner.mkdir()
    for _ in range(2):
        (inner / "shapes.csv").write_text("old")
        assert not Stages(inner, JOB, 0, fresh=True).captured()
    assert (folder / "tune.old" / "shapes.csv").read_text() == "old"
    assert (folder / "tune.old2" / "shapes.csv").read_text() == "old"


def test_time_spent_counts_over_all_runs(folder: Path) -> None:
    (folder / "tune.json").write_text('{"spent_s": {"capture": 10.0, "sweep": 25.0}}')
    stages = Stages(folder, JOB, 60, fresh=False)
    assert stages.spent() == 35 and stages.spent("capture") == 10
    assert stages.limit(60 - stages.spent(), stages.spent("capture")) == ["--budget", "15s"]
    assert stages.limit(-5) == ["--budget", "2s"]
    assert Stages(folder, JOB, 0, fresh=False).limit(9) == []


@pytest.mark.parametrize(
    "text", ["", "5", '{"spent_s": "x"}', '{"spent_s": {"sweep": []}}', '{"lost": 5}', "\0\0"]
)
def test_a_damaged_note_of_what_was_spent_is_passed_over(folder: Path, text: str) -> None:
    (folder / "tune.json").write_text(text)
    stages = Stages(folder, JOB, 0, fresh=False)
    assert stages.spent() == 0 and len(stages.try_out()) == 3
    replayed(folder, "slower", drop=(10**6,))  # of no row
    rows = stages.try_out()
    stages.drop((stages.judged(rows) or {})["drop"])
    assert stages.try_out() == []


@pytest.mark.parametrize("verdict", [[], "faster", {"kind": "slower"}, {"kind": [], "text": ""}])
def test_a_damaged_verdict_is_none(folder: Path, verdict: object) -> None:
    stages = Stages(folder, JOB, 0, fresh=False)
    rows = stages.try_out()
    replayed(folder, "faster")
    found = json.loads((folder / "replay.json").read_text())
    (folder / "replay.json").write_text(json.dumps({**found, "verdict": verdict}))
    assert stages.judged(rows) is None


def test_shapes_of_a_step_that_was_cut_off_are_captured_anew(folder: Path) -> None:
    for steps, whole in ((0, False), (1, True)):
        made = {"command": list(JOB), "steps": steps}
        table.write(folder / "shapes.csv", [], Shape, made)
        assert Stages(folder, JOB, 0, fresh=False).captured() == whole


def test_a_budget_of_any_length_is_handed_on(folder: Path) -> None:
    for hours in (0.001, 3000, 9999):
        _, text = Stages(folder, JOB, 3600 * hours, fresh=False).limit(3600 * hours)
        assert parse_duration(text) >= 2


def test_a_folder_has_one_tuning_at_a_time_and_is_not_renamed_from_under_us(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold(folder):
        with pytest.raises(UsageError, match="another gemmtune is writing"), hold(folder):
            pass
        with pytest.raises(UsageError, match="another gemmtune is writing"):
            Stages(folder, JOB, 0, fresh=True)
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="--fresh would rename"):
        Stages(Path(), JOB, 0, fresh=True)
    assert (folder / "shapes.csv").exists()


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules, "CUDA_VISIBLE_DEVICES": ""}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    line = [sys.executable, "-m", "gemmtune", "tune", *words, "--", *JOB]
    out = subprocess.PIPE
    return subprocess.Popen(
        line, cwd=folder, env=env, stdout=out, stderr=out, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_a_killed_tune_goes_on_and_then_only_tells_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("--budget", "14s")
    killed = command(tmp_path, *words)
    samples = tmp_path / "tune" / "candidates.samples.jsonl"
    deadline = time.monotonic() + 120
    while not (samples.exists() and samples.read_bytes().count(b"\n") > 20):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = samples.read_bytes()
    shapes = (tmp_path / "tune" / "shapes.csv").stat().st_mtime_ns
    done = command(tmp_path, *words)
    out, err = done.communicate(timeout=240)
    assert done.returncode == 0, err
    assert (tmp_path / "tune" / "shapes.csv").stat().st_mtime_ns == shapes
    kept = before[: before.rindex(b"\n") + 1]
    assert samples.read_bytes().startswith(kept)
    assert ("The step is faster by" in out) != ("Nothing to apply" in out)
    rows = table.read(tmp_path / "tune" / "tuned.csv", Tuned).rows
    assert bool(rows) == ("The step is faster by" in out)
    told = command(tmp_path, *words)
    again, err = told.communicate(timeout=120)
    assert told.returncode == 0, err
    assert "gemmtune capture" not in err and "gemmtune replay tune/trial.csv" not in err
    assert again.split("\n\n")[-1].split(" [")[0].split("(in")[0] in out


@pytest.mark.slow
def test_sigterm_to_the_tuning_ends_the_stage_and_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('begun', flush=True); import time; time.sleep(300)")
    ended = command(tmp_path)
    assert ended.stdout is not None and ended.stdout.readline() == "begun\n"
    ended.terminate()
    _, err = ended.communicate(timeout=60)  # which waits for all that hold its output
    assert ended.returncode == 128 + signal.SIGTERM
    assert "interrupted in capture; the same command goes on there" in err


def test_a_job_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    failed = command(tmp_path)
    _, err = failed.communicate(timeout=60)
    assert failed.returncode not in (0, 1)
    assert "Traceback" not in err
