"""`gemmtune replay --a CMD --b CMD`: the order, the figures and the verdict; and real processes."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import ROOT, Run, torchrun

from gemmtune.cli import main
from gemmtune.errors import UsageError
from gemmtune.job.memory import out_of_memory_line
from gemmtune.replay import compare, processes, watch
from gemmtune.replay.compare import FAILED, KILLED, NO_MEMORY, OK, SHORT, Outcome
from gemmtune.replay.processes import Journal, _outcome
from gemmtune.replay.turns import Plan, parse_command, schedule
from gemmtune.replay.turns import Run as Process

JOB = """
import os, sys, time
words = sys.argv[1:]
if "broken" in words:
    print("no such option", file=sys.stderr)
    sys.exit(3)
import torch
import gemmtune
rank = os.environ.get("RANK", "0")
sleep_s = 0.004
if "--te" in words or rank == os.environ.get("SLOW_RANK"):
    sleep_s = 0.04
p = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([p], lr=0.1)
gemmtune.work(tokens=8, flops=1e9, peak_flops=1e12)
with open("pids", "a") as f:
    f.write(f"{os.getpid()} {os.environ.get('VAR', '')} {words}\\n")
for step in range(3000):
    p.sum().backward()
    optimizer.step()
    time.sleep(sleep_s)
    if step == 2 and "starve" in words:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
