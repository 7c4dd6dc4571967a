"""capture, on real jobs: counts against FlopCounterMode, passes against the formula."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from conftest import JOBS, Run, torchrun

from gemmtune import table
from gemmtune.gemm import Gemm
from gemmtune.table import Shape

HF = JOBS / "hf_llama.py"
HIDDEN, FFN, KV, VOCAB, TOKENS = 64, 112, 32, 98, 26
LINEARS = {  # out, in
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
SITES = {f"model.layers.{i}.{n}": d for i in range(2) for n, d in LINEARS.items()}
SITES["lm_head"] = (VOCAB, HIDDEN)


def flops(rows: list[Shape], recompute: int | None = None) -> dict[str, float]:
    """2·m·n·k·batch·calls by operator."""
    total: Counter[str] = Counter()
    for row in rows:
        if recompute is None or row.recompute == recompute:
            total[f"aten.{row.gemm.api}"] += row.gemm.flops * row.calls
    return {op: count for op, count in total.items() if count}


def counted(path: Path, rank: int = 0) -> dict[str, float]:
    """The GEMM part of what FlopCounterMode counted."""
    ops = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
    by_op = json.loads(path.with_name(f"{path.name}.{rank}").read_text())
    return {op: count for op, count in by_op.items() if op in ops and count}


def passes(rows: list[Shape]) -> dict[tuple[str, str], Shape]:
    """Rows of linear layers by (site, pass), recomputation apart."""
    return {(r.site, r.pass_): r for r in rows if r.gemm.api == "mm" and not r.recompute}


def check_passes(rows: list[Shape]) -> None:
    found = passes(rows)
    assert set(found) == {(site, p) for site in SITES for p in ("fprop", "dgrad", "wgrad")}
    for site, (out, inner) in SITES.items():
        for name, trans, m, n, k in (
            ("fprop", "TN", out, TOKENS, inner),
            ("dgrad", "NN", inner, TOKENS, out),
            ("wgrad", "NT", inner, out, TOKENS),
        ):
            row = found[site, name]
            g = row.gemm
            assert (g.m, g.n, g.k, g.trans_a + g.trans_b) == (m, n, k, trans), (site, name)
            assert row.calls == 1


@pytest.fixture(scope="module")
def jobs(gemmtune: Run, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Capture the HF Llama with these options, once: rows, FLOPs of the same step, output."""
    done: dict[tuple[str, ...], tuple[list[Shape], dict[str, float], str]] = {}

    def job(*options: str) -> tuple[list[Shape], dict[str, float], str]:
        if options not in done:
            folder = tmp_path_factory.mktemp("job")
            start = torchrun() if "--parallel" in options else ["python"]
            command = [*start, str(HF), *options]
            if "--compile" not in options:
                command += ["--flops", "flops.json"]
            out = gemmtune("capture", "-o", "s.csv", "--", *command, cwd=folder)
            rows = table.read(folder / "s.csv", Shape).rows
            expected = {} if "--compile" in options else counted(folder / "flops.json")
            done[options] = rows, expected, out.stdout + out.stderr
        return done[options]

    return job


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--parallel", "fsdp1"),
        ("--parallel", "fsdp2"),
        ("--parallel", "tp"),
    ],
    ids=" ".join,
)
def test_flops_equal_flop_counter_mode_to_the_unit(jobs, options) -> None:  # type: ignore[no-untyped-def]
    rows, expected, _ = jobs(*options)
    assert flops(rows) == expected
    assert flops(rows, recompute=1) == {}
    assert {row.ranks for row in rows} == ({"0-1"} if options else {"0"})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("parallel", [(), ("--parallel", "fsdp2")], ids=["plain", "fsdp2"])
def test_recompute_rows_are_what_checkpointing_adds(jobs, variant, parallel) -> None:  # type: ignore[no-untyped-def]
    rows, expected, _ = jobs(*parallel, "--checkpoint", variant)
    plain, _, _ = jobs(*parallel)
    assert flops(rows) == expected
    assert flops(rows, recompute=0) == flops(plain)
    added = {op: expected[op] - count for op, count in flops(plain).items()}
    assert flops(rows, recompute=1) == {op: count for op, count in added.items() if count}
    assert all(row.pass_ == "fprop" for row in rows if row.recompute)
    check_passes(rows)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--parallel", "fsdp1"), ("--parallel", "fsdp2")])
def test_every_linear_layer_has_its_three_passes(jobs, options) -> None:  # type: ignore[no-untyped-def]
    check_passes(jobs(*options)[0])


