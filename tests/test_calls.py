"""Capture over the interposer: the library's calls, joined with torch's pass and module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fakes import HERE, environment, fakes

SCENARIOS = [
    line.removeprefix("def ").partition("(")[0]
    for line in (HERE / "calls_job.py").read_text().splitlines()
    if line.startswith("def ") and "(job: Job) -> None" in line
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes("cublaslt", tmp_path_factory.mktemp("fakes"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_a_job(scenario: str, folder: Path) -> None:
    words = [sys.executable, HERE / "calls_job.py", scenario, folder]
    env = environment(folder, HERE / "fake_gpu")
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
