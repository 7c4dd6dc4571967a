"""The replay inside the job, step by step, with an applier that only writes down its orders."""

import itertools
import math
import random
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gemmtune import nvml
from gemmtune.gemm import Algo, Gemm
from gemmtune.job import readings
from gemmtune.job.apply import Launches
from gemmtune.replay.analyse import analyse
from gemmtune.replay.arms import Arms, read_steps
from gemmtune.replay.plan import Plan, blocks
from gemmtune.replay.verdict import judge
from gemmtune.table import Table, Tuned

PLAN = Plan(seed=5, pairs=3, aa_pairs=2, block=3, warmup=2)
GEMM = Gemm(8, 8, 8, "N", "N", *["float32"] * 3, "-", 8, 8, 8)
UNKNOWN = GEMM._replace(m=9)
ALGO = Algo(1, 0, "transposed")
TABLE = Table([Tuned(0, GEMM, 0, 100, ALGO)], {})


class Notebook:
    """An applier that writes down what it is told, and says that each step launched two GEMMs."""

    def __init__(self) -> None:
        self.choices: Mapping[Gemm, Algo] = {}
        self.closed = False

    def choose(self, choices: Mapping[Gemm, Algo]) -> None:
        self.choices = choices

    def drain(self) -> dict[tuple[Gemm, Algo | None], Launches]:
        return {(GEMM, self.choices.get(GEMM)): Launches(4, 40.0), (UNKNOWN, None): Launches(1, 1)}

    def fallbacks(self) -> dict[str, int]:
        return {"mv does not fit": 2}

    def graphed(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    from gemmtune.job import steps

    monkeypatch.setattr(steps, "_steps", steps._Steps())
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def test_arms_follow_the_schedule_and_the_job_may_go_on(
    tmp_path: Path, optimizer: torch.optim.Optimizer
) -> None:
    applier = Notebook()
    Arms(PLAN, TABLE, applier, differences=["threads: 2, 1"], out=str(tmp_path), stop=False)
    arms = []
    for _ in range(PLAN.steps):
        arms.append(bool(applier.choices))
        optimizer.step()
    assert applier.closed
    optimizer.step()
    (rank,) = read_steps(tmp_path)
    tuned = {i: b.tuned for b in blocks(rank.rounds) for i in range(b.first, b.last + 1)}
    assert arms == [tuned.get(i, False) for i in range(PLAN.steps)]
    assert sum(tuned.values()) == 9
    assert [entry.kind for entry in rank.rounds] == ["warmup", "control", "compare", "end"]
    assert (rank.plan, rank.gemms, rank.lost) == (PLAN, [str(GEMM)], "")
    assert set(rank.readings) == {2, *range(5, PLAN.steps + 1, 3)}  # at the end of each block
    assert all(values["cpu_s"] > 0 for values in rank.readings.values())
    assert (rank.rank, rank.world, rank.differences) == (0, 1, ["threads: 2, 1"])
    assert rank.fallbacks == {"mv does not fit": 2}
    assert [s.step for s in rank.steps] == list(range(1, PLAN.steps))
    for step in rank.steps:
        assert step.us > 0
        launched = (0, 0, 4, 40.0) if arms[step.step] else (4, 40.0, 0, 0)
        assert step.rows == {0: launched}


class Graph(Notebook):
    """One whose job launched GEMM in its first two steps and made a graph of it in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def drain(self) -> dict[tuple[Gemm, Algo | None], Launches]:
        self.steps += 1
        return super().drain() if self.steps <= 2 else {}

    def graphed(self) -> int:
        return 4 * (self.steps >= 2)


def test_a_replay_ends_with_its_warmup_where_the_job_runs_in_cuda_graphs(
    tmp_path: Path, optimizer: torch.optim.Optimizer
) -> None:
    applier = Graph()
    plan = PLAN._replace(warmup=5)
    Arms(plan, TABLE, applier, differences=[], out=str(tmp_path), stop=False)
    for step in range(8):
        assert applier.closed is (step >= 5)
        optimizer.step()
    ranks = read_steps(tmp_path)
    found = analyse(plan, ranks, [(2, GEMM, "transposed")])
    assert (found.graphed, found.done) == (4, True)
    verdict = judge(found)
    assert verdict.kind == "unknown" and "CUDA graphs" in verdict.text
    assert "gemmtune replay --a" in verdict.text


def test_the_gpus_readings_go_with_each_block(
    tmp_path: Path, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count(1)

    def state(_: object) -> nvml.Reading:
        return nvml.Reading(1400, 690.0, power_cap_w=700.0, energy_j=700.0 * next(moments))

    monkeypatch.setattr(nvml, "_device", lambda _: nullcontext(object()))
    monkeypatch.setattr(nvml, "_state", state)
    monkeypatch.setattr(readings, "METER_S", 0.001)
    monkeypatch.setattr(readings, "meter", lambda: readings.Meter("GPU-1"))
    before = threading.active_count()
    Arms(PLAN, TABLE, Notebook(), differences=[], out=str(tmp_path), stop=False)
    for _ in range(PLAN.steps):
        optimizer.step()
        time.sleep(0.005)
    assert threading.active_count() == before
    (rank,) = read_steps(tmp_path)
    seen = [rank.readings[step] for step in sorted(rank.readings)]
    assert {(r["power_w"], r["sm_mhz"], r["power_cap_w"]) for r in seen} == {(690.0, 1400.0, 700.0)}
    for name in ("gpu_s", "energy_j"):
        assert all(a[name] < b[name] for a, b in pairwise(seen))


def test_the_job_ends_with_the_last_step(tmp_path: Path, optimizer: torch.optim.Optimizer) -> None:
    Arms(PLAN, TABLE, Notebook(), differences=[], out=str(tmp_path), stop=True)
    for _ in range(PLAN.steps - 1):
        optimizer.step()
    with pytest.raises(SystemExit) as end:
        optimizer.step()
    assert end.value.code == 0


def test_a_torn_last_record_is_left_out(tmp_path: Path, optimizer: torch.optim.Optimizer) -> None:
    Arms(PLAN, TABLE, Notebook(), differences=[], out=str(tmp_path), stop=False)
    for _ in range(PLAN.steps):
        optimizer.step()
    (path,) = tmp_path.glob("steps-*.jsonl")
    text = path.read_text()
    path.write_text(text[: text.rindex('"us"')])
    (rank,) = read_steps(tmp_path)
    assert rank.steps[-1].step == PLAN.steps - 2
    path.write_text(text[:10])
    assert read_steps(tmp_path) == []


def test_where_nothing_is_given_it_measures_and_ends_by_itself(
    tmp_path: Path, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("gemmtune.replay.arms.perf_counter", lambda: now)
    applier = Notebook()
    plan = Plan(precision=0.5)
    Arms(plan, TABLE, applier, differences=[], out=str(tmp_path), stop=False)
    noise = random.Random(3)
    while not applier.closed:
        now += math.exp(noise.gauss(0, 0.01)) / (1.1 if applier.choices else 1)
        optimizer.step()
    ranks = read_steps(tmp_path)
    found = analyse(plan, ranks, [(2, GEMM, "transposed")])
    assert [r.kind for r in found.rounds[:3]] == ["warmup", "probe", "control"]
    assert found.done and 100 * found.effect.precision <= 0.5
    assert found.effect.low < 1.1 < found.effect.high


def test_a_process_that_cannot_record_ends_the_replay_with_the_default(
    tmp_path: Path, optimizer: torch.optim.Optimizer, capfd: pytest.CaptureFixture[str]
) -> None:
    applier = Notebook()
    Arms(PLAN, TABLE, applier, differences=[], out=str(tmp_path / "gone"), stop=False)
    for _ in range(PLAN.warmup):
        assert not applier.closed
        optimizer.step()
    assert applier.closed and not applier.choices
    (line,) = capfd.readouterr().err.splitlines()
    assert "cannot record steps in" in line and "gone" in line
