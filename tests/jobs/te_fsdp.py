"""A job with Transformer Engine's layers under FSDP2, on a CPU: a few GEMMs per step, all TE's.

usage: te_fsdp.py [STEPS] [fp8] [own-tables]; prints the best step's time on rank 0.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

HIDDEN, FFN, TOKENS = 32, 64, 48


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    if "own-tables" in sys.argv:  # what a job must not do
        os.environ["TE_HIPBLASLT_ALGO_LOAD"] = f"rank{os.environ['RANK']}.csv"
    if "leaves-tuning-on" in sys.argv:
        os.environ["TE_HIPBLASLT_TUNING_RUN_COUNT"] = "2"
    import transformer_engine.pytorch as te

    from gemmtune.job.steps import leave_group

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(HIDDEN, FFN, bias=False), te.Linear(FFN, HIDDEN))
    model = fully_shard(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    best = float("inf")
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        x = torch.randn(2, TOKENS // 2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(enabled="fp8" in sys.argv):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        best = min(best, time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(f"best step {best * 1e3:.2f} ms")
    leave_group()


if __name__ == "__main__":
    main()
