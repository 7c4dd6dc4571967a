"""Helpers of the tests that start real jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# The files that take longest, longest first: begun last they would keep one worker waiting.
LONGEST = (
    *("te_flow", "journal", "capture", "llama", "end_to_end", "replay_job", "interposer", "flow"),
    *("te_backend", "launch", "compare"),
)
ROOT = Path(__file__).parent.parent
JOBS = Path(__file__).parent / "jobs"
Run = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def gemmtune() -> Run:
    """Run the command line as a user would: `gemmtune("capture", "--", "train.py", cwd=…)`."""

    def run(
        *args: str | Path, cwd: Path | None = None, code: int | None = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """`code` is the exit code to insist on; the environment is that of an activated venv."""
        modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        done = subprocess.run(
            [sys.executable, "-m", "gemmtune", *map(str, args)],
            cwd=cwd,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": modules,
                "PATH": programs,
                **env,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert code is None or done.returncode == code, done.stderr[-4000:]
        return done

    return run


def torchrun(ranks: int = 2) -> list[str]:
    """The words that start a job under torchrun, free of other jobs on this machine."""
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