@pytest.mark.slow
def test_tensor_parallel_keys_are_local(jobs) -> None:  # type: ignore[no-untyped-def]
    found = passes(jobs("--parallel", "tp")[0])
    local = {"q": (HIDDEN // 2, HIDDEN), "k": (KV // 2, HIDDEN), "o": (HIDDEN, HIDDEN // 2)}
    for name, (out, inner) in local.items():
        g = found[f"model.layers.0.self_attn.{name}_proj", "fprop"].gemm
        assert (g.m, g.n, g.k) == (out, TOKENS, inner)


@pytest.mark.slow
def test_a_compiled_job_stays_compiled_and_has_the_same_flops(jobs) -> None:  # type: ignore[no-untyped-def]
    rows, _, output = jobs("--compile")
    plain, _, _ = jobs()
    assert flops(rows) == flops(plain)
    assert "graphs 1\n" in output  # one graph, made once: recording made torch compile nothing anew
    assert "torch.compile made 1 graphs" in output
    check_passes(rows)


@pytest.mark.slow
def test_the_jobs_losses_are_those_without_capture(jobs, gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import os
    import subprocess
    import sys

    # As the captured one, since threads and the counting mode change the order of sums.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, HF, "--flops", tmp_path / "flops.json"]
    alone = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120, env=env)
    losses = [line for line in jobs()[2].splitlines() if line.startswith("loss")]
    assert losses == alone.stdout.splitlines()


def capture(
    gemmtune: Run, tmp_path: Path, code: str, *options: str, exit_code: int = 0, **env: str
) -> tuple[list[Shape], str]:
    """Capture a script given as text; its rows (none where no table was written) and stderr."""
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    out = tmp_path / "s.csv"
    done = gemmtune(
        "capture", "-o", out, *options, "--", "train.py", cwd=tmp_path, code=exit_code, **env
    )
    return (table.read(out, Shape).rows if out.exists() else []), done.stdout + done.stderr


MLP = """
import os, sys, time, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(rows=5):
    model(torch.randn(rows, 12)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_only_the_recorded_steps_are_seen_and_calls_are_per_step(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + "for rows in (3, 3, 5, 6, 9): step(rows)"
    rows, _ = capture(gemmtune, tmp_path, code, "--warmup", "2", "--steps", "2")
    assert {r.gemm.n for r in rows if r.pass_ == "fprop"} == {5, 6}
    assert {r.calls for r in rows} == {0.5}
    assert {r.step for r in rows if r.gemm.n == 6 and r.pass_ == "fprop"} == {1}


def test_stop_ends_the_job_after_the_recorded_steps(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + "for i in range(99): step(); print('iteration', i, flush=True)"
    rows, output = capture(gemmtune, tmp_path, code, "--stop")
    assert rows
    assert output.count("iteration 0") == 1
    assert "iteration 2" not in output


def test_dims_prints_a_line_for_each_weight(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, output = capture(gemmtune, tmp_path, MLP + "for _ in range(2): step()", "--dims")
    lines = [line.split() for line in output.splitlines()]
    assert ["0", "Linear", "5x12", "20x12", "20x12", "none", "5x20"] in lines
    assert ["2.bias", "Linear", "5x20", "7", "7", "none", "5x7"] in lines


def test_a_killed_job_keeps_what_was_seen(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + ("step()\nmodel(torch.randn(4, 12))\ntime.sleep(1.5)\nos.kill(os.getpid(), 9)")
    rows, output = capture(gemmtune, tmp_path, code, exit_code=137)
    assert {(r.gemm.m, r.gemm.n, r.gemm.k) for r in rows} == {(20, 4, 12), (7, 4, 20)}
    assert "part of it" in output


def test_a_job_that_raises_keeps_what_was_seen_and_its_exit_code(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + "step()\nmodel(torch.randn(4, 12))\nsys.exit(7)"
    rows, _ = capture(gemmtune, tmp_path, code, exit_code=7)
    assert len(rows) == 2


def test_a_job_too_short_for_its_warmup_is_told_so(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "s.csv").write_text("what an earlier capture wrote")
    (tmp_path / "train.py").write_text(MLP + "step()")
    options = ("--warmup", "3", "-o", tmp_path / "s.csv")
    done = gemmtune("capture", *options, "--", "train.py", cwd=tmp_path, code=1)
    assert "the job ended after 1 optimizer step, and 3 are warm-up" in done.stderr
    assert (tmp_path / "s.csv").read_text() == "what an earlier capture wrote"


def test_a_job_without_optimizer_is_recorded_with_warmup_0(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = "import torch\nfor _ in range(3): torch.mm(torch.ones(2, 3), torch.ones(3, 5))"
    rows, _ = capture(gemmtune, tmp_path, code, "--warmup", "0")
    assert [(r.gemm.m, r.gemm.n, r.gemm.k, r.calls) for r in rows] == [(5, 2, 3, 3)]


def test_a_manual_mark_ends_a_step(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
    import torch, gemmtune
    for i in range(4):
        torch.mm(torch.ones(2 + i, 3), torch.ones(3, 5))
        gemmtune.step()
    """
    rows, _ = capture(gemmtune, tmp_path, code)
    assert [r.gemm.n for r in rows] == [3]


def test_accumulated_backwards_are_one_step(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = (
        MLP
        + """
for _ in range(3):
    for _ in range(4): model(torch.randn(5, 12)).square().sum().backward()
    optimizer.step()
"""
    )
    rows, _ = capture(gemmtune, tmp_path, code)
    assert {r.calls for r in rows} == {4}


def test_spawned_ranks_are_merged_and_differing_ranks_reported(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def main(rank):
        dist.init_process_group(
            "gloo", init_method="file://" + __file__ + ".store", rank=rank, world_size=2)
        w = torch.ones(3, 5 + rank, requires_grad=True)
        both = torch.ones(3, 4)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for _ in range(3):
            torch.mm(torch.ones(2, 3), both)
            torch.mm(torch.ones(2, 3), w).sum().backward()
            optimizer.step()
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(main, nprocs=2)
    """
    rows, output = capture(gemmtune, tmp_path, code)
    ranks = {(r.gemm.m, r.pass_): r.ranks for r in rows if r.pass_ == "fprop"}
    assert ranks == {(4, "fprop"): "0-1", (5, "fprop"): "0", (6, "fprop"): "1"}
    assert "ranks differ" in output


def test_every_matmul_operator_is_recorded_and_others_are_named(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
    import torch
    x, w, c = torch.ones(4, 6), torch.ones(6, 8), torch.ones(4, 8)
    bx, bw, bc = torch.ones(2, 4, 6), torch.ones(2, 6, 8), torch.ones(2, 4, 8)
    torch.mm(x, w)
    torch.mm(x, w, out=torch.empty(4, 8))
    torch.addmm(c, x, w)
    torch.addmm(c[0], x, w)
    c.addmm_(x, w)
    torch.bmm(bx, bw)
    torch.baddbmm(bc, bx, bw)
    bc.baddbmm_(bx, bw)
    f8 = torch.float8_e4m3fn
    one = torch.tensor(1.0)
    torch._scaled_mm(torch.ones(16, 32).to(f8), torch.ones(48, 32).to(f8).t(), one, one,
                     out_dtype=torch.bfloat16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    torch._grouped_mm(torch.ones(4, 8).bfloat16(), torch.ones(2, 8, 16).bfloat16(), offs=ends)
    torch.mv(x, w[:, 0])
    torch.mm(x.cfloat(), w.cfloat())
    """
    rows, output = capture(gemmtune, tmp_path, code, "--warmup", "0")
    calls: Counter[tuple[str, str, int]] = Counter()
    for r in rows:
        calls[r.gemm.api, r.gemm.epi, r.gemm.beta] += int(r.calls)
    assert calls == {
        ("mm", "-", 0): 2,
        ("addmm", "-", 1): 2,
        ("addmm", "bias", 0): 1,
        ("bmm", "-", 0): 1,
        ("baddbmm", "-", 1): 2,
        ("scaled_mm", "-", 0): 1,
        ("grouped_mm", "-", 0): 2,
    }
    groups = [r.gemm for r in rows if r.gemm.api == "grouped_mm"]
    assert [(g.m, g.n, g.k) for g in groups] == [(16, 1, 8), (16, 3, 8)]
    (fp8,) = [r.gemm for r in rows if r.gemm.api == "scaled_mm"]
    assert fp8 == Gemm(
        48, 16, 32, "T", "N", "float8e4m3", "float8e4m3", "bfloat16", "-", 32, 32, 48,
        api="scaled_mm",
    )  # fmt: skip
    assert "addmv 1x" in output
    assert "mm of complex64 1x" in output


def test_a_custom_function_with_two_products_is_told_apart(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
    import torch

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, v):
            ctx.save_for_backward(x, w, v)
            return x @ w, x @ v

        @staticmethod
        def backward(ctx, dy, dz):
            x, w, v = ctx.saved_tensors
            return dy @ w.t() + dz @ v.t(), x.t() @ dy, x.t() @ dz

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 4))
            self.v = torch.nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            y, z = Both.apply(x, self.w, self.v)
            return y.sum() + z.sum()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        model(x).backward()
        optimizer.step()
    """
    rows, _ = capture(gemmtune, tmp_path, code)
    found = {(r.gemm.m, r.gemm.n, r.gemm.k, r.pass_): r.calls for r in rows}
    assert found == {
        (4, 4, 4, "fprop"): 1,
        (6, 4, 4, "fprop"): 1,
        (4, 4, 4, "dgrad"): 1,
        (4, 4, 6, "dgrad"): 1,
        (4, 4, 4, "wgrad"): 1,
        (6, 4, 4, "wgrad"): 1,
    }
    assert {r.site for r in rows} == {"Model"}


def test_products_of_an_optimizer_are_neither_forward_nor_backward(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = (
        MLP
        + """
class Muonish(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        w = model[0].weight
        w.add_(w @ w.t() @ w, alpha=-1e-9)
        super().step()

optimizer = Muonish(model.parameters(), lr=0.1)
for _ in range(3): step()
"""
    )
    rows, _ = capture(gemmtune, tmp_path, code)
    others = [(r.gemm.m, r.gemm.n, r.gemm.k) for r in rows if r.pass_ == "other"]
    assert others == [(20, 20, 12), (12, 20, 20)]


def test_an_unwritable_output_is_said_before_the_job_runs(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text("print('ran')")
    done = gemmtune("capture", "-o", "no/s.csv", "--", "train.py", cwd=tmp_path, code=2)
    assert done.stderr.startswith("gemmtune: cannot write no/s.csv: there is no folder")
    assert "ran" not in done.stdout


def test_a_forked_child_is_no_part_of_its_parents_step(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + textwrap.dedent("""
        for i in range(3):
            loss = model(torch.ones(5, 12)).sum()
            if i == 1 and os.fork() == 0:
                model(torch.ones(5, 12))
                sys.exit()  # which runs exit handlers
            loss.backward()
            optimizer.step()
    """)
    rows, said = capture(gemmtune, tmp_path, code)
    assert {(row.pass_, row.calls) for row in rows} == {("fprop", 1), ("dgrad", 1), ("wgrad", 1)}
    assert "a part of it" not in said


def test_forked_ranks_are_recorded_each_from_its_own_start(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + textwrap.dedent("""
        import torch.multiprocessing as mp
        def rank(number):
            os.environ.update(RANK=str(number), WORLD_SIZE="2")
            for _ in range(2):
                model(torch.ones(5, 12)).sum().backward()
                optimizer.step()
            model(torch.ones(5, 12))  # the third step's beginning, lost if the end is not noticed
        mp.start_processes(rank, nprocs=2, start_method="fork")
    """)
    rows, _ = capture(gemmtune, tmp_path, code, "--warmup", "2")
    assert {(row.pass_, row.calls, row.ranks) for row in rows} == {("fprop", 1, "0-1")}


def test_sparse_products_are_named_without_a_complaint(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = MLP + textwrap.dedent("""
        sparse = torch.eye(8).to_sparse_csr()
        for _ in range(2):
            for kind in (sparse, sparse.to_sparse_coo()):
                torch.mm(kind, torch.ones(8, 8))
                torch.addmm(torch.ones(8, 8), kind, torch.ones(8, 8))
            step()
    """)
    rows, said = capture(gemmtune, tmp_path, code)
    assert len(rows) == 5
    left_out = said.partition("left out: ")[2]
    assert all(f"{op} of sparse_{k} " in left_out for op in ("mm", "addmm") for k in ("coo", "csr"))
    assert "NotImplementedError" not in said


def test_a_step_of_other_products_alone_is_said_to_have_no_gemm(gemmtune, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
        import torch
        model = torch.nn.Conv1d(4, 4, 1)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 4, 8)).sum().backward()
            optimizer.step()
    """
    rows, said = capture(gemmtune, tmp_path, code, exit_code=1)
    assert not rows
    assert "no GEMM ran between the optimizer steps" in said
    assert "convolution 1x" in said and "the job ended" not in said


def test_what_was_recorded_is_kept_where_the_output_cannot_be_written_any_more(  # type: ignore[no-untyped-def]
    gemmtune, tmp_path
) -> None:
    code = MLP + "import shutil\nfor _ in range(3): step()\nshutil.rmtree('gone')"
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "gone").mkdir()
    done = gemmtune(
        *("capture", "-o", "gone/s.csv", "--", "train.py"),
        cwd=tmp_path,
        code=2,
        TMPDIR=str(tmp_path),
    )
    (kept,) = tmp_path.glob("gemmtune-*/s.csv")
    assert table.read(kept, Shape).rows
    assert (
        f"cannot write gone/s.csv: No such file or directory: what was recorded is in {kept}"
        in (done.stderr)
    )
