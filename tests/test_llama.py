"""The reference job, run: losses, sharding, errors. Real processes where there are several."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from gemmtune.errors import JobError, UsageError  # noqa: E402
from gemmtune.llama import te  # noqa: E402
from gemmtune.llama.options import Options  # noqa: E402
from gemmtune.llama.parallel import Rank, rank_of  # noqa: E402
from gemmtune.llama.train import is_out_of_memory, main, out_of_memory, train  # noqa: E402

SMALL = {"model": "tiny", "layers": 1, "seq": 48, "steps": 3, "warmup": 1, "device": "cpu"}
JOB = [sys.executable, "-m", "gemmtune.llama"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def losses(**changes):
    lines = []
    figures = train(Options(**{**SMALL, **changes}), Rank(), lines.append)
    assert len(lines) == len(figures["step_ms"]) == len(figures["losses"]) == 3
    return figures["losses"]


def run(argv, **changes):
    """The job in processes of its own: SMALL's options on its command line."""
    options = [x for name, value in {**SMALL, **changes}.items() for x in (f"--{name}", str(value))]
    return subprocess.run(
        [*argv, *options], check=False, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def reference():
    """One process, no sharding, a batch of 4: what every other way must reproduce."""
    return losses(batch=4)


def test_a_seed_fixes_the_losses_and_another_changes_them(reference):
    assert losses(batch=4) == reference
    assert losses(batch=4, seed=1) != reference


def test_training_lowers_the_loss():
    options = Options(**{**SMALL, "steps": 40, "lr": 3e-3, "batch": 4})
    path = train(options, Rank(), lambda _: None)["losses"]
    assert path[-1] < path[0] - 0.5


def test_accumulation_gives_the_losses_of_a_larger_batch(reference):
    assert losses(batch=1, accumulate=4) == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("checkpoint", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("fsdp", ["none", "1", "2"])
def test_checkpointing_and_sharding_in_one_process_change_no_loss(reference, fsdp, checkpoint):
    assert losses(batch=4, fsdp=fsdp, checkpoint=checkpoint) == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("fsdp", ["none", "1", "2"])
@pytest.mark.parametrize("precision", ["pure", "default"])
def test_bf16_follows_float32(reference, precision, fsdp):
    path = losses(batch=4, precision=precision, fsdp=fsdp)
    assert path == pytest.approx(reference, abs=0.03)
    assert path != reference


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("fsdp", ["none", "1", "2"])
@pytest.mark.parametrize("precision", ["pure", "default", "fp32"])
def test_a_precision_means_the_same_however_the_model_is_sharded(precision, fsdp):
    """Types of the GEMMs, of the weights the optimizer updates, and of the buffer."""
    from gemmtune.llama.options import shard
    from gemmtune.llama.parallel import process_group
    from gemmtune.llama.train import Trainer

    options = shard(Options(**SMALL, precision=precision, fsdp=fsdp), 1)
    device = torch.device("cpu")
    with process_group(Rank(), device, needed=fsdp != "none"):
        trainer = Trainer(options, Rank(), device)
        seen = set()
        model = trainer.model
        block = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
        block.o.register_forward_hook(lambda _, x, y: seen.update((x[0].dtype, y.dtype)))
        assert trainer.step(0).dtype == torch.float32
        compute = torch.float32 if precision == "fp32" else torch.bfloat16
        stored = torch.bfloat16 if precision == "pure" else torch.float32
        assert seen == {compute}
        assert {p.dtype for p in trainer.params} == {stored}
        assert [b.dtype for name, b in model.named_buffers() if name.endswith("rope")] == [stored]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_torchrun_on_two_ranks_gives_the_losses_of_one(reference, fsdp, tmp_path):
    out = tmp_path / "figures.json"
    r = run([*TORCHRUN, "-m", "gemmtune.llama"], fsdp=fsdp, batch=1, accumulate=2, json=out)
    assert r.returncode == 0, r.stderr
    figures = json.loads(out.read_text())
    assert figures["losses"] == pytest.approx(reference, abs=1e-4)
    assert figures["world"] == 2
    assert figures["tokens_per_s"] == pytest.approx(2 * figures["tokens_per_s_per_gpu"])
    assert figures["mfu"] is None
    # Rank 0 alone prints: each step once, and one summary.
    assert re.findall(r"^step +(\d+) ", r.stdout, re.MULTILINE) == ["1", "2", "3"]
    assert r.stdout.count("tokens/s") == 1
    assert "MFU          n/a (no peak rate for this device)" in r.stdout


@pytest.mark.slow
def test_spawned_ranks_give_the_losses_of_one(reference):
    r = run(JOB, spawn=2, batch=2)
    assert r.returncode == 0, r.stderr
    found = [float(x) for x in re.findall(r"loss +([\d.]+)", r.stdout)]
    assert found == pytest.approx(reference, abs=2e-4)
    assert "2 x CPU, FSDP 2" in r.stdout
    assert r.stderr == ""


LIMITED = """
import resource, sys
from gemmtune.llama import train
from gemmtune.llama.options import parse
options = parse(sys.argv[1:])
train.train(parse(["--steps", "1", "--seq", "16", "--device", "cpu"]), train.Rank(), print)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), -1))
sys.exit(train.main(options))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_out_of_memory_in_training_is_one_line_that_says_what_to_lower():
    r = run([sys.executable, "-c", LIMITED], batch=1024)
    assert r.returncode == 1
    assert r.stderr.splitlines() == [
        "gemmtune.llama: out of memory while training on cpu: lower --batch (now 1024) or "
        "--seq (now 48), add --checkpoint nonreentrant, take --precision pure, "
        "shard over more ranks with --fsdp 2"
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_out_of_memory_on_spawned_ranks_ends_them_all_with_a_line_each():
    limit = "import resource as r, runpy; r.setrlimit(r.RLIMIT_AS, (6 << 30, -1)); "
    code = limit + "runpy.run_module('gemmtune.llama', run_name='__main__', alter_sys=True)"
    r = run([sys.executable, "-c", code], spawn=2, model="llama3-70b")
    assert r.returncode == 1
    assert r.stderr
    for line in r.stderr.splitlines():
        assert re.match(r"gemmtune.llama: out of memory while building the model on rank \d", line)


def test_every_kind_of_failed_allocation_is_known():
    for error in (
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.cuda.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_full_gpu_is_told_what_else_could_be_lowered(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("gemmtune.llama.train.Trainer.step", full)
    with pytest.raises(JobError, match=r"lower --batch .* or --layers \(now 2\), add"):
        train(Options(**{**SMALL, "layers": 2}), Rank(), print)
    line = out_of_memory(Options(layers=4, precision="pure"), "on cuda:0", building=True)
    assert line == (
        "out of memory while building the model on cuda:0: lower --layers (now 4), "
        "shard over more ranks with --fsdp 2"
    )


def test_errors_are_one_line_and_exit_code_2(capsys, monkeypatch):
    def fails(options, says):
        assert main(options) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert says in err

    fails(Options(json="/no/such/folder/x.json"), "there is no such folder")
    if not torch.cuda.is_available():
        fails(Options(device="cuda"), "torch sees no GPU here")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    fails(Options(), "must be integers")
    monkeypatch.setenv("WORLD_SIZE", "2")
    fails(Options(spawn=2), "--spawn starts processes itself")
    fails(Options(fsdp="none", device="cpu"), "--fsdp none is for one process")
    assert rank_of({}) == Rank()


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="TE is installed"
)
def test_te_options_without_te_are_one_line():
    for options in (Options(te=True), Options(te=True, fuse_wgrad=True)):
        with pytest.raises(UsageError, match=r"--te needs Transformer Engine.*leave --te out"):
            train(options, Rank(), print)


class FusedWgrad(torch.autograd.Function):
    """A linear layer that does with main_grad what TE's fused weight GEMM does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.addmm_(dy.float().t(), x.float())
        return dy @ weight, None


def test_main_grads_train_bf16_weights_as_float32_ones_would_be():
    def model():
        generator = torch.Generator().manual_seed(0)
        return [
            torch.nn.Parameter(torch.randn(8, 8, generator=generator).bfloat16().float() / 4)
            for _ in range(2)
        ]

    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = model()
    optimizer = torch.optim.AdamW(plain, lr=1e-2)
    fused = [torch.nn.Parameter(p.detach().bfloat16()) for p in plain]
    main_grads = te.MainGrads(fused)
    masters = torch.optim.AdamW(main_grads.masters, lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        main_grads.zero()
        for part in x:  # two accumulated passes
            rounded = [p.bfloat16() for p in plain]
            ((part @ rounded[0].t()) @ rounded[1].t()).square().mean().backward()
            (FusedWgrad.apply(part, fused[0]) @ fused[1].t()).square().mean().backward()
        assert all(p.grad is None for p in fused)
        optimizer.step()
        masters.step()
        main_grads.publish()
    for a, b, c in zip(plain, main_grads.masters, fused, strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=5e-3, rtol=0.05)
        torch.testing.assert_close(c, b.bfloat16(), atol=0, rtol=0)
