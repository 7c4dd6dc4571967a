"""Faults injected into a sweep: each costs one algorithm, or ends in one line and a resume."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scripted
from scripted import Scripted

from gemmtune import table
from gemmtune.errors import UsageError, WorkerError
from gemmtune.gemm import Gemm
from gemmtune.sweep import journal, run

QUICK = run.Options(seconds_per_shape=0.01)


def shapes(*gemms: Gemm) -> table.Table[table.Shape]:
    return table.Table([table.Shape(g, calls=2) for g in gemms], {"threads": 1})


def sweep(folder: Path, *gemms: Gemm, options=QUICK, backend=None):
    paths = folder / "candidates.csv", folder / "tuned.csv"
    return run.sweep(shapes(*gemms), backend or Scripted(), *paths, options)


def rows_of(folder: Path, *gemms: Gemm, options=QUICK) -> dict[str, table.Candidate]:
    sweep(folder, *gemms, options=options)
    return {
        row.algo.config: row for row in table.read(folder / "candidates.csv", table.Candidate).rows
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "reasons"),
    [
        (
            41,
            {
                "segfaults": "killed by SIGSEGV",
                "exits": "ended the process with code 3",
                "aborts": "killed by SIGABRT: the library says why",
                "nan": "1 of 984 elements NaN or not written",
                "wrong": "times the bound for its type and k",
            },
        ),
        (42, {"hangs": "hung: no answer after 3 s"}),
        (
            43,
            {
                "no-memory": "out of memory: MemoryError",
                "torch-no-memory": "out of memory: ",
                "oom-killed": "killed by SIGKILL, as for want of memory",
            },
        ),
        (
            44,
            {
                "backwards": "clock: a launch took -",
                "stands-still": "clock: a launch took 0 us",
                "no-number": "clock: a launch took nan us",
            },
        ),
        (45, {"dies-timed": "killed by SIGSEGV"}),
        (47, {"loses-the-device": "code 70: an illegal memory access"}),
    ],
)
def test_a_fault_costs_its_own_algorithm_alone(tmp_path, m, reasons):
    options = QUICK._replace(timeout_s=3) if m == 42 else QUICK
    rows = rows_of(tmp_path, scripted.gemm(m), options=options)
    for config, words in reasons.items():
        assert rows[config].status == "failed" and words in rows[config].reason
    good = {config for config in rows if config not in reasons}
    assert all(rows[config].status != "failed" for config in good)
    won = "set-back-once" if m == 44 else "fast"
    assert rows[won].status == "winner"
    (tuned,) = table.read(tmp_path / "tuned.csv", table.Tuned).rows
    assert tuned.algo.config == won


@pytest.mark.slow
def test_a_default_that_dies_of_what_another_left_behind_is_asked_again(tmp_path):
    rows = rows_of(tmp_path, scripted.gemm(46))
    assert rows["default"].status == "default" and rows["fast"].status == "winner"


@pytest.mark.slow
def test_a_default_that_dies_costs_its_gemm_alone(tmp_path):
    summary = sweep(tmp_path, scripted.gemm(38), scripted.gemm(32), backend=Broken())
    reasons = {line.gemm.m: line.reason for line in summary.lines}
    assert "killed by SIGABRT: the library says why" in reasons[38] and not reasons[32]
    again = sweep(tmp_path, scripted.gemm(38), scripted.gemm(32), backend=Broken())
    assert again.resumed == 2 and again.lines == summary.lines


class Broken(Scripted):
    def algos(self, gemm):
        return super().algos(gemm)[1:] if gemm.m == 38 else super().algos(gemm)


def test_a_worker_that_cannot_be_set_up_costs_its_gemm(tmp_path):
    (line,) = sweep(tmp_path, scripted.gemm(31), backend=Dead()).lines
    assert line.reason == "no algorithm could be tried: ended the process with code 9"


class Dead(Scripted):
    def algos(self, gemm):
        os._exit(9)


def test_where_no_worker_starts_the_sweep_ends_and_can_go_on(tmp_path, monkeypatch):
    def refuse(self):
        raise OSError(11, "Resource temporarily unavailable")

    process = multiprocessing.get_context("forkserver").Process
    with monkeypatch.context() as patch:
        patch.setattr(process, "start", refuse)
        with pytest.raises(WorkerError, match=r"cannot start a worker process: .*unavailable"):
            sweep(tmp_path, scripted.gemm(32))
    assert sweep(tmp_path, scripted.gemm(32)).lines[0].algo


# -------------------------------------------------------------------------------------------- files

CODE = """
import resource, sys
from gemmtune.backends import base
from gemmtune.cli import main
base.BACKENDS["scripted"] = "scripted:Scripted"
if limit := int(sys.argv.pop(1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


def command(folder: Path, *gemms: Gemm, limit: int = 0) -> subprocess.CompletedProcess[str]:
    table.write(folder / "shapes.csv", shapes(*gemms).rows, table.Shape, {"threads": 1})
    path = os.pathsep.join((os.getcwd(), os.path.dirname(scripted.__file__)))
    words = ["sweep", "shapes.csv", "--backend", "scripted", "--seconds-per-shape", "0.01"]
    return subprocess.run(
        [sys.executable, "-c", CODE, str(limit), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def one_line(text: str) -> str:
    assert "Traceback" not in text
    (line,) = [x for x in text.splitlines() if x.startswith("gemmtune: ")]
    return line


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_measured_and_the_same_command_goes_on(tmp_path):
    gemms = scripted.gemm(32), scripted.gemm(33)
    (tmp_path / "whole").mkdir()
    sweep(tmp_path / "whole", *gemms)
    size = (tmp_path / "whole" / "candidates.samples.jsonl").stat().st_size
    full = command(tmp_path, *gemms, limit=size * 2 // 3)
    line = one_line(full.stderr)
    assert full.returncode == 2 and "cannot write candidates.samples.jsonl: File too large" in line
    assert "kept in candidates.samples.jsonl: the same command goes on" in line
    path = tmp_path / "candidates.samples.jsonl"
    torn = path.read_bytes()
    again = command(tmp_path, *gemms)
    assert again.returncode == 0, again.stderr
    assert path.read_bytes().startswith(torn[: torn.rfind(b"\n") + 1])
    for name in ("candidates.csv", "tuned.csv"):
        rows = [(tmp_path / f / name).read_bytes() for f in (".", "whole")]
        assert rows[0] == rows[1]


def test_no_room_for_the_tables_keeps_the_samples(tmp_path, monkeypatch):
    def full(path, *rest):
        raise UsageError(f"cannot write {path}: No space left on device")

    calls = []
    real = table.write
    with monkeypatch.context() as patch:
        patch.setattr(
            *(table, "write"),
            lambda *a: real(*a) if len(calls) < 2 and not calls.append(a) else full(*a),
        )
        with pytest.raises(UsageError, match="No space left on device; what was measured is kept"):
            sweep(tmp_path, scripted.gemm(32))
    assert sweep(tmp_path, scripted.gemm(32)).resumed == 1


def test_a_device_that_is_full_is_said(tmp_path):
    paths = tmp_path / "candidates.csv", "/dev/full"
    for _ in range(2):
        with pytest.raises(UsageError, match=r"cannot write /dev/full: No space left on device; w"):
            run.sweep(shapes(scripted.gemm(31)), Scripted(), *paths, QUICK)
    (tmp_path / "more.samples.jsonl").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"cannot keep samples in .*: it is no plain file"):
        run.sweep(shapes(scripted.gemm(31)), Scripted(), tmp_path / "more.csv", "/dev/full", QUICK)


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *a: False)  # root may write anywhere
    with pytest.raises(UsageError, match=r"cannot write .*: name a file in a folder that you may"):
        sweep(tmp_path, scripted.gemm(31))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_second_sweep_on_one_output_is_refused_and_does_no_harm(tmp_path):
    table.write(
        tmp_path / "shapes.csv", shapes(scripted.gemm(40)).rows, table.Shape, {"threads": 1}
    )
    path = os.pathsep.join((os.getcwd(), os.path.dirname(scripted.__file__)))
    words = [sys.executable, scripted.__file__, str(tmp_path / "shapes.csv"), str(tmp_path)]
    first = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path})
    samples = tmp_path / "candidates.samples.jsonl"
    while not samples.exists() or b"session" not in samples.read_bytes():
        assert first.poll() is None
        time.sleep(0.01)
    second = command(tmp_path, scripted.gemm(40))
    assert first.wait() == 0
    line = one_line(second.stderr)
    assert second.returncode == 2 and f"another sweep (pid {first.pid}) is writing" in line
    held = journal.read(samples)
    assert held.begun == 1 and held.pid == first.pid