"""


def ok(pair: int, arm: str, ms: float, **more: Any) -> Outcome:
    times = {"0": [ms * 1e3] * 5}
    return Outcome(pair, arm, OK, 0, 1.0, times, world=1, device="CPU", **more)


def ended(pair: int, arm: str, status: str, **more: Any) -> Outcome:
    return Outcome(pair, arm, status, 1, 1.0, at=4, error="words", **more)


def verdict(outcomes: list[Outcome], runs: int = 5) -> compare.Verdict:
    return compare.judge(compare.analyse(Plan(runs), outcomes))


# What runs next


@pytest.mark.parametrize("seed", range(20))
def test_order_is_balanced_random_and_kept_when_more_runs_are_asked_for(seed: int) -> None:
    runs = schedule(Plan(8, seed=seed))
    firsts = [run.arm for run in runs[::2]]
    assert firsts.count("a") == 4 and {run.pair for run in runs} == set(range(8))
    assert all({x.arm, y.arm} == {"a", "b"} for x, y in zip(runs[::2], runs[1::2], strict=True))
    assert runs[:10] == schedule(Plan(5, seed=seed))
    orders = {tuple(schedule(Plan(8, seed=s))) for s in range(20)}
    assert len(orders) > 5


def test_an_arm_out_of_memory_is_not_run_again_and_the_other_gets_its_figures() -> None:
    plan = Plan(5)
    assert [r.arm for r in compare.remaining(plan, [ended(0, "a", NO_MEMORY)])] == ["b", "b"]
    done = [ended(0, "a", KILLED), ok(0, "b", 5), ok(1, "b", 5)]
    assert compare.remaining(plan, done) == []


def test_an_arm_that_fails_twice_in_a_row_ends_the_comparison() -> None:
    plan = Plan(5)
    once = [ended(0, "a", FAILED), ok(0, "b", 5)]
    assert len(compare.remaining(plan, once)) == 8
    assert compare.remaining(plan, [*once, ended(1, "a", FAILED)]) == []
    assert len(compare.remaining(plan, [*once, ok(1, "a", 5), ended(2, "a", SHORT)])) == 6


# What was shown


def test_the_slowest_rank_counts_in_every_step() -> None:
    outcome = Outcome(0, "a", OK, 0, 1.0, {"0": [1.0, 9.0, 1.0], "1": [9.0, 1.0, 9.0]})
    assert outcome.step_us == 9.0


def test_throughput_and_mfu_follow_from_what_a_rank_does_in_a_step() -> None:
    work = {"tokens": 1000.0, "flops": 2e12, "peak_flops": 1e14}
    outcomes = [ok(i, arm, 50, **work)._replace(world=4) for i in (0, 1) for arm in "ab"]
    a, _ = compare.analyse(Plan(2), outcomes).arms
    assert a.tokens_per_s == pytest.approx(80_000)  # 4 ranks · 20 steps a second
    assert a.tflops_per_rank == pytest.approx(40) and a.mfu == pytest.approx(0.4)
    a, _ = compare.analyse(Plan(2), outcomes, tokens_per_step=100).arms
    assert a.tokens_per_s == pytest.approx(2000)
    bare, _ = compare.analyse(Plan(2), [ok(0, "a", 50)]).arms
    assert (bare.tokens_per_s, bare.tflops_per_rank, bare.mfu) == (None, None, None)


@pytest.mark.parametrize(("b_ms", "kind"), [(90.0, "faster"), (110.0, "slower")])
def test_a_difference_is_told_with_its_interval(b_ms: float, kind: str) -> None:
    rng = random.Random(1)
    outcomes = [
        ok(i, arm, ms * rng.uniform(0.995, 1.005))
        for i in range(5)
        for arm, ms in (("a", 100.0), ("b", b_ms))
    ]
    found = verdict(outcomes)
    assert found.kind == kind
    figures = re.fullmatch(rf"b is {kind} by (\S+) % \[(\S+), (\S+)\]", found.text)
    assert figures is not None
    middle, low, high = map(float, figures.groups())
    assert low < middle < high and low < abs(100 * (100 / b_ms - 1)) < high


def test_one_job_against_itself_differs_in_about_one_of_twenty_comparisons() -> None:
    rng = random.Random(2)
    claims = 0
    for _ in range(400):
        outcomes = []
        for pair in range(5):
            drift = rng.gauss(0, 0.1)
            outcomes += [ok(pair, arm, math.exp(rng.gauss(drift, 0.02))) for arm in "ab"]
        claims += verdict(outcomes).kind != "no difference"
    assert 4 <= claims <= 36  # 20 expected, and 4.4 is the deviation


def test_out_of_memory_is_a_result_beside_the_other_arms_figures() -> None:
    outcomes = [ended(0, "b", NO_MEMORY, memory="GPU"), ok(0, "a", 5), ok(1, "a", 5)]
    result = compare.analyse(Plan(5), outcomes)
    found = compare.judge(result)
    assert found[:2] == ("out of memory", "b ran out of memory at step 4 (GPU)")
    assert compare.EXIT[found.kind] == 0
    said = list(compare.lines(result, found))
    assert any(re.fullmatch(r"step, ms +5\.00 +-", line) for line in said)
    assert "b said: words" in said
    killed = [ended(0, "b", KILLED), ok(0, "a", 5)]
    assert verdict(killed).text == "b was killed at step 4 (out of memory?)"


def test_out_of_memory_after_whole_pairs_is_told_with_the_ratio() -> None:
    pairs = [ok(i, arm, ms + i / 100) for i in range(3) for arm, ms in (("a", 20), ("b", 10))]
    found = verdict([*pairs, ended(3, "b", NO_MEMORY)])
    assert found.kind == "out of memory"
    assert found.text.startswith("b ran out of memory at step 4; b is faster by ")


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([ended(0, "a", NO_MEMORY), ended(0, "b", NO_MEMORY)], "a ran out of .*; b ran out of "),
        ([ok(0, "a", 5), ok(0, "b", 5)], "1 whole pair, 2 are needed"),
        ([ok(0, "b", 5), ended(0, "a", FAILED)], "a failed at step 4 with exit code 1: words"),
        ([], "0 whole pairs"),
    ],
)
def test_nothing_is_said_of_less_than_two_pairs(outcomes: list[Outcome], words: str) -> None:
    found = verdict(outcomes)
    assert found.kind == "unknown" and re.search(words, found.text), found.text
    assert json.dumps(compare.as_json(compare.analyse(Plan(5), outcomes), outcomes))


# How a process ended


def seen(steps: int, rank: int = 0, world: int = 1) -> watch.Seen:
    times = {i: 1000.0 if i else None for i in range(steps)}
    return watch.Seen(rank, world, "CPU", times, 1 << 20, {})


@pytest.mark.parametrize(
    ("code", "err", "status", "said"),
    [
        (1, "Traceback\nMemoryError\n", NO_MEMORY, "Python"),
        (1, "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\nx\n", NO_MEMORY, "GPU"),
        (1, "RuntimeError: HIP out of memory\n", NO_MEMORY, "GPU"),
        (1, "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling\n", NO_MEMORY, "GPU"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you\n", NO_MEMORY, "CPU"),
        (1, "numpy._core._exceptions._ArrayMemoryError: Unable\n", NO_MEMORY, "Python"),
        (137, "", KILLED, ""),
        (1, "  exitcode  : -9 (pid: 7)\n", KILLED, ""),
        (3, "ValueError: b\n=====\n", FAILED, "ValueError: b"),
        (1, "[rank0]: ValueError: b\nx.ChildFailedError:\n", FAILED, "[rank0]: ValueError: b"),
        (3, "bad luck\n\n", FAILED, "bad luck"),
        (143, "", FAILED, "(nothing on stderr)"),
        (0, "", SHORT, "ended after 6 of 23 steps: let it run longer, or lower --steps"),
    ],
)
def test_how_a_job_ended_is_told_apart(code: int, err: str, status: str, said: str) -> None:
    run = Process(0, "a")
    ranks = [seen(7, 0, 2), seen(6, 1, 2)]
    outcome = _outcome(run, Plan(), ranks, code, 1.0, err, "", True)
    assert (outcome.status, outcome.at) == (status, 7)
    assert outcome.memory == said or outcome.error.startswith(said)
    whole = _outcome(run, Plan(), [seen(23)], code, 1.0, err, "", True)
    assert whole.status == OK and len(whole.ranks_us["0"]) == 20
    left_to_run = _outcome(run, Plan(), [seen(23)], code, 1.0, err, "", False)
    assert left_to_run.status == (status if code else OK)


def test_words_about_memory_are_not_an_error_of_it() -> None:
    assert out_of_memory_line("except MemoryError:\nused memory: 5 GiB\n") is None


# The command line


def test_an_arm_is_read_as_a_shell_would() -> None:
    found = parse_command("--a", "X=1 Y='a b' python 'my train.py' Z=2")
    assert found.env == {"X": "1", "Y": "a b"}
    assert found.words == ["python", "my train.py", "Z=2"]
    for text, words in (("X=1", "names no job"), ("'", "quotes"), ("a && b", "sh -c")):
        with pytest.raises(UsageError, match=words):
            parse_command("--a", text)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--a", "true"], "--a compares two jobs, and both are to be named"),
        (["t.csv", "--fresh", "--", "true"], "--fresh compares two jobs"),
        (["--a", "true", "--b", "true", "--pairs", "3"], "--pairs has no meaning with --a and"),
        (["--a", "true", "--b", "true", "--", "true"], "has no meaning with --a and --b"),
        (["--a", "true", "--b", "true", "--runs", "1"], "--runs 1 is too few: give 2 or more"),
        (["--a", "true", "--b", "true", "--warmup", "0"], "--warmup 0 is too few"),
        (["--a", "true", "--b", "nowhere.exe"], "cannot start the job: 'nowhere.exe'"),
        (["--a", "true", "--b", "true", "-o", "absent/x.json"], "cannot write absent/x.json"),
    ],
)
def test_a_wrong_request_is_one_clear_line(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["replay", *argv])
    assert done.exit_code == 2
    assert words in done.stderr and done.stderr.count("\n") == 1


# What is kept


def test_whole_lines_are_kept_failures_tried_again_and_other_comparisons_refused(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, {"a": "x"}, fresh=False)
    kept = [ok(0, "a", 5), ended(0, "b", NO_MEMORY), ended(1, "b", FAILED)]
    for outcome in kept:
        journal.add(outcome)
    with pytest.raises(UsageError, match="another gemmtune writes"):
        Journal(tmp_path, {"a": "x"}, fresh=False)
    journal.close()
    with (tmp_path / "runs.jsonl").open("a") as f:
        f.write('{"pair": 1, "ar')
    again = Journal(tmp_path, {"a": "x"}, fresh=False)
    assert again.outcomes == kept[:2]
    again.add(ok(1, "a", 5))
    again.close()
    with pytest.raises(UsageError, match="holds another comparison \\(different: a\\)"):
        Journal(tmp_path, {"a": "y"}, fresh=False)
    last = Journal(tmp_path, {"a": "x"}, fresh=False)
    assert last.outcomes == [*kept[:2], ok(1, "a", 5)]
    last.close()
    anew = Journal(tmp_path, {"a": "y"}, fresh=True)
    assert anew.outcomes == []
    anew.close()
    (tmp_path / "runs.jsonl").write_text("{}\nnothing\n")
    with pytest.raises(UsageError, match="is damaged"):
        Journal(tmp_path, {"a": "y"}, fresh=False)


# Real processes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(JOB)
    return tmp_path


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_example_in_the_help_killed_and_interrupted_goes_on_where_it_was(
    folder: Path, gemmtune: Run
) -> None:
    shown = CliRunner().invoke(main, ["replay", "--help"]).output
    (line,) = re.findall(r"^ *gemmtune (replay --a .*)$", shown, re.MULTILINE)
    argv = (*shlex.split(line), "--runs", "2", "--steps", "12", "-o", "ab.json")
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": programs, "OMP_NUM_THREADS": "1"}
    pids, journal = folder / "pids", folder / "ab.runs" / "runs.jsonl"

    def started() -> list[int]:
        written = pids.read_text().splitlines() if pids.exists() else []
        return [int(line.split()[0]) for line in written]

    def interrupt(number: int, processes: int) -> int:
        """End the comparison while that process trains; what it exits with."""
        # A shell's background job ignores SIGINT, and so does all that the tests start there.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        code += "from gemmtune.cli import main; main()"
        words = [sys.executable, "-c", code, *argv]
        with subprocess.Popen(words, cwd=folder, env=env, stderr=subprocess.PIPE) as child:
            until(lambda: len(started()) == processes)
            child.send_signal(number)
            child.communicate(timeout=60)
        until(lambda: not alive(started()[-1]))  # its job does not run on
        return child.returncode

    assert interrupt(signal.SIGKILL, 2) == -signal.SIGKILL
    first = journal.read_bytes()
    assert first.count(b"\n") == 2  # what is compared, and the first process
    assert interrupt(signal.SIGINT, 3) == 130
    done = gemmtune(*argv, cwd=folder, code=1)
    assert len(started()) == 6  # 4 whole ones
    settings = [line.split(" ", 1)[1] for line in pids.read_text().splitlines()]
    assert set(settings) == {" []", "1 ['--te']"}
    assert journal.read_bytes().startswith(first) and journal.read_bytes().count(b"\n") == 5
    assert re.fullmatch(r"b is slower by \S+ % \[\S+, \S+\]", done.stdout.splitlines()[-1])
    values = json.loads((folder / "ab.json").read_text())
    assert values["verdict"]["kind"] == "slower" and values["pairs"] == 2
    for process in values["processes"]:
        assert [len(times) for times in process["ranks_us"].values()] == [12]
        assert min(process["ranks_us"]["0"]) >= (4000 if process["arm"] == "a" else 40_000)
    assert values["arms"][0]["peak_bytes"] > 1 << 20 and values["arms"][0]["mfu"] > 0
    again = gemmtune(*argv, cwd=folder, code=1)
    assert again.stdout == done.stdout and len(started()) == 6


def test_jobs_that_run_out_of_memory_and_fail_leave_their_words(
    folder: Path, gemmtune: Run
) -> None:
    argv = ("replay", "--a", "python train.py broken", "--b", "python train.py starve")
    done = gemmtune(*argv, cwd=folder, code=2)
    verdict = done.stdout.splitlines()[-1]
    assert "a failed at step 1 with exit code 3: no such option" in verdict
    assert "b ran out of memory at step 4 (GPU)" in verdict
    assert (folder / "compare.runs" / "a-1.err").read_text() == "no such option\n"
    assert "b said: torch.OutOfMemoryError: CUDA out of memory. Tried to" in done.stdout


@pytest.mark.slow
def test_the_reference_job_says_its_work_and_the_slowest_of_two_ranks_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    llama = f"{sys.executable} -m gemmtune.llama --steps 90 --seq 32"
    ranks = f"SLOW_RANK=1 {shlex.join([*torchrun(2), 'train.py'])}"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    commands = {arm: parse_command(f"--{arm}", text) for arm, text in (("a", llama), ("b", ranks))}
    heard: list[tuple[str, float]] = []
    outcomes = processes.compare(
        commands,
        Plan(1, steps=4),
        folder / "x.runs",
        stop=True,
        optimizer=None,
        fresh=False,
        tell=lambda outcome, left: heard.append((outcome.arm, left)),
    )
    assert sorted(arm for arm, _ in heard) == ["a", "b"] and heard[-1][1] == 0
    a, b = sorted(outcomes, key=lambda o: o.arm)
    assert a.status == b.status == OK, outcomes
    assert a.tokens == 64 and a.flops and a.peak_flops is None
    assert list(b.ranks_us) == ["0", "1"] and b.world == 2
    assert b.step_us >= 40_000 > min(b.ranks_us["0"])
