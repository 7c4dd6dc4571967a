"""The reference job itself: `python -m gemmtune.llama`, a Llama trained on synthetic data.

Writes one line per timed step and a summary to stdout (rank 0 alone), and with --json the figures
to a file. Exit codes: 0 done, 1 out of memory, 2 wrong options or machine.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemmtune
from gemmtune.errors import GemmtuneError, JobError, UsageError
from gemmtune.job.memory import is_out_of_memory, peak_bytes
from gemmtune.llama import te
from gemmtune.llama.figures import step_work, summarise, text
from gemmtune.llama.model import Llama, TorchLayers, rope_table
from gemmtune.llama.options import Options, shard
from gemmtune.llama.parallel import (
    Rank,
    pick_device,
    place,
    prepare_process,
    process_group,
    rank_of,
)


def out_of_memory(options: Options, where: str, building: bool) -> str:
    """One line: where the memory ran out, and what to lower."""
    layers = options.config.layers
    ways = [f"--layers (now {layers})"] if layers > 1 else []
    if not building:
        ways = [f"--batch (now {options.batch})", f"--seq (now {options.config.seq})", *ways]
    more = []
    if options.checkpoint == "none" and not building:
        more.append("add --checkpoint nonreentrant")
    if options.precision != "pure":
        more.append("take --precision pure")
    if options.fuse_wgrad:
        more.append("leave --fuse-wgrad out, which keeps float32 gradients and weights")
    else:
        more.append("shard over more ranks with --fsdp 2")
    lower = [f"lower {' or '.join(ways)}"] if ways else []
    doing = "building the model" if building else "training"
    return f"out of memory while {doing} {where}: {', '.join([*lower, *more])}"


def sequences(options: Options, rank: Rank, step: int, device: torch.device) -> Tensor:
    """This rank's tokens of one step: (accumulate · batch, seq + 1).

    A sequence counts up from a random token by a random stride, which can be learnt. The step's
    sequences are drawn for all ranks together and dealt out, so two ranks see what one rank
    with twice the batch, or twice the accumulation, would.
    """
    config = options.config
    mine = options.batch * options.accumulate
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    start, stride = (
        torch.randint(low, high, (mine * rank.world, 1), generator=generator).to(device)
        for low, high in ((0, config.vocab), (1, 9))
    )
    deal = slice(rank.rank * mine, (rank.rank + 1) * mine)
    count = torch.arange(config.seq + 1, device=device)
    return (start[deal] + stride[deal] * count) % config.vocab


def make_optimizer(params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """AdamW, fused where the device has it."""
    try:
        return torch.optim.AdamW(params, lr=lr, fused=True)
    except RuntimeError:
        return torch.optim.AdamW(params, lr=lr)


class Trainer:
    """The model, its optimizer, and one training step."""

    def __init__(self, options: Options, rank: Rank, device: torch.device) -> None:
        self.options, self.rank, self.device = options, rank, device
        config, sharded = options.config, options.fsdp != "none"
        bf16, float32 = torch.bfloat16, torch.float32
        compute = float32 if options.precision == "fp32" else bf16
        stored = bf16 if options.precision == "pure" else float32
        built_on = torch.device("meta") if sharded else device
        where: dict[str, Any] = {"device": built_on, "dtype": stored}
        self.forward: Callable[[], AbstractContextManager[Any]] = nullcontext
        if options.te:
            layers: Any = te.TeLayers(config.norm_eps, options.fuse_wgrad, stored, built_on)
            if options.fp8:
                self.forward = te.fp8(dist.group.WORLD if sharded else None)
        else:
            layers = TorchLayers(config.norm_eps, **where)
        core = Llama(config, layers, compute, self._checkpoint(), **where)
        self.model: nn.Module = place(core, options, rank, device)
        core.rope = rope_table(config, config.seq, stored, device)
        if options.te and options.fsdp == "1":
            te.prepare_for_fsdp(self.model)
        # FSDP casts float32 weights for the computation by itself; autocast does it without.
        cast = options.precision == "default" and not sharded
        self.autocast = partial(torch.autocast, device.type, bf16, enabled=cast)
        self.main_grads = te.MainGrads(self.model.parameters()) if options.fuse_wgrad else None
        self.params: list[Any] = (
            self.main_grads.masters if self.main_grads else list(self.model.parameters())
        )
        self.optimizer = make_optimizer(self.params, options.lr)

    def _checkpoint(self) -> Callable[..., Any] | None:
        if self.options.checkpoint == "none":
            return None
        reentrant = self.options.checkpoint == "reentrant"
        if self.options.te:
            return te.checkpoint(reentrant)
        return partial(checkpoint, use_reentrant=reentrant)

    def _unsynced(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a pass; only the `last` of a step reduces gradients over the ranks."""
        if self.options.fsdp == "1" and not last:
            return self.model.no_sync()  # type: ignore[no-any-return, operator]
        if self.options.fsdp == "2":
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def _clip(self) -> None:
        if not self.options.clip:
            return
        if self.options.fsdp == "1":
            self.model.clip_grad_norm_(self.options.clip)  # type: ignore[operator]
        else:
            nn.utils.clip_grad_norm_(self.params, self.options.clip)

    def step(self, index: int) -> Tensor:
        """One optimizer step; its mean loss over the ranks, still on the device."""
        options = self.options
        tokens = sequences(options, self.rank, index, self.device)
        if self.main_grads:
            self.main_grads.zero()
        else:
            self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for i, part in enumerate(torch.split(tokens, options.batch)):
            with self._unsynced(last=i == options.accumulate - 1):
                with self.autocast(), self.forward():
                    loss = self.model(part[:, :-1], part[:, 1:])
                (loss / options.accumulate).backward()
            total += loss.detach()
        self._clip()
        self.optimizer.step()
        if self.main_grads:
            self.main_grads.publish()
        if self.rank.world > 1:
            dist.all_reduce(total)
        return total / (options.accumulate * self.rank.world)


