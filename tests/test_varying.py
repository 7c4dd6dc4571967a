"""A job whose sequence lengths vary: ranked by share, cut off, and nothing carried over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from gemmtune import table
from gemmtune.sweep.plan import MOST
from gemmtune.table import Candidate, Shape, Tuned

LENGTHS = range(1, 101)
TRAIN = """
import torch
torch.manual_seed(0)
layer = torch.nn.Linear(64, 96, bias=False)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
for length in [1, *range(1, 101)]:
    layer(torch.randn(length, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def gemmtune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
    return subprocess.run(
        [sys.executable, "-m", "gemmtune", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_a_hundred_lengths_are_ranked_cut_off_and_nothing_is_carried_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = gemmtune(tmp_path, "capture", "--steps", "100", "--", "train.py")
    assert done.returncode == 0, done.stderr
    shapes = table.read(tmp_path / "shapes.csv", Shape).rows
    assert {shape.gemm.n for shape in shapes if shape.pass_ == "fprop"} == set(LENGTHS)
    assert len({shape.gemm for shape in shapes}) == 200  # fprop and wgrad of each

    options = ("--backend", "cpu", "--json", "--seconds-per-shape", "0.02", "--min-gain", "0%")
    swept = gemmtune(tmp_path, "sweep", "shapes.csv", *options, "--top", "6")
    assert swept.returncode == 0, swept.stderr
    summary = json.loads(swept.stdout)
    shares = [line["share"] for line in summary["gemms"]]
    left = [line["share"] for line in summary["beyond_top"]]
    assert len(shares) == 6 and len(left) == 194
    assert shares == sorted(shares, reverse=True) and max(left) <= min(shares)
    assert sum(shares) + sum(left) == pytest.approx(1)
    assert "left out: 194 GEMMs with" in swept.stderr and "--top 6" in swept.stderr

    verified = {
        (row.gemm, row.algo)
        for row in table.read(tmp_path / "candidates.csv", Candidate).rows
        if row.status == "winner"
    }
    tuned = {(row.gemm, row.algo) for row in table.read(tmp_path / "tuned.csv", Tuned).rows}
    assert tuned == verified

    # Every length of the job that the table does not name runs as it would without gemmtune.
    ran = gemmtune(tmp_path, "run", "tuned.csv", "--", "train.py")
    assert ran.returncode == 0, ran.stderr
    if tuned:
        assert f"{len(tuned)} of {len(tuned)} rows used" in ran.stderr


def test_the_cap_holds_unasked() -> None:
    from scripted import Scripted, gemm

    from gemmtune.sweep.plan import Options, make_plan

    rows = [Shape(gemm(32, n=n), calls=1.0, time_us=float(n)) for n in LENGTHS]
    plan = make_plan(rows, Scripted(), Options())
    assert [g.n for g in plan.gemms] == list(reversed(LENGTHS))[:MOST]
    assert len(plan.beyond) == len(LENGTHS) - MOST
