"""Trains a small Hugging Face Llama with random weights; knows nothing of gemmtune.

--flops FILE writes what torch's FlopCounterMode counts in step --flops-step, by operator, one file
a rank (FILE.<rank>). Losses go to stdout.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["none", "ddp", "fsdp1", "fsdp2", "tp"], default="none")
parser.add_argument("--checkpoint", choices=["none", "reentrant", "nonreentrant"], default="none")
parser.add_argument("--attention", default="eager")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--tokens", type=int, default=13)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--flops")
parser.add_argument("--flops-step", type=int, default=1)
args = parser.parse_args()


def count_local(mode: type) -> None:
    """FlopCounterMode counts DTensors by their global shape; deferring them counts local shapes."""
    inner = mode.__torch_dispatch__

    def dispatch(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        return inner(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch


if args.parallel == "tp":
    count_local(flop_counter._FlopCounterMode)


rank = int(os.environ.get("RANK", "0"))
if args.parallel != "none":
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=98,
        attn_implementation=args.attention,
        use_cache=False,
    )
)
if args.checkpoint != "none":
    model.gradient_checkpointing_enable({"use_reentrant": args.checkpoint == "reentrant"})
if args.parallel == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif args.parallel == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
elif args.parallel == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
elif args.parallel == "tp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"self_attn.{p}_proj": ColwiseParallel() for p in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=args.parallel != "tp")
data = torch.Generator().manual_seed(1 if args.parallel == "tp" else 1 + rank)
for step in range(args.steps):
    tokens = torch.randint(0, 98, (2, args.tokens), generator=data)
    counter = FlopCounterMode(display=False) if args.flops and step == args.flops_step else None
    if counter:
        counter.__enter__()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if counter:
        counter.__exit__(None, None, None)
        by_op = {str(op): count for op, count in counter.flop_counts["Global"].items()}
        with open(f"{args.flops}.{rank}", "w") as f:
            json.dump(by_op, f)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"loss {loss.item():.9f}", flush=True)
if args.compile and rank == 0:
    print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
if args.parallel != "none":
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads: one that is still at work when Python ends aborts the process
