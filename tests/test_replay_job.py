"""replay, run and env on real jobs: a small training script, alone and under torchrun."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gemmtune.cli import main
from gemmtune.dialects import te
from gemmtune.gemm import Algo, Gemm
from gemmtune.replay import arms
from gemmtune.table import Tuned, write

ROOT = Path(__file__).parent.parent
TRAIN = """
import os, signal, sys
import torch
from torch import nn

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 160), nn.ReLU(), nn.Linear(160, 32)
)
if ranks > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(128, 96), torch.randn(128, 32)
steps, *words = sys.argv[1:]
if words:
    print(words)
for step in range(int(steps)):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
    if "kill" in words and step == 60:
        os.kill(os.getpid(), signal.SIGKILL)
    if "lose" in words and step == 10 and torch.distributed.get_rank():
        from gemmtune.replay import agree
        def gone():
            raise ConnectionError("the store is gone")
        agree._store = gone
sys.exit(7 if "fail" in words else 0)
"""
F32 = ("float32",) * 3
FPROP = Gemm(160, 128, 256, "T", "N", *F32, "float32", 256, 256, 160, epi="bias", api="addmm")
DGRAD = Gemm(256, 128, 160, "N", "N", *F32, "-", 256, 160, 256)
NEVER = Gemm(9, 9, 9, "N", "N", *F32, "-", 9, 9, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job")
    (path / "train.py").write_text(TRAIN)
    table(path / "tuned.csv", "transposed")
    table(path / "default.csv", "aten")
    table(path / "broken.csv", "abacus")
    table(path / "foreign.csv", "transposed", machine={"arch": "PDP-11"})
    return path


def table(
    path: Path,
    config: str,
    gemms: tuple[Gemm, ...] = (FPROP, DGRAD, NEVER),
    **provenance: Any,
) -> None:
    rows = [Tuned(0, gemm, 0, 2**63 - 1, Algo(1, 0, config)) for gemm in gemms]
    write(path, rows, Tuned, {"stage": "hand", **provenance})


def clean(**more: str) -> dict[str, str]:
    names = ("GEMMTUNE_JOB", "RANK", "WORLD_SIZE")
    env = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("TE_")}
    return {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def shell(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=folder,
        env=clean(**env),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def gemmtune(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return shell(folder, sys.executable, "-m", "gemmtune", *argv, **env)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float.fromhex(x.split()[1]) for x in done.stdout.splitlines() if x[:5] == "loss "]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[float]:
    return losses(shell(folder, sys.executable, "train.py", "20"))


def test_a_job_is_replayed_and_ends_with_the_schedule(folder: Path) -> None:
    done = gemmtune(
        folder,
        *("replay", "tuned.csv", "--pairs", "4", "--aa-pairs", "2", "--block", "5"),
        *("-o", "replay.json", "--", sys.executable, "train.py", "5000"),
    )
    assert done.returncode in (0, 1), done.stderr
    assert len(losses(done)) == 62  # 3 + 2·5·6 steps, ended before the last one's loss is printed
    report = done.stdout.splitlines()
    assert report[-1].split()[0] in ("faster", "slower", "no")
    assert f"never met: line 5, {NEVER}" in report
    values = json.loads((folder / "replay.json").read_text())
    assert values["job_exit_code"] == 0 and values["pairs"] == 4 and values["aa_pairs"] == 2
    assert [len(b["steps_us"]) for b in values["blocks"]] == [4] * 12
    fprop, dgrad, never = values["rows"]
    for row in (fprop, dgrad):
        assert row["ranks"] == [0] and row["calls"] == 1 and row["config"] == "transposed"
        assert row["default_us"] > 0 and row["tuned_us"] > 0
    assert (fprop["line"], dgrad["line"], never["line"]) == (3, 4, 5)
    assert never["ranks"] == [] and not never["met"]


@pytest.mark.slow
def test_rows_are_launched_on_every_rank_and_all_ranks_switch_at_the_same_step(
    folder: Path,
) -> None:
    done = gemmtune(
        folder,
        *("replay", "tuned.csv", "--pairs", "3", "--aa-pairs", "2", "--json", "ranks.json"),
        *("--", "torchrun", "--nproc-per-node", "2", "train.py", "5000"),
    )
    assert done.returncode in (0, 1), done.stderr
    values = json.loads((folder / "ranks.json").read_text())
    assert values["ranks"] == [0, 1] and values["world"] == 2 and values["pairs"] == 3
    first, second = arms.read_steps(folder / "ranks.steps")
    assert [r.kind for r in first.rounds] == ["warmup", "probe", "control", "compare", "end"]
    assert first.rounds == second.rounds
    tuned = {i: r.tuned(i) for r in first.rounds[:-1] for i in range(r.first, r.end)}
    for rank in (first, second):
        ran = {s.step: bool(s.rows[0].tuned) for s in rank.steps}
        assert ran == {i: arm for i, arm in tuned.items() if i}
    assert [row["ranks"] for row in values["rows"]] == [[0, 1], [0, 1], []]
    assert [row["calls"] for row in values["rows"]] == [1, 1, 0]


def test_a_table_of_defaults_leaves_the_losses_bitwise(folder: Path, plain: list[float]) -> None:
    done = gemmtune(folder, "run", "default.csv", "--", sys.executable, "train.py", "20")
    assert len(plain) == 20 and losses(done) == plain
    assert "gemmtune: 2 of 3 rows used, on 1 rank, 2 calls per step" in done.stderr.splitlines()


def test_exports_apply_the_table_and_the_losses_stay_close(
    folder: Path, plain: list[float]
) -> None:
    command = f"{sys.executable} -m gemmtune env tuned.csv"
    script = f'eval "$({command})" && {sys.executable} train.py 20'
    done = shell(folder, "sh", "-c", script)
    assert "gemmtune: 2 of 3 rows used, on 1 rank, 2 calls per step" in done.stderr.splitlines()
    assert losses(done) == pytest.approx(plain, rel=1e-5)


def test_an_alternative_that_raises_is_reported_and_the_job_goes_on(
    folder: Path, plain: list[float]
) -> None:
    done = gemmtune(
        folder, "run", "broken.csv", "--", sys.executable, "train.py", "20", "fail", "--", "-o"
    )
    assert done.returncode == 7
    assert "['fail', '--', '-o']" in done.stdout
    assert losses(done) == plain
    assert "0 of 3 rows used; 40 calls went through as the job made them (abacus" in done.stderr


def test_a_killed_job_leaves_its_steps(folder: Path) -> None:
    done = gemmtune(
        folder,
        *("replay", "tuned.csv", "--block", "3", "--aa-pairs", "2", "--pairs", "10"),
        *("-o", "killed.json", "--", sys.executable, "train.py", "5000", "kill"),
    )
    assert done.returncode == 2
    assert "the job ended with exit code 137" in done.stderr
    values = json.loads((folder / "killed.json").read_text())
    # steps 0 to 60 are 3 to warm up, 12 of the control, and 7 whole pairs of 6
    assert values["steps_seen"] == 61 and values["pairs"] == 7
    assert "the job ended early: 7 of 10 pairs are whole (61 of 75 steps)" in done.stdout


@pytest.mark.slow
def test_a_rank_that_loses_the_store_stays_with_the_default_and_is_named(folder: Path) -> None:
    done = gemmtune(
        folder,
        *("replay", "tuned.csv", "--block", "3", "--aa-pairs", "2", "--pairs", "3"),
        *("-o", "lost.json", "--", "torchrun", "--nproc-per-node", "2", "train.py", "5000", "lose"),
    )
    assert done.returncode == 2, done.stderr
    assert "rank 1 went on with the default alone: the decision of rank 0 did not" in done.stdout
    assert "arrive: the store is gone (step 15)" in done.stdout
    first, second = arms.read_steps(folder / "lost.steps")
    assert [r.kind for r in first.rounds] == ["warmup", "control", "compare", "end"]
    assert first.rounds[:2] == second.rounds and len(second.steps) > 30
    assert not any(s.rows[0].tuned for s in second.steps)
    assert json.loads((folder / "lost.json").read_text())["pairs"] == 0


def test_a_killed_replay_loses_no_step(folder: Path) -> None:
    plan = ("--block", "20", "--aa-pairs", "8", "--pairs", "10", "-o", "again.json")
    argv = ("-m", "gemmtune", "replay", "tuned.csv", *plan, "--", sys.executable, "train.py")
    with subprocess.Popen(
        [sys.executable, *argv, "9999"], cwd=folder, env=clean(), stdout=subprocess.DEVNULL
    ) as replay:
        logs = folder / "again.steps"
        wait_for(lambda: [r for r in arms.read_steps(logs) if len(r.steps) > 20])
        replay.kill()
    assert not (folder / "again.json").exists()
    wait_for(lambda: [r for r in arms.read_steps(logs) if r.rounds[-1].kind == "end"])
    done = gemmtune(folder, "replay", "tuned.csv", "--reanalyse", "-o", "again.json")
    assert done.returncode in (0, 1), done.stderr
    values = json.loads((folder / "again.json").read_text())
    assert values["pairs"] == 10 and values["job"] == [sys.executable, "train.py", "9999"]
    assert values["machine"]["arch"] and values["job_exit_code"] is None
    before = (folder / "again.json").read_bytes()
    gemmtune(folder, "replay", "tuned.csv", "--reanalyse", "-o", "again.json")
    assert (folder / "again.json").read_bytes() == before
    table(folder / "other.csv", "transposed", gemms=(FPROP,))
    other = gemmtune(folder, "replay", "other.csv", "--reanalyse", "-o", "again.json")
    assert other.returncode == 2 and "has the steps of another table" in other.stderr
    # Cut short once more, the steps are kept when the next replay begins.
    (folder / "again.json").unlink()
    done = gemmtune(
        folder, "replay", "tuned.csv", *plan, "--", sys.executable, "train.py", "5", "quick"
    )
    assert "the steps of a replay that was cut short are in again.steps.1" in done.stderr
    assert len(arms.read_steps(folder / "again.steps.1")[0].steps) > 20


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_steps_cannot_be_judged_again_where_there_are_none(folder: Path) -> None:
    done = gemmtune(folder, "replay", "tuned.csv", "--reanalyse", "-o", "no.json")
    assert done.returncode == 2
    assert "no step logs in no.steps: replay the job first, with -o no.json" in done.stderr
    done = gemmtune(folder, "replay", "tuned.csv", "--reanalyse")
    assert done.returncode == 2 and "reads the steps beside -o, as in:" in done.stderr


def test_a_table_made_elsewhere_is_refused(folder: Path) -> None:
    argv = ("--", sys.executable, "train.py", "2")
    done = gemmtune(folder, "run", "foreign.csv", *argv)
    assert done.returncode == 0 and len(losses(done)) == 2
    (said, used) = done.stderr.splitlines()
    assert said.startswith("gemmtune: ") and said.endswith("the job goes on untuned")
    assert used.startswith("gemmtune: 0 of 3 rows used: processor: PDP-11 when the table was made")
    strict = gemmtune(folder, "run", "--strict", "foreign.csv", *argv)
    assert strict.returncode == 3 and losses(strict) == []
    assert len(strict.stderr.splitlines()) == 1
    replay = gemmtune(folder, "replay", "foreign.csv", *argv)
    assert replay.returncode == 3 and losses(replay) == []
    assert "cannot be replayed here: processor: PDP-11" in replay.stderr


def test_a_job_that_reaches_no_step_is_said(folder: Path) -> None:
    done = gemmtune(folder, "replay", "tuned.csv", "--", sys.executable, "train.py", "0")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == (
        "nothing was compared: no process of the job reached a step"
    )


def test_a_transformer_engine_table_is_handed_over_by_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "it's te.csv"
    path.write_text(te.HEADERS["te-v1"] + "\n")
    show = "import os; print({k: v for k, v in os.environ.items() if k[:3] == 'TE_'})"
    user = {"TE_HIPBLASLT_TUNING_RUN_COUNT": "20", "TE_HIPBLASLT_ALGO_SAVE": str(path)}
    want = f"{ {'TE_HIPBLASLT_ALGO_LOAD': str(path)} }\n"
    done = gemmtune(tmp_path, "run", path.name, "--", sys.executable, "-c", show, **user)
    assert (done.returncode, done.stdout) == (0, want)
    for name, value in user.items():
        assert f"{name}={value} is unset for this job" in done.stderr
    script = f'eval "$("$0" -m gemmtune env "$1")" && "$0" -c "{show}"'
    done = shell(tmp_path, "sh", "-c", script, sys.executable, path.name, **user)
    assert (done.returncode, done.stdout) == (0, want)


def test_a_table_without_rows_is_no_difference(tmp_path: Path) -> None:
    write(tmp_path / "empty.csv", [], Tuned, {})
    done = gemmtune(tmp_path, "replay", "empty.csv", "-o", "empty.json", "--", "false")
    assert done.returncode == 0
    assert done.stdout == "no difference: the table has no rows, so the default stays everywhere\n"
    values = json.loads((tmp_path / "empty.json").read_text())
    assert values["verdict"]["kind"] == "no difference" and values["rows"] == []
    done = gemmtune(tmp_path, "run", "empty.csv", "--", "false")
    assert done.returncode == 1
    assert done.stderr == "gemmtune: the table has no rows: the job ran as it is\n"


def test_a_row_is_named_by_its_line_whatever_comments_stand_before_it(folder: Path) -> None:
    head, *rest = (folder / "tuned.csv").read_text().splitlines(keepends=True)
    (folder / "comments.csv").write_text("".join([head, "  # by hand\n", "\n", *rest]))
    argv = ("comments.csv", "-o", "comments.json", "--", sys.executable, "train.py", "0")
    done = gemmtune(folder, "replay", *argv)
    assert done.returncode == 2, done.stderr
    rows = json.loads((folder / "comments.json").read_text())["rows"]
    assert [row["line"] for row in rows] == [5, 6, 7]  # after the provenance


@pytest.mark.parametrize("command", ["run", "replay"])
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no table: write it first, as in: gemmtune {} tuned.csv -- python train.py"),
        (["absent.csv", "--", "true"], "there is no table absent.csv: write it first"),
        (["tuned.csv"], "no job: write it after --, as in: gemmtune {} tuned.csv -- python"),
        (["tuned.csv", "--"], "no job: write it after --"),
    ],
)
def test_what_is_missing_is_one_clear_line(
    command: str, argv: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(main, [command, *argv])
    assert done.exit_code == 2
    assert done.stderr.startswith("gemmtune: " + words.format(command))
    assert done.stderr.count("\n") == 1
