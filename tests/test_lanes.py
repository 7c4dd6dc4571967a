"""A sweep on all GPUs of a machine: a thread and a worker for each, one journal, the same tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted import Scripted, gemm

from gemmtune.backends.te import Te
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep import run
from gemmtune.table import Shape, Table

SHAPES = Table([Shape(gemm(m), calls=40 - m) for m in (32, 33, 34, 36, 42)], {})


class Lane(Scripted):
    """Three lanes, of which the last one's worker dies where it is asked to show its GPU."""

    lane = 0

    def lanes(self) -> list[Lane]:
        found = [Lane() for _ in range(3)]
        for number, one in enumerate(found):
            one.lane = number
        return found

    def algos(self, gemm: Gemm) -> list[Algo]:
        with open(os.environ["LANES"], "a") as f:
            f.write(f"{self.lane} {gemm.m}\n")
        return super().algos(gemm)


def swept(folder: Path, backend: Scripted, shapes: Table[Shape] = SHAPES) -> run.Summary:
    folder.mkdir(exist_ok=True)
    options = run.Options(seconds_per_shape=0.01, timeout_s=4.0)
    return run.sweep(shapes, backend, folder / "candidates.csv", folder / "tuned.csv", options)


def test_all_lanes_work_and_the_tables_are_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANES", str(tmp_path / "lanes"))
    alone = swept(tmp_path / "alone", Scripted())
    together = swept(tmp_path / "together", Lane())
    assert [(x.gemm, x.algo) for x in together.lines] == [(x.gemm, x.algo) for x in alone.lines]
    who = {line.split()[0] for line in (tmp_path / "lanes").read_text().splitlines()}
    assert who == {"0", "1", "2"}
    again = swept(tmp_path / "together", Lane())
    assert again.resumed == len(SHAPES.rows)


def test_what_stops_one_lane_stops_all_and_what_was_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANES", str(tmp_path / "nowhere" / "lanes"))  # workers cannot come up
    few = Table(SHAPES.rows[:3], {})
    summary = swept(tmp_path / "failing", Lane(), few)
    assert len(summary.failed) == 3
    assert all("No such file" in line.reason for line in summary.failed)


def test_each_gpu_that_the_user_left_visible_gets_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.machine.gpus", lambda: [None, None])
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5,3")
    assert [lane.gpu for lane in Te().lanes()] == ["5", "3"]
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    assert [lane.gpu for lane in Te().lanes()] == ["0", "1"]
    monkeypatch.setattr("gemmtune.machine.gpus", lambda: [None])
    assert [lane.gpu for lane in Te().lanes()] == [None]
