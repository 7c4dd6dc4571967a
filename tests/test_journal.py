"""The journal: what is kept, what is read again, what is refused; sweeps that go on from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Scripted

from gemmtune import table
from gemmtune.backends.cpu import Cpu
from gemmtune.errors import GemmtuneError, TableError, UsageError
from gemmtune.gemm import Algo, Gemm
from gemmtune.sweep import journal, results, run
from gemmtune.sweep.journal import Journal
from gemmtune.sweep.measure import Choice
from gemmtune.sweep.search import Answer, Ask, Task

QUICK = run.Options(seconds_per_shape=0.01)
CHOICES = [Choice(Algo(i, i, f"größe {i}"), 16 * i) for i in range(3)]
TASK = Task(scripted.gemm(32), 0.1 + 0.2, True, 0.005, 7)
ANSWERED = [
    (Ask("check", 0), Answer(1 / 3)),
    (Ask("check", 1), Answer(0.0, "killed\nby “SIGSEGV”")),
    (Ask("whole", 2), Answer()),
    (Ask("time", 2, 20, 4), Answer(1e-7)),
]


def write(path: Path) -> Journal:
    kept = Journal(path)
    kept.start({"stage": "sweep", "machine": {}})
    record = kept.begin(TASK, 2.5, 0.25, CHOICES)
    for ask, answer in ANSWERED:
        kept.answer(record, ask, answer)
    failed = kept.begin(TASK._replace(gemm=scripted.gemm(31)), 1, 0.1, [])
    kept.fail(failed, "no memory")
    return kept


def test_what_is_read_is_what_was_written(tmp_path):
    with write(tmp_path / "j") as kept:
        held = journal.read(tmp_path / "j")
        assert held.records == kept.held.records and held.pid == os.getpid()
    first, second = held.records.values()
    assert (first.task, first.choices, first.answered) == (TASK, CHOICES, ANSWERED)
    assert (first.calls, first.share, second.failed) == (2.5, 0.25, "no memory")
    assert held.provenance == {"stage": "sweep", "machine": {}}


def test_a_cut_anywhere_loses_the_torn_line_alone(tmp_path):
    path = tmp_path / "j"
    write(path).__exit__()
    whole = path.read_bytes()
    for end in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:end])
        kept = whole[: whole.rfind(b"\n", 0, end) + 1]
        with Journal(path) as again:
            again.start({"stage": "sweep", "machine": {}})
        after = path.read_bytes()
        assert after.startswith(kept)
        journal.read(path)
        assert len(after.splitlines()) - len(kept.splitlines()) == (1 if kept else 2)


def test_a_session_that_only_reads_changes_nothing(tmp_path):
    write(tmp_path / "j").__exit__()
    before = (tmp_path / "j").read_bytes()
    with Journal(tmp_path / "j"):
        pass
    assert (tmp_path / "j").read_bytes() == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_is_no_journal_is_said_in_a_line_that_names_its_place(tmp_path, data):
    path = tmp_path / "j"
    if not path.exists():
        write(path).__exit__()
        (tmp_path / "whole").write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    try:
        held = journal.read(path)
    except TableError as e:
        assert f"{path}:" in str(e) and "\n" not in str(e) and "--fresh" in str(e)
    else:
        for record in held.records.values():
            with contextlib.suppress(results.Diverged, results.Unfinished):
                results.rows_of(record, 0.005)
    finally:
        path.write_bytes((tmp_path / "whole").read_bytes())


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (1, '"machine":{}', '"machine":{"dev_cap":"x"}'),
        (1, '"machine":{}', '"machine":{"dev_cap":1e999}'),
        (1, '"machine":{}', '"machine":[90]'),
        (4, '"us":0.3', '"us":1e300,"was":0.3'),
        (4, '"us":0.3', f'"us":1{"0" * 400},"was":0.3'),
    ],
)
def test_a_value_that_no_sweep_writes_is_said_with_its_line(tmp_path, number, old, new):
    write(tmp_path / "c.samples.jsonl").__exit__()
    lines = (tmp_path / "c.samples.jsonl").read_text().splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    (tmp_path / "c.samples.jsonl").write_text("".join(lines))
    with pytest.raises(TableError, match=f"samples.jsonl:{number}: not a line of a sweep's"):
        run.reanalyse(tmp_path / "c.csv", tmp_path / "t.csv", 0.005)


def test_a_pipe_in_the_journal_s_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "c.samples.jsonl")
    with pytest.raises(UsageError, match="no plain file"):
        run.reanalyse(tmp_path / "c.csv", tmp_path / "t.csv", 0.005)


def test_an_older_file_is_set_aside_under_a_free_name(tmp_path):
    write(tmp_path / "j").__exit__()
    old = (tmp_path / "j").read_bytes()
    for name in ("j.old", "j.old2"):
        with Journal(tmp_path / "j", fresh=True) as kept:
            assert kept.aside == tmp_path / name and not kept.held.records
            kept.start({})
    assert (tmp_path / "j.old").read_bytes() == old


def test_two_writers_are_one_too_many(tmp_path):
    with write(tmp_path / "j"):
        for fresh in (False, True):
            with pytest.raises(UsageError, match=rf"another sweep \(pid {os.getpid()}\) is wri"):
                Journal(tmp_path / "j", fresh)
    Journal(tmp_path / "j").__exit__()


# ------------------------------------------------------------------------------------------- sweeps


def shapes(*gemms: Gemm) -> table.Table[table.Shape]:
    return table.Table([table.Shape(g, calls=2) for g in gemms], {"threads": 1})


def sweep(folder: Path, *gemms: Gemm, options=QUICK, notes: list[str] | None = None):
    paths = folder / "candidates.csv", folder / "tuned.csv"

    def progress(event):
        if event.note and notes is not None:
            notes.append(event.note)

    return run.sweep(shapes(*gemms), Scripted(), *paths, options, progress)


def answers(folder: Path) -> dict[Gemm, list]:
    held = journal.read(folder / "candidates.samples.jsonl")
    return {gemm: record.answered for gemm, record in held.records.items()}


def test_a_sweep_cut_anywhere_goes_on_to_the_same_tables(tmp_path):
    """Cut after a line, as a kill does, and within one, as a full disk does."""
    gemms = scripted.gemm(32), scripted.gemm(33)
    sweep(tmp_path, *gemms)
    path = tmp_path / "candidates.samples.jsonl"
    whole, tables = path.read_bytes(), [(tmp_path / n).read_bytes() for n in NAMES]
    asked = answers(tmp_path)
    rng = random.Random(0)
    for _ in range(4):
        end = rng.randrange(len(whole))
        path.write_bytes(whole[:end])
        sweep(tmp_path, *gemms)
        assert [(tmp_path / n).read_bytes() for n in NAMES] == tables
        assert answers(tmp_path) == asked
        assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, end) + 1])


NAMES = ("candidates.csv", "tuned.csv")


def test_another_seed_or_another_search_measures_anew_and_says_so(tmp_path):
    gemm = scripted.gemm(32)
    sweep(tmp_path, gemm)
    notes: list[str] = []
    summary = sweep(tmp_path, gemm, options=QUICK._replace(seed=5), notes=notes)
    assert summary.resumed == 0 and notes == [ANEW]
    path = tmp_path / "candidates.samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    place = max(i for i, line in enumerate(lines) if '"time"' in line)
    lines[place] = lines[place].replace('"time",', '"time",9', 1)
    path.write_text("".join(lines).replace('"time",9', '"time",'))
    swapped = [place - 1, place]
    lines[place - 1 : place + 1] = [lines[i].replace('"time",9', '"time",') for i in swapped[::-1]]
    path.write_text("".join(lines))
    notes.clear()
    with pytest.raises(results.Diverged):
        results.rows_of(journal.read(path).records[gemm], 0.005)
    failed = run.reanalyse(tmp_path / "candidates.csv", tmp_path / "tuned.csv", 0.005).failed
    assert "another version" in failed[0].reason
    assert sweep(tmp_path, gemm, options=QUICK._replace(seed=5), notes=notes).lines[0].algo
    assert notes == [ANEW]
    assert len(path.read_text().split('"begin"')) == 4  # nothing that was measured is lost


def test_a_kill_before_the_reason_of_a_failure_is_no_failure(tmp_path):
    with Journal(tmp_path / "j") as kept:
        kept.start({})
        kept.begin(TASK, 1, 0.1, [])
    with pytest.raises(results.Unfinished):
        results.rows_of(journal.read(tmp_path / "j").records[TASK.gemm], 0.005)


ANEW = "1 Gemms are measured anew: the questions have changed"


def test_reanalysis_asks_nothing_and_follows_the_least_gain(tmp_path):
    gemms = scripted.gemm(32), scripted.gemm(33), scripted.gemm(45)
    summary = sweep(tmp_path, *gemms)
    before = [(tmp_path / n).read_bytes() for n in NAMES]
    samples = (tmp_path / "candidates.samples.jsonl").read_bytes()
    paths = tmp_path / "candidates.csv", tmp_path / "tuned.csv"
    for path in paths:
        path.unlink()
    again = run.reanalyse(*paths, 0.005)
    assert [(tmp_path / n).read_bytes() for n in NAMES] == before
    assert again.lines == summary.lines
    assert not any(line.algo for line in run.reanalyse(*paths, 0.5).lines)
    assert table.read(paths[1], table.Tuned).rows == []
    assert run.reanalyse(*paths, 0.005).lines == summary.lines
    assert (tmp_path / "candidates.samples.jsonl").read_bytes() == samples
    with pytest.raises(UsageError, match=r"cannot read .*none.samples.jsonl"):
        run.reanalyse(tmp_path / "none.csv", paths[1], 0.005)


def test_a_table_without_its_journal_is_kept_under_another_name(tmp_path):
    (tmp_path / "candidates.csv").write_text("by hand\n")
    notes: list[str] = []
    sweep(tmp_path, scripted.gemm(31), notes=notes)
    assert (tmp_path / "candidates.csv.old").read_text() == "by hand\n"
    assert "has no journal" in notes[0]


def test_a_budget_that_is_spent_leaves_the_rest_for_the_next_time(tmp_path):
    gemms = [scripted.gemm(40, n=n) for n in (60, 40, 20)]
    summary = sweep(tmp_path, *gemms, options=QUICK._replace(budget_s=1.0))
    assert summary.unswept and summary.seconds < 10
    assert set(summary.unswept) | {line.gemm for line in summary.lines} == set(gemms)
    held = answers(tmp_path)
    longer = sweep(tmp_path, *gemms, options=QUICK._replace(budget_s=600, seconds_per_shape=1))
    assert not longer.unswept and len(longer.lines) == 3
    for gemm, first in held.items():
        assert answers(tmp_path)[gemm][: len(first)] == first


def start(folder: Path, *words: str) -> subprocess.Popen:
    path = os.pathsep.join((os.getcwd(), os.path.dirname(scripted.__file__)))
    return subprocess.Popen(
        [sys.executable, scripted.__file__, str(folder / "shapes.csv"), str(folder), *words],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_winner(tmp_path):
    gemms = [scripted.gemm(m, n=n) for n in range(20, 24) for m in (32, 33, 41, 44, 45)]
    table.write(tmp_path / "shapes.csv", shapes(*gemms).rows, table.Shape, {"threads": 1})
    (tmp_path / "whole").mkdir()
    sweep(tmp_path / "whole", *gemms)
    rng, path = random.Random(1), tmp_path / "candidates.samples.jsonl"
    kills, before = 0, b""
    while kills < 20:
        child = start(tmp_path)
        while child.poll() is None and (not path.exists() or path.read_bytes() == before):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.4))
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.returncode == -signal.SIGKILL, "it was done before twenty kills"
        after = path.read_bytes()
        assert after.startswith(before[: before.rfind(b"\n") + 1])
        for name in NAMES:  # never half-written
            if (tmp_path / name).exists():
                table.read(tmp_path / name, table.Candidate if name == NAMES[0] else table.Tuned)
        kills, before = kills + 1, after
    assert start(tmp_path).wait() == 0
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert answers(tmp_path) == answers(tmp_path / "whole")


@pytest.mark.slow
def test_kills_on_a_real_clock_repeat_no_sample(tmp_path):
    types = ("float32",) * 3
    gemms = [Gemm(*(m, 32, 32), "T", "N", *types, "-", 32, 32, m) for m in (32, 48)]
    table.write(tmp_path / "shapes.csv", shapes(*gemms).rows, table.Shape, {"threads": 1})
    path, before = tmp_path / "candidates.samples.jsonl", b""
    code = "import sys; from gemmtune.cli import main; main()"
    words = ["sweep", "shapes.csv", "--backend", "cpu", "--seconds-per-shape", "0.5"]
    for wait_s in (0.05, 0.3, 0.6, None):
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if wait_s is None:
            assert child.wait() == 0
        else:
            while child.poll() is None and (not path.exists() or path.read_bytes() == before):
                time.sleep(0.01)
            time.sleep(wait_s)
            child.kill()
            child.wait()
        after = path.read_bytes()
        assert after.startswith(before[: before.rfind(b"\n") + 1])
        before = after
    held = journal.read(path)
    assert held.begun == len(held.records) == 2  # a Gemm begun anew would repeat what is there
    for gemm, record in held.records.items():
        assert [c.algo for c in record.choices] == list(Cpu().algos(gemm))
        checked = [ask.algo for ask, _ in record.answered if ask.kind == "check"]
        assert sorted(checked) == list(range(len(record.choices)))
        results.rows_of(record, 0.005)  # every answer is one to a question, in order


def test_errors_of_the_journal_are_gemmtune_s(tmp_path):
    (tmp_path / "j").mkdir()
    with pytest.raises(GemmtuneError, match=r"cannot write .*j: Is a directory"):
        Journal(tmp_path / "j")
