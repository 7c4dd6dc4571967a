"""The sweep: what is verified, what is chosen, what a crash costs, what is resumed and refused.

Times come from a script (scripted.py) or are not looked at; worker processes are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scripted
import torch
from click.testing import CliRunner
from scripted import Scripted

from gemmtune import regime, table
from gemmtune.backends import base, cpu
from gemmtune.cli import main
from gemmtune.cli.sweep import remarks
from gemmtune.errors import BackendError, Incompatible
from gemmtune.gemm import Gemm
from gemmtune.replay.plan import Plan
from gemmtune.sweep import journal, operands, plan, results, run, verify
from gemmtune.sweep.measure import Bench, choices
from gemmtune.sweep.search import Task
from gemmtune.sweep.worker import Workers

QUICK = run.Options(seconds_per_shape=0.01)


def rows_of(gemm: Gemm, *, sustained: bool = True, min_gain: float = 0.005, seed: int = 3):
    """The rows of one Gemm by algorithm, measured in this process."""
    task, found = Task(gemm, 0.01, sustained, min_gain, seed), choices(Scripted(), gemm)
    bench = Bench(Scripted(), gemm, [choice.algo for choice in found], seed, {})

    def answer(number, asks):
        return [bench.answer(place, ask) for place, ask in enumerate(asks, number)]

    verdicts = results.conduct(task, [c.algo.config for c in found], [], answer)
    record = journal.Record(0, task, 1, 1, found)
    return {r.algo.config: r for r in results.candidate_rows(record, verdicts, min_gain)}


def shapes(*gemms: Gemm, **provenance) -> table.Table[table.Shape]:
    return table.Table([table.Shape(g, calls=2) for g in gemms], {"threads": 1, **provenance})


def sweep(folder: Path, *gemms: Gemm, backend=None, options=QUICK, progress=lambda e: None, **made):
    paths = folder / "candidates.csv", folder / "tuned.csv"
    return run.sweep(shapes(*gemms, **made), backend or Scripted(), *paths, options, progress)


# ------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("unwritten", "NaN or not written"),
        ("wrong", "times the bound"),
        ("outside", "wrote outside its matrix"),
        ("no-beta", "times the bound"),
        ("raises", "cannot be launched: no such kernel"),
    ],
)
def test_a_wrong_algorithm_fails_before_it_is_timed(config, words):
    row = rows_of(scripted.gemm(34, beta=1, pad=2))[config]
    assert row.status == "failed" and words in row.reason
    assert row.time_us == 0 and "\n" not in row.reason


@pytest.mark.parametrize(
    ("m", "config", "words"),
    [
        (35, "unrepeatable", "not repeatable"),
        (36, "narrow", "bound"),
        (37, "overflows", "huge values"),
    ],
)
def test_a_fast_finalist_is_verified_whole(m, config, words):
    rows = rows_of(scripted.gemm(m))
    assert rows[config].status == "failed" and words in rows[config].reason
    assert rows["default"].status == "default"


def test_a_default_that_is_wrong_is_said(tmp_path):
    (line,) = sweep(tmp_path, scripted.gemm(34), backend=Wrong()).lines
    assert "NaN" in line.reason and line.algo is None
    (row,) = table.read(tmp_path / "candidates.csv", table.Candidate).rows
    assert row.algo == results.NO_ALGO and row.reason == line.reason
    assert sweep(tmp_path, scripted.gemm(34), backend=Wrong()).resumed == 1


class Wrong(Scripted):
    def algos(self, gemm):
        return super().algos(gemm)[1:]


def test_the_reference_is_the_product_in_float64():
    gemm = Gemm(*(200, 150, 70), "T", "N", *["bfloat16"] * 3, "bfloat16", 70, 70, 200, epi="bias")
    o = operands.draw(gemm, 0)
    exact = o.x.double() @ o.w.double() + o.bias.double()
    whole = verify.reference(gemm, o)
    torch.testing.assert_close(whole.exact, exact, rtol=1e-12, atol=1e-12)
    some = verify.reference(gemm, o, samples=20)
    assert some.exact.shape == (20, 20)
    assert {0, gemm.n - 1} <= set(some.rows.tolist()) and {0, 199} <= set(some.columns.tolist())
    torch.testing.assert_close(some.exact, exact[some.rows][:, some.columns])


def test_rounding_once_passes_and_computing_in_a_narrower_type_does_not():
    for kind, narrow in (("float32", torch.bfloat16), ("float64", torch.float32)):
        comp = "f64" if kind == "float64" else "f32"
        gemm = Gemm(*(64, 64, 512), "N", "N", *[kind] * 3, "-", 64, 512, 64, comp=comp)
        o = operands.draw(gemm, 0)
        ref = verify.reference(gemm, o)
        default = verify.error(o.x @ o.w, ref)
        assert default.worst < 1
        assert verify.judge(verify.error(ref.exact.to(o.d.dtype), ref), default, ref.floor) == ""
        bad = verify.error((o.x.to(narrow) @ o.w.to(narrow)).to(o.d.dtype), ref)
        assert verify.judge(bad, default, ref.floor)
    assert "the default's" in verify.judge(verify.Error(1e-3, 0.9), verify.Error(1e-6, 0.1), 1e-6)
    assert verify.judge(verify.Error(3e-6, 0.9), verify.Error(1e-7, 0.1), 1e-6) == ""
    nan = verify.Error(float("nan"), float("nan"))
    assert verify.judge(nan, default, ref.floor)


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("more", [{"beta": 1}, {"epi": "bias"}, {}])
def test_the_real_default_passes_at_every_scale(kind, more):
    bias = kind if "epi" in more else "-"
    comp = "f64" if kind == "float64" else "f32"
    gemm = Gemm(33, 65, 257, "T", "N", *[kind] * 3, bias, 260, 257, 40, comp=comp, **more)
    backend = cpu.Cpu()
    launch = backend.launcher(gemm, backend.algos(gemm)[0])
    checker = verify.Checker(gemm, launch, operands.draw(gemm, 0), seed=0)
    assert checker.quick(launch) == "" and checker.whole(launch) == ""
    assert all(default.worst < 1 for _, _, _, default in checker._whole)


# ------------------------------------------------------------------------------------------- search


def test_a_planted_faster_algorithm_is_chosen():
    rows = rows_of(scripted.gemm(32))
    won = rows["fast"]
    assert won.status == "winner" and won.regime == "sustained"
    assert won.ratio == pytest.approx(1.25, abs=0.03)
    assert 1.15 < won.ratio_low < won.ratio < won.ratio_high < 1.35
    assert rows["dreadful"].status == "dropped" and rows["slow"].status != "winner"
    assert rows["default"].ratio == 1


def test_a_tie_and_a_gain_below_the_least_keep_the_default():
    for seed in range(6):
        rows = rows_of(scripted.gemm(33), seed=seed)
        assert all(row.status != "winner" for row in rows.values())
    assert all(r.status != "winner" for r in rows_of(scripted.gemm(32), min_gain=0.3).values())


def test_what_does_not_matter_is_decided_by_the_screen():
    rows = rows_of(scripted.gemm(32), sustained=False)
    assert rows["fast"].status == "winner" and rows["fast"].regime == "screen"


# ----------------------------------------------------------------------------------------- operands


def test_operands_are_like_a_job_s_and_have_the_strides_of_the_key():
    types = ("float32",) * 3
    gemm = Gemm(*(96, 64, 256), "T", "T", *types, "-", 300, 70, 100, beta=1, api="addmm")
    o = operands.draw(gemm, 5)
    assert (o.x.stride(), o.w.stride()) == ((1, 70), (1, 300))
    assert o.d.stride() == o.c.stride() == (100, 1)
    assert float(o.x.std()) == pytest.approx(1, abs=0.05)
    assert float(o.w.std()) == pytest.approx(256**-0.5, rel=0.05)
    assert float((o.x @ o.w).std()) == pytest.approx(1, abs=0.1)
    assert torch.equal(o.x, operands.draw(gemm, 5).x)
    assert not torch.equal(o.x, operands.draw(gemm, 6).x)
    again = operands.copies(o, 3)
    assert len({s.x.data_ptr() for s in again}) == 3
    assert all(torch.equal(s.x, o.x) and s.w.stride() == o.w.stride() for s in again)


def test_sets_rotate_past_the_cache_within_512_mib():
    def square(n: int) -> Gemm:
        return Gemm(n, n, n, "N", "N", *["float32"] * 3, "-", n, n, n)

    assert operands.rotation(square(4096), 32 << 20) == 1
    assert operands.rotation(square(1024), 32 << 20) == 6
    assert operands.rotation(square(1024), 1 << 40) * square(1024).bytes <= 512 << 20
    assert operands.rotation(square(8), 1 << 30) == operands.MAX_SETS
    assert operands.cache_bytes("cpu") > 0


# ------------------------------------------------------------------------------------------ workers


def test_a_worker_has_the_threads_of_the_job():
    with (
        Workers(Threads(), scripted.gemm(31), 0, 1) as workers,
        pytest.raises(BackendError, match=r"^1 threads$"),
    ):
        workers.choices()


class Threads(Scripted):
    def algos(self, gemm):
        raise BackendError(f"{torch.get_num_threads()} threads")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_done_and_leaves_no_process(tmp_path, number):
    gemms = [scripted.gemm(32, k=64), scripted.gemm(39)]
    table.write(tmp_path / "shapes.csv", shapes(*gemms).rows, table.Shape, {"threads": 1})
    # A shell's background job ignores SIGINT, and so does all that the tests start there.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from gemmtune.backends import base; from gemmtune.cli import main; "
    code += "base.BACKENDS['scripted'] = 'scripted:Scripted'; main()"
    words = [sys.executable, "-c", code, "sweep", "shapes.csv", "--backend", "scripted"]
    path = os.pathsep.join((os.getcwd(), os.path.dirname(scripted.__file__)))
    child = subprocess.Popen(
        [*words, "--seconds-per-shape", "0.01"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in child.stderr:
        if line.startswith("[1/2]"):
            break
    time.sleep(0.5)  # into the Gemm that hangs
    if number == signal.SIGINT:
        os.killpg(child.pid, number)  # as a terminal does
    else:
        child.send_signal(number)
    told = child.communicate(timeout=30)[1]
    assert "interrupted; what was measured is kept in candidates.samples.jsonl; to go on: " in told
    assert "gemmtune sweep shapes.csv --backend scripted" in told
    assert child.returncode == 128 + number
    (row,) = table.read(tmp_path / "tuned.csv", table.Tuned).rows
    assert row.gemm == gemms[0]
    deadline = time.monotonic() + 10
    while True:
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline, "a worker outlived the sweep"
        time.sleep(0.05)


# ----------------------------------------------------------------------------- refusals and choices


def test_another_library_or_thread_count_is_refused_with_the_way_out(tmp_path):
    sweep(tmp_path, scripted.gemm(31))
    before = (tmp_path / "candidates.csv").read_bytes()
    with pytest.raises(Incompatible, match=r"scripted 1 .*scripted 2.*--fresh"):
        sweep(tmp_path, scripted.gemm(31), backend=Scripted("scripted 2"))
    wider = Scripted()
    wider.numerics = "any"
    with pytest.raises(Incompatible, match="numerics: type when it was made, any here"):
        sweep(tmp_path, scripted.gemm(31), backend=wider)
    with pytest.raises(Incompatible, match="threads: 1 when it was made, 2 here"):
        sweep(tmp_path, scripted.gemm(31), options=QUICK._replace(threads=2))
    assert (tmp_path / "candidates.csv").read_bytes() == before
    fresh = QUICK._replace(fresh=True)
    assert sweep(tmp_path, scripted.gemm(31), backend=Scripted("2"), options=fresh).resumed == 0


def test_shapes_of_a_gpu_are_not_swept_on_a_cpu_unasked(tmp_path):
    made = {"machine": {"arch": "AMD Instinct MI300X gfx942", "dev_cap": 904}}
    with pytest.raises(Incompatible, match=r"MI300X.*--backend cpu --force"):
        sweep(tmp_path, scripted.gemm(31), **made)
    with pytest.raises(Incompatible, match=r"a GPU \(api lt\)"):
        sweep(tmp_path, scripted.gemm(31)._replace(api="lt"))
    with pytest.raises(Incompatible, match=r"a GPU \(device cuda\)"):
        sweep(tmp_path, scripted.gemm(31), device="cuda")
    assert not (tmp_path / "candidates.csv").exists()
    assert sweep(tmp_path, scripted.gemm(31), options=QUICK._replace(force=True), **made).lines


@pytest.mark.parametrize(
    ("said", "how"),
    [(regime.AT_CAP, "sustained"), (regime.BELOW, "screen"), ("", "sustained")],
)
def test_what_confirms_follows_the_regime_that_the_job_ran_in(tmp_path, said, how):
    summary = sweep(tmp_path, scripted.gemm(32), gpu={"regime": said})
    rows = table.read(tmp_path / "candidates.csv", table.Candidate).rows
    assert {row.algo.config: row.regime for row in rows}["fast"] == how
    made = table.read(tmp_path / "tuned.csv", table.Tuned).provenance
    assert regime.of(made) == said
    first = next(iter(remarks(summary)))
    assert first.startswith(f"The job ran {said}:" if said else "Wrote ")


def test_gemms_are_ordered_by_time_and_the_small_ones_get_less():
    big, small, odd = scripted.gemm(32, k=640), scripted.gemm(33, k=2), scripted.gemm(99)
    empty = scripted.gemm(32, n=0)
    rows = [table.Shape(g, calls=c) for g, c in ((small, 1), (big, 1), (big, 2), (odd, 1))]
    made = run.make_plan([*rows, table.Shape(empty)], Scripted(), QUICK)
    assert made.gemms == [big, small]
    assert [plan.matters(made.shares[g]) for g in made.gemms] == [True, False]
    assert made.seconds[big] > made.seconds[small]
    assert made.calls[big] == 3 and sum(made.shares.values()) == pytest.approx(1)
    assert set(made.unsupported) == {odd, empty} and made.unsupported[odd] == "no script"
    timed = [row._replace(time_us=900.0 if row.gemm == small else 1.0) for row in rows]
    top = run.make_plan(timed, Scripted(), QUICK._replace(top=1))
    assert top.gemms == [small] and top.beyond == [big]


def test_tuned_rows_are_real_wins_alone_and_tables_say_how_they_were_made(tmp_path):
    command = ["torchrun", "train.py", "--size", "a b"]
    gemms = scripted.gemm(32, n=64, k=64), scripted.gemm(33), scripted.gemm(31)
    summary = sweep(tmp_path, *gemms, backend=Scripted(cap=7), command=command)
    tuned = table.read(tmp_path / "tuned.csv", table.Tuned)
    (row,) = tuned.rows
    assert (row.gemm, row.algo.config, row.dev_cap, row.ws_min) == (gemms[0], "fast", 7, 4096)
    assert row.ratio_low > 1.005 and row.time_us < row.default_us
    made = tuned.provenance
    assert made["stage"] == "sweep" and made["threads"] == made["machine"]["threads"] == 1
    assert made["command"] == command and made["machine"]["library"] == "scripted 1"
    assert table.read(tmp_path / "candidates.csv", table.Candidate).provenance == made
    assert summary.before_us == pytest.approx(3 * 2 * 100, rel=0.05)
    assert summary.before_us - summary.after_us == pytest.approx(2 * 20, rel=0.15)


def test_another_least_gain_takes_the_row_out_again(tmp_path):
    assert sweep(tmp_path, scripted.gemm(32)).lines[0].algo
    again = sweep(tmp_path, scripted.gemm(32), options=QUICK._replace(min_gain=0.5))
    assert again.resumed == 1 and again.lines[0].algo is None
    assert table.read(tmp_path / "tuned.csv", table.Tuned).rows == []


@pytest.mark.slow
def test_of_many_shapes_the_largest_are_swept_and_no_choice_is_carried_over(tmp_path):
    """A job of a hundred sequence lengths."""
    gemms = [scripted.gemm(32, n=n) for n in range(8, 108)]
    made = run.make_plan(shapes(*gemms).rows, Scripted(), run.Options())
    assert len(made.gemms) == plan.MOST and len(made.beyond) == 100 - plan.MOST
    assert min(g.n for g in made.gemms) > max(g.n for g in made.beyond)
    summary = sweep(tmp_path, *gemms, options=QUICK._replace(top=3))
    assert len(summary.lines) == 3 and len(summary.beyond) == 97
    assert sum(summary.beyond.values()) + sum(x.share for x in summary.lines) == pytest.approx(1)
    tuned = table.read(tmp_path / "tuned.csv", table.Tuned).rows
    assert {row.gemm for row in tuned} == set(gemms[-3:])
    held = journal.read(journal.path_beside(tmp_path / "candidates.csv"))
    for row in tuned:
        record = held.records[row.gemm]
        asked = [(ask.kind, record.choices[ask.algo].algo, a.reason) for ask, a in record.answered]
        assert ("whole", row.algo, "") in asked


# ------------------------------------------------------------------------------------- command line


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setitem(base.BACKENDS, "scripted", "scripted:Scripted")
    monkeypatch.chdir(tmp_path)

    def call(*gemms: Gemm, words: str = "--backend scripted", made=None):
        rows = shapes(*gemms).rows
        table.write("shapes.csv", rows, table.Shape, {"threads": 1, **(made or {})})
        more = f"sweep shapes.csv --seconds-per-shape 0.01 {words}".split()
        return CliRunner().invoke(main, more)

    return call


def test_the_command_says_what_was_gained_and_what_to_do_next(command):
    made = {"command": ["torchrun", "train.py", "--name", "a b"]}
    result = command(scripted.gemm(32), scripted.gemm(99), made=made)
    assert result.exit_code == 0, result.output
    assert "1 GEMM on scripted, 1 thread: about" in result.stderr
    assert "left out: 99x24x16" in result.stderr and "[1/1] 32x24x16" in result.stderr
    assert "gemmtune replay tuned.csv -- torchrun train.py --name 'a b'" in result.stderr
    assert f"The job has to run for {Plan().steps} steps at least" in result.stderr
    assert "fast" in result.stdout and "% less) with 1 of 1 GEMMs tuned" in result.stdout
    assert Path("tuned.csv").exists() and Path("candidates.csv").exists()


def test_the_command_says_plainly_that_nothing_was_gained(command):
    empty = command(scripted.gemm(99))
    assert empty.exit_code == 0 and "No GEMM to sweep" in empty.stdout
    result = command(scripted.gemm(33))
    assert result.exit_code == 0
    assert "Nothing gained" in result.stdout and "replay" not in result.stderr
    assert table.read("tuned.csv", table.Tuned).rows == []


def test_the_command_answers_in_json(command):
    result = command(scripted.gemm(32), words="--backend scripted --json --min-gain 1%")
    answer = json.loads(result.stdout)
    assert answer["gemms"][0]["algorithm"] == "fast" and answer["gemms"][0]["ratio"]["low"] > 1.2
    assert answer["provenance"]["min_gain"] == 0.01


def test_the_command_translates_errors_to_one_line(command):
    made = {"machine": {"dev_cap": 904, "arch": "MI300X gfx942"}}
    for words, code, text in (
        ("--backend scripted --force", 3, "captured on MI300X"),
        ("--backend cuda", 2, "unknown backend 'cuda'"),
        ("--min-gain lots", 2, "not a percentage"),
    ):
        result = command(scripted.gemm(31), words=words, made=made)
        assert result.exit_code == code and text in result.stderr, result.output
    assert "gemmtune: " in command(scripted.gemm(31), made=made).stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_cpu_backend_from_the_command_line(command):
    """The example of --help, on real kernels and a real clock."""
    help_text = CliRunner().invoke(main, ["sweep", "--help"]).output
    assert "Example:  gemmtune sweep shapes.csv -o tuned.csv --seconds-per-shape 2" in help_text
    types = ("bfloat16",) * 3
    linear = Gemm(*(128, 64, 64), "T", "N", *types, "-", 64, 64, 128)
    result = command(linear, words="-o out.csv --seconds-per-shape 0.2 --backend cpu")
    assert result.exit_code == 0, result.output
    rows = table.read("candidates.csv", table.Candidate).rows
    assert {r.algo.config for r in rows} == {a.config for a in cpu.Cpu().algos(linear)}
    assert rows[0].status == "default" and rows[0].time_us > 0
    assert not [r for r in rows if r.status == "failed"]
    table.read("out.csv", table.Tuned)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", ""), "name a file in a folder"),
        (("-o", "."), "name a file in a folder"),
        (("-o", "candidates.csv"), "cannot be two files in one"),
        (("-o", "shapes.csv"), "cannot be two files in one"),
        (("--candidates", "./shapes.csv"), "cannot be two files in one"),
        (("-o", "candidates.samples.jsonl"), "cannot be two files in one"),
        (("--candidates", "."), "cannot keep samples beside"),
        (("--candidates", os.devnull), "cannot keep samples beside"),
        (("--seconds-per-shape", "nan"), "nan is no number"),
        (("--seconds-per-shape", "inf"), "is not in the range"),
        (("--seed", str(2**70)), "is not in the range"),
    ],
)
def test_outputs_and_numbers_that_cannot_be_are_refused_with_nothing_touched(
    tmp_path, monkeypatch, words, said
):
    monkeypatch.chdir(tmp_path)
    table.write("shapes.csv", [table.Shape(scripted.gemm(32), calls=1)], table.Shape, {})
    before = Path("shapes.csv").read_bytes()
    done = CliRunner().invoke(main, ["sweep", "shapes.csv", "--backend", "cpu", *words])
    assert done.exit_code == 2 and said in done.output
    assert os.listdir() == ["shapes.csv"] and Path("shapes.csv").read_bytes() == before


def test_a_pipe_gets_the_tuned_table_once(tmp_path):
    read, write = os.pipe()
    paths = tmp_path / "c.csv", f"/dev/fd/{write}"
    run.sweep(shapes(scripted.gemm(32), scripted.gemm(31)), Scripted(), *paths, QUICK)
    os.close(write)
    with open(read) as f:
        assert f.read().count("dev_cap,") == 1


def test_standard_streams_that_are_closed_or_full_cost_no_table(tmp_path):
    sweep(tmp_path, scripted.gemm(32))
    words = [sys.executable, "-m", "gemmtune", "sweep", "--reanalyse"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    for tail, code in ((">&-", 0), (">&- 2>&- <&-", 0), (">/dev/full", 1)):
        (tmp_path / "tuned.csv").unlink()
        line = ["sh", "-c", f'exec "$@" {tail}', "sh", *words]
        done = subprocess.run(
            line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert (tmp_path / "tuned.csv").exists()
    assert "No space left" in done.stderr


def test_ctrl_c_does_not_reach_the_server_of_the_workers():
    """It would end with a traceback where it is still loading torch."""
    from multiprocessing import forkserver

    with Workers(Scripted(), scripted.gemm(32), 0, 1) as workers:
        workers.choices()
        status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    assert blocked & 1 << signal.SIGINT - 1
