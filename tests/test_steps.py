"""Steps are counted as an engineer counts them, whatever drives the optimizer."""

import gc
import multiprocessing
import warnings

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import gemmtune
from gemmtune.job import steps


@pytest.fixture
def counted(monkeypatch):
    """A fresh counter; the list gets the index of every step."""
    monkeypatch.setattr(steps, "_steps", steps._Steps())
    hooks = _global_optimizer_post_hooks
    before = list(hooks)
    seen = []
    steps.on_step(seen.append)
    yield seen
    for key in [k for k in hooks if k not in before]:
        del hooks[key]


def parameter():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
    ],
)
def test_every_kind_of_optimizer_counts(counted, make):
    optimizer = make([parameter()])
    for _ in range(3):
        optimizer.step()
    assert counted == [0, 1, 2]
    assert steps.optimizers() == {type(optimizer).__name__: 3}


def test_a_subclass_that_calls_its_parent_counts_once(counted):
    def fail():
        raise ValueError("the loss")

    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    optimizer = Mine([parameter()], lr=0.1)
    optimizer.step()
    with pytest.raises(ValueError, match="the loss"):
        optimizer.step(fail)
    optimizer.step()
    assert counted == [0, 1]
    assert steps.optimizers() == {"Mine": 2}


def test_closure_of_lbfgs_counts_once(counted):
    p = parameter()
    optimizer = torch.optim.LBFGS([p], max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert counted == [0, 1]


def test_scheduler_and_accumulation(counted):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for micro in range(6):
        model(torch.ones(1, 2)).sum().backward()
        if micro % 3 == 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert counted == [0, 1]


def test_a_step_that_the_grad_scaler_skips_is_none(counted):
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert counted == [0, 1]


def test_of_several_optimizers_the_first_counts(counted):
    first = torch.optim.AdamW([parameter()])
    second = torch.optim.SGD([parameter()], lr=0.1)
    for _ in range(3):
        first.step()
        second.step()
        second.step()
    assert counted == [0, 1, 2]
    assert steps.optimizers() == {"AdamW": 3, "SGD": 6}


def test_the_optimizer_that_is_named_counts(counted):
    steps.on_step(lambda _: None, optimizer="SGD")
    first = torch.optim.AdamW([parameter()])
    second = torch.optim.SGD([parameter()], lr=0.1)
    for _ in range(3):
        first.step()
        first.step()
        second.step()
    assert counted == [0, 1, 2]


def test_an_optimizer_per_parameter_inside_backward(counted):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert counted == [0, 1, 2]


def test_an_optimizer_made_anew_goes_on_counting(counted):
    for _ in range(3):
        optimizer = torch.optim.SGD([parameter()], lr=0.1)
        optimizer.step()
        optimizer.step()
    assert counted == list(range(6))


def test_an_old_optimizer_that_stays_alive_does_not_stop_the_count(counted):
    old = torch.optim.SGD([parameter()], lr=0.1)
    old.step()
    new = torch.optim.SGD([parameter()], lr=0.1)
    for _ in range(steps.PATIENCE + 3):
        new.step()
    assert counted == [0, 1, 2, 3, 4]
    del old


def test_a_rare_first_optimizer_keeps_its_count(counted):
    rare = torch.optim.SGD([parameter()], lr=0.1)
    often = torch.optim.SGD([parameter()], lr=0.1)
    for _ in range(4):
        rare.step()
        for _ in range(steps.PATIENCE - 1):
            often.step()
    assert counted == [0, 1, 2, 3]


def test_marks_alone(counted):
    for _ in range(3):
        gemmtune.step()
    assert counted == [0, 1, 2]


def test_marks_win_over_an_optimizer(counted):
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    for _ in range(3):
        optimizer.step()
        optimizer.step()
        gemmtune.step()
    # Before the first mark nothing tells that marks will come: the optimizer's two steps count.
    assert counted == [0, 1, 2, 3]
    assert steps.optimizers() == {"SGD": 6}


def test_a_mark_before_the_optimizers_step_counts_once_a_step(counted):
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    for _ in range(3):
        gemmtune.step()
        optimizer.step()
    assert counted == [0, 1, 2]


def test_a_callback_may_remove_itself_beside_hooks_of_the_job(counted):
    others = []
    handle = steps.on_step(lambda _: handle.remove())
    user = register_optimizer_step_post_hook(lambda *_: others.append(1))
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    optimizer.step()
    optimizer.step()
    user.remove()
    assert (counted, others) == ([0, 1], [1, 1])


def test_a_callback_that_raises_is_dropped_and_the_job_goes_on(counted, capsys):
    calls = []

    def broken(index):
        calls.append(index)
        raise RuntimeError("two\nlines")

    steps.on_step(broken)
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    optimizer.step()
    optimizer.step()
    assert (calls, counted) == ([0], [0, 1])
    assert capsys.readouterr().err == (
        "gemmtune: after step 0: RuntimeError: two lines: the job goes on as it is\n"
    )


def test_stop_job_ends_the_job_with_0(counted):
    steps.on_step(lambda _: steps.stop_job())
    with pytest.raises(SystemExit) as e:
        torch.optim.SGD([parameter()], lr=0.1).step()
    assert e.value.code == 0


def test_the_counter_keeps_no_optimizer_alive(counted):
    optimizers = [torch.optim.SGD([parameter()], lr=0.1) for _ in range(3)]
    for optimizer in optimizers:
        optimizer.step()
    del optimizer
    optimizers.clear()
    gc.collect()
    assert steps._steps.marker() is None
    assert not steps._steps.between


def test_a_step_compiled_by_dynamo_counts_every_time(counted):
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with warnings.catch_warnings(record=True) as said:
        for _ in range(4):
            step()
    assert not [w for w in said if "gemmtune" in str(w.message)]
    assert counted == [0, 1, 2, 3]


def _fsdp(rank, folder, version, queue):
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if version == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    seen = []
    steps.on_step(seen.append)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    queue.put(seen)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp(tmp_path, version):
    if version == 2 and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2 on a CPU")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_fsdp, args=(0, tmp_path, version, queue))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert queue.get() == [0, 1, 2]


def test_work_is_what_the_job_last_said_and_never_stops_it(monkeypatch, capsys):
    monkeypatch.setattr(steps, "_work", {})
    gemmtune.work(tokens=torch.tensor(512), flops=2e12)
    assert steps.work() == {"tokens": 512.0, "flops": 2e12}
    gemmtune.work(tokens="many")
    assert "gemmtune.work: ValueError" in capsys.readouterr().err
    assert steps.work() == {"tokens": 512.0, "flops": 2e12}
    gemmtune.work(tokens=1024)
    assert steps.work() == {"tokens": 1024.0}
