"""A sweep on all GPUs of a machine: a thread and a worker each, one journal, the same tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import Scripted, gemm

from gemmtune.backends.te import Te
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep import run
from gemmtune.table import Shape, Table

SHAPES = Table([Shape(gemm(m), calls=50 - m) for m in (32, 33, 34, 36, 42)], {})


class Lane(Scripted):
    """Three lanes, whose workers write down which Gemm they got."""

    lane = 0

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def lanes(self) -> list[Lane]:
        found = [Lane(self.log) for _ in range(3)]
        for number, one in enumerate(found):
            one.lane = number
        return found

    def algos(self, gemm: Gemm) -> list[Algo]:
        with self.log.open("a") as f:
            f.write(f"{self.lane} {gemm.m}\n")
        return super().algos(gemm)


def swept(folder: Path, backend: Scripted, shapes: Table[Shape] = SHAPES) -> run.Summary:
    folder.mkdir(exist_ok=True)
    options = run.Options(seconds_per_shape=0.01, timeout_s=4.0)
    return run.sweep(shapes, backend, folder / "candidates.csv", folder / "tuned.csv", options)


def test_all_lanes_work_and_the_tables_are_those_of_one(tmp_path: Path) -> None:
    log = tmp_path / "lanes"
    alone = swept(tmp_path / "alone", Scripted())
    together = swept(tmp_path / "together", Lane(log))
    assert [(x.gemm, x.algo) for x in together.lines] == [(x.gemm, x.algo) for x in alone.lines]
    who = {line.split()[0] for line in log.read_text().splitlines()}
    assert who == {"0", "1", "2"}
    again = swept(tmp_path / "together", Lane(log))
    assert again.resumed == len(SHAPES.rows)


def test_a_gemm_that_fails_fails_alone(tmp_path: Path) -> None:
    few = Table(SHAPES.rows[:3], {})
    summary = swept(tmp_path / "failing", Lane(tmp_path / "nowhere" / "lanes"), few)
    assert len(summary.failed) == 3
    assert all("No such file" in line.reason for line in summary.failed)


def test_what_ends_one_lane_ends_the_sweep_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[run.Event] = []

    def tell(event: run.Event) -> None:
        told.append(event)
        if event.line:
            raise KeyError("no more")

    options = run.Options(seconds_per_shape=0.01, timeout_s=4.0)
    paths = tmp_path / "candidates.csv", tmp_path / "tuned.csv"
    with pytest.raises(KeyError):
        run.sweep(SHAPES, Lane(tmp_path / "lanes"), *paths, options, tell)
    assert swept(tmp_path, Lane(tmp_path / "lanes")).resumed >= 1


def test_each_gpu_that_the_user_left_visible_gets_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.machine.gpus", lambda: [None, None])
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5,3")
    assert [lane.gpu for lane in Te().lanes()] == ["5", "3"]
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    assert [lane.gpu for lane in Te().lanes()] == ["0", "1"]
    monkeypatch.setattr("gemmtune.machine.gpus", lambda: [None])
    assert [lane.gpu for lane in Te().lanes()] == [None]
