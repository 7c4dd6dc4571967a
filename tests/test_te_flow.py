"""The whole way of a job with Transformer Engine on AMD, over the fake TE: and what goes wrong.

Real processes: torchrun and FSDP2 over gloo, gemmtune's command line (tests/te_on_cpu.py), TE's
worker processes. The fake's script says which algorithm is fast, and it counts what it did.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from te_on_cpu import HERE, environment

from gemmtune import table
from gemmtune.dialects import te
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep.shared import agree
from gemmtune.table import Candidate, Shape, Tuned

JOB = str(HERE / "jobs" / "te_fsdp.py")
US, SPEED, TOP = 2000.0, 0.4, 2
# The tuner's favourite leaves a NaN; the best that is right stands further down the list.
SCRIPT: dict[str, Any] = {
    "us": US,
    "plant": [{"rank": 3, "speed": 0.2, "kind": "nan"}, {"rank": 7, "speed": SPEED}],
}

pytestmark = pytest.mark.slow


class Work:
    """A folder, a fake TE of a script, and gemmtune in it."""

    def __init__(self, folder: Path, **script: Any) -> None:
        self.folder = folder
        self.env = environment(folder, {**SCRIPT, **script}) | {"PYTHONWARNINGS": "ignore"}

    def gemmtune(self, *words: str | Path, code: int = 0, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, str(HERE / "te_on_cpu.py"), *map(str, words)],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == code, done.stderr[-3000:]
        return done.stdout + done.stderr

    def job(self, *words: str, ranks: int = 1) -> list[str]:
        return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), JOB, *words]

    def counts(self) -> list[dict[str, Counter[str]]]:
        """What each process counted since this was asked last."""
        found = []
        for path in (self.folder / "counts").glob("*.json"):
            found.append({k: Counter(v) for k, v in json.loads(path.read_text()).items()})
            path.unlink()
        return found

    def step_ms(self, said: str) -> float:
        return float(re.findall(r"best step ([0-9.]+) ms", said)[-1])


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """A job captured on two ranks, and its largest GEMMs swept."""
    work = Work(tmp_path_factory.mktemp("flow"))
    work.captured = work.gemmtune("capture", "--", *work.job(ranks=2))  # type: ignore[attr-defined]
    work.ran = work.counts()  # type: ignore[attr-defined]
    work.swept = work.gemmtune(  # type: ignore[attr-defined]
        *("sweep", "shapes.csv", "--backend", "te", "--run-count", "30", "--algo-count", "100"),
        *("--top", str(TOP), "--seconds-per-shape", "0.5"),
        TE_HIPBLASLT_TUNING_RUN_COUNT="1",
    )
    return work


@pytest.fixture
def other(flow: Work, tmp_path: Path) -> Any:
    """Another machine's fake TE, with the flow's table in te-v2."""

    def make(**script: Any) -> Work:
        work = Work(tmp_path, **script)
        flow.gemmtune("convert", "tuned.csv", "--to", "te-v2", "-o", tmp_path / "te.csv")
        return work

    return make


def test_capture_has_every_gemm_with_its_pass_and_module_as_often_as_te_ran_it(flow) -> None:  # type: ignore[no-untyped-def]
    rows = table.read(flow.folder / "shapes.csv", Shape).rows
    assert {(r.pass_, r.site, r.calls, r.ranks) for r in rows} == {
        (name, site, 1.0, "0-1") for name in ("fprop", "dgrad", "wgrad") for site in "01"
    }
    assert len(flow.ran) == 2
    assert all(set(c["calls"].values()) == {4} and len(c["calls"]) == 6 for c in flow.ran)
    assert "own table" not in flow.captured  # the two sources agree


def test_an_fp8_job_is_captured_with_the_keys_that_te_itself_saves(tmp_path: Path) -> None:
    work = Work(tmp_path, plant=[])
    said = work.gemmtune("capture", "--", *work.job("4", "fp8"))
    assert "own table" not in said
    rows = table.read(tmp_path / "shapes.csv", Shape).rows
    wgrad = [r.gemm for r in rows if r.gemm.type_b == "float8e5m2" and r.pass_ == "wgrad"]
    assert sorted(g[:3] for g in wgrad) == [(32, 64, 48), (64, 32, 48)]
    assert len(rows) == 6 and all(r.gemm.trans_a + r.gemm.trans_b == "TN" for r in rows)


def test_sweep_takes_the_planted_winner_and_refuses_the_tuners_nan(flow) -> None:  # type: ignore[no-untyped-def]
    tuned = table.read(flow.folder / "tuned.csv", Tuned)
    assert [row.algo.config for row in tuned.rows] == ["rank=7"] * TOP
    assert tuned.provenance["te"]["dialect"] == "te-v2"
    rows = table.read(flow.folder / "candidates.csv", Candidate).rows
    nan = [row for row in rows if row.algo.aidx == 3]
    assert len(nan) == TOP
    assert all(row.status == "failed" and "NaN" in row.reason for row in nan)


@pytest.mark.parametrize(("dialect", "version"), [("te-v1", 1), ("te-v2", 2), ("te-v3", 2)])
def test_every_row_is_used_after_one_query_and_the_step_gains_what_was_planted(  # type: ignore[no-untyped-def]
    flow, tmp_path, dialect, version
) -> None:
    us = 10 * US  # longer than what other work on this machine does to a step
    work = Work(tmp_path, dialect=dialect, te=version, us=us)
    made = tmp_path / "te.csv"
    flow.gemmtune("convert", "tuned.csv", "--to", dialect, "-o", made)
    assert made.read_text().splitlines()[0] == te.HEADERS[dialect]
    done = subprocess.run(
        work.job(ranks=2), env=work.env, capture_output=True, text=True, check=True
    )
    work.counts()
    said = work.gemmtune("run", made, "--", *work.job(ranks=2))
    assert f"{TOP} of {TOP} rows used, on 2 ranks, {TOP} calls per step" in said
    assert f"found the algorithms of {TOP} of them" in said
    for counted in work.counts():
        assert set(counted["queries"].values()) == {1}
        assert len(counted["calls"]) == 6 and set(counted["calls"].values()) == {4}
        ids = {int(name.rpartition("id=")[2]) for name in counted["launches"]}
        assert {r.algo_id for r in te.read(made.read_text()).rows} <= ids
    planted_ms = TOP * us * (1 - SPEED) / 1e3
    assert work.step_ms(done.stdout) - work.step_ms(said) > 0.5 * planted_ms


def test_replay_of_alternated_processes_finds_the_planted_gain(flow) -> None:  # type: ignore[no-untyped-def]
    flow.gemmtune("convert", "tuned.csv", "-o", "te.csv")
    job = " ".join(flow.job("9"))
    words = ("--a", job, "--b", f"TE_HIPBLASLT_ALGO_LOAD=te.csv {job}", "--runs", "2")
    flow.gemmtune("replay", *words, "--steps", "5", "-o", "compare.json")
    found = json.loads((flow.folder / "compare.json").read_text())
    us = {arm: [p["step_us"] for p in found["processes"] if p["arm"] == arm] for arm in "ab"}
    assert len(us["a"]) == len(us["b"]) == 2
    assert min(us["a"]) > 1.1 * min(us["b"])


def test_run_converts_a_swept_table_for_te_itself(flow) -> None:  # type: ignore[no-untyped-def]
    said = flow.gemmtune("run", "tuned.csv", "--", *flow.job())
    assert f"{TOP} of {TOP} rows used, on 1 rank" in said
    assert "convert" in flow.gemmtune("env", "tuned.csv", code=2)


def test_tables_of_another_hipblaslt_build_are_found_out(other) -> None:  # type: ignore[no-untyped-def]
    work = other(build="another")
    said = work.gemmtune("run", "te.csv", "--", *work.job())
    assert f"for {TOP} of them Transformer Engine took another algorithm" in said


def test_a_wrong_rank_is_found_out(other) -> None:  # type: ignore[no-untyped-def]
    work = other()
    path = work.folder / "te.csv"
    path.write_text(re.sub(r",[78]\n", ",1\n", path.read_text()))
    said = work.gemmtune("run", "te.csv", "--", *work.job())
    assert f"for {TOP} of them Transformer Engine took another algorithm" in said
    assert "too low a rank (aidx)" in said


def test_rows_for_another_workspace_gpu_or_te_are_said_to_fit_nothing(other) -> None:  # type: ignore[no-untyped-def]
    work = other()
    path = work.folder / "te.csv"
    good = path.read_text()
    path.write_text(good.replace(f",{table.WS_MAX},", ",16,"))
    said = work.gemmtune("run", "te.csv", "--", *work.job())
    assert f"0 of {TOP} rows fit this job's workspace: 65536 bytes" in said
    path.write_text(good.replace("\n904,", "\n905,"))
    said = work.gemmtune("run", "te.csv", "--", *work.job())
    assert f"0 of {TOP} rows fit this GPU: they are for 905, and this one is 904" in said
    path.write_text(good.replace(te.HEADERS["te-v2"], te.HEADERS["te-v3"]))
    work.gemmtune("check", "te.csv", code=1)
    path.write_text(good)
    work.gemmtune("convert", "te.csv", "--to", "te-v1", "-o", "v1.csv")
    said = work.gemmtune("run", "v1.csv", "--", *work.job())
    assert f"0 of {TOP} rows fit this Transformer Engine: it speaks te-v2" in said


def test_ranks_that_read_different_tables_are_found_out(other) -> None:  # type: ignore[no-untyped-def]
    work = other()
    text = (work.folder / "te.csv").read_text()
    for rank in range(2):
        (work.folder / f"rank{rank}.csv").write_text(text + f"# {rank}\n")
    said = work.gemmtune("run", "te.csv", "--", *work.job("4", "own-tables", ranks=2))
    assert "ranks read different tables" in said


def test_tuning_that_a_user_left_on_is_off_in_the_job(other) -> None:  # type: ignore[no-untyped-def]
    work = other()
    left = {"TE_HIPBLASLT_TUNING_RUN_COUNT": "2", "TE_HIPBLASLT_ALGO_SELECTION": "5"}
    left["TE_HIPBLASLT_ALGO_SAVE"] = str(work.folder / "te.csv")  # the table itself
    said = work.gemmtune("run", "te.csv", "--", *work.job(), **left)
    for name, value in left.items():
        assert f"{name}={value} is unset for this job" in said
    assert f"{TOP} of {TOP} rows used" in said
    assert not any(counted["timed"] for counted in work.counts())
    said = work.gemmtune("run", "te.csv", "--", *work.job("4", "leaves-tuning-on"))
    assert "the job itself sets TE_HIPBLASLT_TUNING_RUN_COUNT" in said


# -------------------------------------------------------- one row for two GEMMs: beta is not a key


def gemm(beta: int) -> Gemm:
    types = ("bfloat16", "bfloat16", "float32")
    return Gemm(64, 32, 48, "N", "T", *types, "-", 64, 32, 64, beta=beta, api="lt")


def rows(beta: int, **ratios: float) -> list[Candidate]:
    """Candidates by their ratio: 1 is the default, above 1.01 wins, 0 failed."""
    made = [Candidate(gemm(beta), Algo(0, 0, "rank=0"), "default", "", 100.0, 1.0, 1.0, 1.0)]
    best = max(ratios.values(), default=0.0)
    for name, ratio in ratios.items():
        number = int(name[1:])
        status = "failed" if not ratio else "finalist"
        status = "winner" if ratio == best and ratio > 1.01 else status
        algo = Algo(number, number, f"rank={number}")
        reason = "" if ratio else "wrote NaN"
        made.append(Candidate(gemm(beta), algo, status, reason, 100.0, ratio, ratio, ratio))
    return made


@pytest.mark.parametrize(
    ("plain", "accumulating", "won"),
    [
        ({"r7": 1.5}, {"r7": 1.4}, {7}),  # faster in both
        ({"r7": 0.4}, {"r7": 1.5}, set()),  # faster with beta, far slower without
        ({"r7": 0.0}, {"r7": 1.5}, set()),  # wrong without beta
        ({}, {"r7": 1.5}, set()),  # not known without beta
        ({"r7": 0.9, "r2": 1.3}, {"r7": 1.5, "r2": 1.2}, {2}),  # another serves both better
    ],
)
def test_an_algorithm_wins_only_if_it_serves_all_gemms_of_its_row(plain, accumulating, won) -> None:  # type: ignore[no-untyped-def]
    found = {gemm(0): rows(0, **plain), gemm(1): rows(1, **accumulating)}
    settled = agree(found, {gemm(0): 1.0, gemm(1): 1.0})
    winners = [r for block in settled.values() for r in block if r.status == "winner"]
    assert {r.algo.algo_id for r in winners} == won
    dropped = [r.reason for block in settled.values() for r in block if r.status == "finalist"]
    assert won or all("beta" in reason for reason in dropped if reason)