class Clock:
    """Marks points of the device's work and tells the milliseconds between two of them."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Waits for `end` to have happened."""
        if not self.gpu:
            return float(end - begin) * 1e3
        end.synchronize()
        return float(begin.elapsed_time(end))


def peak_memory(device: torch.device, rank: Rank) -> int:
    """Bytes: the most that torch had allocated on the GPU, or a CPU process's resident set; the
    largest of all ranks."""
    peak = peak_bytes(device)
    if rank.world == 1:
        return peak
    largest = torch.tensor(peak, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest.item())


def train(options: Options, rank: Rank, emit: Callable[[str], None]) -> dict[str, Any]:
    """Runs the job in this process; the figures, the same on every rank but for its own times.

    `emit` gets a line per timed step, when the step after it has been queued: nothing waits for
    the GPU. Raises UsageError, and JobError when memory runs out.
    """
    options = shard(options, rank.world)
    device = pick_device(options.device, rank)
    if options.precision is None:
        options = replace(options, precision="default" if device.type == "cuda" else "fp32")
    if options.te:
        te.load(options.fp8)
        if device.type == "cpu":
            raise UsageError("--te needs a GPU: leave --te or --device cpu out")
        if options.precision == "fp32":
            raise UsageError("--te computes in FP8 and bf16: take --precision pure or default")
    prepare_process(rank, device, options.seed)
    building = True
    try:
        with process_group(rank, device, needed=options.fsdp != "none"):
            trainer = Trainer(options, rank, device)
            building = False
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            return _timed(trainer, emit)
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        at = f"on {device}" if rank.world == 1 else f"on rank {rank.rank} ({device})"
        raise JobError(out_of_memory(options, at, building)) from e


def _timed(trainer: Trainer, emit: Callable[[str], None]) -> dict[str, Any]:
    options, device, rank = trainer.options, trainer.device, trainer.rank
    clock = Clock(device)
    name = torch.cuda.get_device_name(device) if clock.gpu else "CPU"
    gemmtune.work(**step_work(options, name)._asdict())
    for i in range(options.warmup):
        trainer.step(i)
    losses = torch.zeros(options.steps, pin_memory=clock.gpu)
    step_ms: list[float] = []
    marks = [clock.mark()]

    def report() -> None:
        i = len(step_ms)
        step_ms.append(clock.ms(marks[i], marks[i + 1]))
        emit(f"step {i + 1:4d}  loss {losses[i].item():8.4f}  {step_ms[i]:10.1f} ms")

    for i in range(options.steps):
        losses[i].copy_(trainer.step(options.warmup + i), non_blocking=True)
        marks.append(clock.mark())
        if i:
            report()
    report()
    return summarise(options, name, rank.world, losses.tolist(), step_ms, peak_memory(device, rank))


def _silent(line: str) -> None:
    """What ranks other than 0 do with a line."""


def _write(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as e:
        raise UsageError(f"--json {path}: cannot be written ({e.strerror}); name another") from e


def run_rank(options: Options, rank: Rank) -> int:
    """Trains in this process, prints what rank 0 has to say, and gives the exit code."""
    emit = partial(print, flush=True) if rank.rank == 0 else _silent
    try:
        figures = train(options, rank, emit)
        if rank.rank == 0:
            emit(text(figures, "GPU" if figures["device"] != "CPU" else "process"))
            if options.json:
                _write(Path(options.json), figures)
    except GemmtuneError as e:
        if rank.rank == 0 or isinstance(e, JobError):
            # In one piece, with its end of line, as other ranks write there too.
            print(f"gemmtune.llama: {e}\n", end="", file=sys.stderr)
        return e.exit_code
    return 0


def _leave(code: int) -> int:
    """`code` if it is 0; else ends the process at once, though other ranks wait for it in a
    collective."""
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _spawned(index: int, options: Options, init: str) -> None:
    _leave(run_rank(options, Rank(index, index, options.spawn, options.spawn, init)))


def _spawn(options: Options) -> int:
    from torch.multiprocessing.spawn import ProcessExitedException, spawn

    # torch tells how it ends the other processes when one fails; that one has told why.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="gemmtune-llama-") as folder:
        init = f"file://{folder}/rendezvous"
        try:
            spawn(_spawned, (options, init), nprocs=options.spawn)
        except ProcessExitedException as e:
            if e.exit_code > 0:
                return int(e.exit_code)
            raise JobError(
                f"rank {e.error_index} was ended by {e.signal_name}; if that was the system's "
                "answer to a lack of memory, lower --batch, --seq, --layers or --spawn"
            ) from e
    return 0


def main(options: Options) -> int:
    """The whole job, with its exit code; one line on stderr for an error that was foreseen."""
    rank = Rank()
    try:
        rank = rank_of(os.environ)
        if options.json and not Path(options.json).absolute().parent.is_dir():
            raise UsageError(f"--json {options.json}: there is no such folder; create it first")
        if options.spawn > 1 and rank.world > 1:
            raise UsageError("--spawn starts processes itself: use it without torchrun")
        options = shard(options, max(options.spawn, rank.world))
        if options.spawn > 1:
            return _spawn(options)
    except GemmtuneError as e:
        if rank.rank == 0:
            print(f"gemmtune.llama: {e}", file=sys.stderr)
        return e.exit_code
    code = run_rank(options, rank)
    return code if rank.world == 1 else _leave(code)
