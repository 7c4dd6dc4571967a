"""The main job as a user runs it: a script that knows nothing of gemmtune, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import JOBS, Run, torchrun

from gemmtune import table
from gemmtune.table import Candidate, Shape, Tuned

HF = [str(JOBS / "hf_llama.py"), "--parallel", "fsdp2", "--hidden", "96", "--tokens", "48"]


def losses(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss")]


@pytest.fixture(scope="module")
def swept(gemmtune: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """capture and sweep, from the command line; the folder with their tables."""
    folder = tmp_path_factory.mktemp("job")
    gemmtune("capture", "-o", "shapes.csv", "--stop", "--", *torchrun(), *HF, cwd=folder)
    options = ("--seconds-per-shape", "0.3", "--top", "6")
    done = gemmtune("sweep", "shapes.csv", "-o", "tuned.csv", *options, cwd=folder)
    won = table.read(folder / "tuned.csv", Tuned).rows
    said = "gemmtune replay tuned.csv -- torchrun" if won else "nothing to tune here"
    assert said in done.stdout + done.stderr
    return folder


def pinned(folder: Path, config: str) -> Path:
    """The sweep's table with one verified algorithm for every Gemm it swept, faster or not.

    What really wins differs from run to run; what a table does to a job must be tested each time.
    """
    made = table.read(folder / "tuned.csv", Tuned)
    swept = table.read(folder / "candidates.csv", Candidate).rows
    rows = [
        Tuned(0, c.gemm, 0, 2**63 - 1, c.algo)
        for c in swept
        if c.algo.config == config and c.status != "failed"
    ]
    assert rows
    path = folder / f"{config}.csv"
    table.write(path, rows, Tuned, made.provenance)
    return path


@pytest.mark.slow
def test_sweep_covers_the_captured_gemms(swept: Path) -> None:
    captured = table.by_gemm(table.read(swept / "shapes.csv", Shape).rows)
    candidates = table.read(swept / "candidates.csv", Candidate)
    gemms = {row.gemm for row in candidates.rows}
    assert len(gemms) == 6
    assert gemms <= set(captured)
    assert candidates.provenance["threads"] == 1
    for gemm in gemms:
        rows = [row for row in candidates.rows if row.gemm == gemm]
        assert sum(row.algo.config == "aten" for row in rows) == 1
        assert len(rows) > 3


@pytest.mark.slow
def test_replay_proves_that_the_rows_ran_on_both_ranks(gemmtune: Run, swept: Path) -> None:
    tuned = pinned(swept, "transposed")
    count = len(table.read(tuned, Tuned).rows)
    plan = ("--pairs", "2", "--aa-pairs", "1", "--block", "3")
    job = [*torchrun(), *HF, "--steps", "999"]
    done = gemmtune("replay", tuned, "-o", "replay.json", *plan, "--", *job, cwd=swept, code=None)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert f"{count} of {count} rows launched" in done.stdout
    found = json.loads((swept / "replay.json").read_text())
    assert found["ranks"] == [0, 1]
    assert found["verdict"]["kind"] in ("faster", "no difference", "slower")
    assert found["verdict"]["text"] in done.stdout


@pytest.mark.slow
def test_run_uses_the_rows_and_keeps_the_losses(gemmtune: Run, swept: Path) -> None:
    tuned = pinned(swept, "split-k2")  # two sums where the default takes one: rounds otherwise
    defaults = pinned(swept, "aten")
    job = [*torchrun(), *HF, "--steps", "20", "--lr", "0.01"]
    plain = gemmtune("capture", "-o", "again.csv", "--", *job, cwd=swept).stdout
    same = gemmtune("run", defaults, "--", *job, cwd=swept).stdout
    assert losses(same) == losses(plain)  # a table of defaults changes no bit
    done = gemmtune("run", tuned, "--", *job, cwd=swept)
    count = len(table.read(tuned, Tuned).rows)
    assert f"{count} of {count} rows used, on 2 ranks" in done.stderr
    # Default runs of this seed differ where the library takes its sums in another order, as on a
    # processor with fewer instructions.
    narrow = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    other = gemmtune("capture", "-o", "again.csv", "--", *job, cwd=swept, **narrow).stdout
    spread = max(abs(a - b) for a, b in zip(losses(plain), losses(other), strict=True))
    moved = max(abs(a - b) for a, b in zip(losses(plain), losses(done.stdout), strict=True))
    assert 0 < spread < 1e-3
    assert 0 < moved <= 3 * spread, (moved, spread)
