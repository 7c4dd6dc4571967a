"""Where the reference job runs: ranks, devices, process groups, FSDP, and the first weights."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemmtune.errors import UsageError
from gemmtune.job.steps import leave_group
from gemmtune.llama.model import Block
from gemmtune.llama.options import Options

INIT_STD = 0.02


@dataclass(frozen=True)
class Rank:
    """One process of the job, and its place among the `local_world` of its machine.

    `init` is its init_process_group method, None if it is alone.
    """

    rank: int = 0
    local: int = 0
    world: int = 1
    local_world: int = 1
    init: str | None = None


def rank_of(env: Mapping[str, str]) -> Rank:
    """The rank that torchrun's variables give; UsageError where they are no numbers."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Rank()
    try:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", rank))
        return Rank(rank, local, world, int(env.get("LOCAL_WORLD_SIZE", local + 1)), "env://")
    except ValueError as e:
        raise UsageError(
            f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE must be integers ({e})"
        ) from e


def pick_device(wanted: str, rank: Rank) -> torch.device:
    """The device of a rank; UsageError, the same on every rank, where the GPUs are too few."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UsageError("--device cuda: torch sees no GPU here, take --device cpu")
    if rank.local_world > gpus:
        raise UsageError(
            f"each of {rank.local_world} processes needs a GPU, and torch sees {gpus}: "
            "run fewer processes, or take --device cpu"
        )
    return torch.device("cuda", rank.local)


@contextmanager
def process_group(rank: Rank, device: torch.device, needed: bool) -> Iterator[None]:
    """The default process group (nccl on a GPU, gloo on a CPU), if `needed`."""
    if not needed:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if rank.init is None:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    else:
        dist.init_process_group(
            backend, init_method=rank.init, rank=rank.rank, world_size=rank.world
        )
    try:
        yield
    except BaseException:
        if rank.world == 1:  # else the others may be in a collective, and this one would wait
            dist.destroy_process_group()
        raise
    leave_group()


def initialise(p: Tensor, ordinal: int, seed: int, rank: Rank) -> None:
    """Fills a parameter, or this rank's shard of it: ones for a norm, else N(0, INIT_STD).

    The values depend on the seed and the matrix's `ordinal` in the model alone, so every way of
    sharding starts from the same weights.
    """
    local = p.to_local() if hasattr(p, "to_local") else p
    if p.dim() < 2:
        local.fill_(1)
        return
    generator = torch.Generator(local.device).manual_seed(seed * 1_000_003 + ordinal)
    whole = torch.empty(p.shape, device=local.device, dtype=torch.float32)
    whole.normal_(0, INIT_STD, generator=generator)
    if local is not p:  # FSDP2 gives each rank one chunk of the rows; the last ranks may get none
        chunks = whole.chunk(rank.world)
        whole = chunks[rank.rank] if rank.rank < len(chunks) else whole[:0]
    local.copy_(whole)


def _ordinals(model: nn.Module) -> dict[str, int]:
    names = [name for name, p in model.named_parameters() if p.dim() > 1]
    return {name: i for i, name in enumerate(names)}


@torch.no_grad()
def place(model: nn.Module, options: Options, rank: Rank, device: torch.device) -> nn.Module:
    """The model ready to train: sharded as --fsdp says, on its device, with its first weights.

    Under FSDP the model comes on the meta device, and no rank ever holds all of it.
    """
    if options.compile:
        # Blocks alone under FSDP, whose hooks cannot be traced.
        for module in model.modules():
            if isinstance(module, Block) if options.fsdp != "none" else module is model:
                module.compile()
    if options.fsdp == "1":
        return _fsdp1(model, options, rank, device)
    ordinals = _ordinals(model)
    if options.fsdp == "2":
        _fsdp2(model, options, rank, device)
        model.to_empty(device=device)
    for name, p in model.named_parameters():
        initialise(p, ordinals.get(name, 0), options.seed, rank)
    return model


def _fsdp1(model: nn.Module, options: Options, rank: Rank, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    names = {id(module): name for name, module in model.named_modules()}
    ordinals = _ordinals(model)

    @torch.no_grad()
    def materialise(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        prefix = names[id(module)]
        for name, p in module.named_parameters(prefix, recurse=False):
            initialise(p, ordinals.get(name, 0), options.seed, rank)

    bf16 = torch.bfloat16
    mixed = {
        "pure": MixedPrecision(bf16, bf16, bf16, cast_root_forward_inputs=False),
        "default": MixedPrecision(bf16, torch.float32, cast_root_forward_inputs=False),
    }
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=mixed.get(str(options.precision)),
        param_init_fn=materialise,
        device_id=device,
        use_orig_params=True,
    )


def _fsdp2(model: nn.Module, options: Options, rank: Rank, device: torch.device) -> None:
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import (  # type: ignore[attr-defined]
            MixedPrecisionPolicy,
            fully_shard,
        )
    from torch.distributed.device_mesh import init_device_mesh

    bf16 = torch.bfloat16
    mixed = {
        "pure": MixedPrecisionPolicy(bf16, bf16, cast_forward_inputs=False),
        "default": MixedPrecisionPolicy(bf16, torch.float32, cast_forward_inputs=False),
    }
    shared: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (rank.world,)),
        "mp_policy": mixed.get(str(options.precision), MixedPrecisionPolicy()),
    }
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module, **shared)
    fully_shard(model, **shared)


def prepare_process(rank: Rank, device: torch.device, seed: int) -> None:
    """Seeds, threads and silence, before anything is built."""
    warnings.filterwarnings("ignore", module=r"torch\.")
    random.seed(seed)
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif rank.world > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // rank.world))
