"""What capture records of a small model, as JSON: with `noting` in C++, or without it.

usage: noting_job.py MODULE.so|python [steps]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemmtune.capture import noting
from gemmtune.capture.ops import Recorder


class Scaled(torch.autograd.Function):
    """A product of its own in forward and backward, below one autograd node."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w * 2

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t() * 2, x.t() @ grad * 2


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Scaled.apply(x, self.w)


class Net(nn.Module):
    """Plain and biased layers, batched products, shared and square weights, a recomputed block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.square = nn.Linear(8, 8, bias=False)
        self.block = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8))
        self.own = Own()
        self.last = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        y = self.square(torch.tanh(self.square(self.first(x))))
        y = checkpoint(self.block, y, use_reentrant=False)
        y = checkpoint(self.block, y, use_reentrant=True)
        y = torch.tanh(self.own(y))
        scores = torch.bmm(y.view(2, 4, 8), y.view(2, 4, 8).mT).softmax(-1)
        y = torch.bmm(scores, y.view(2, 4, 8)).reshape(8, 8)
        return self.last(torch.addmm(y, y, self.square.weight))


def main() -> None:
    path, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    noting._torch = lambda: None if path == "python" else Path()  # type: ignore[assignment]
    noting._made = lambda _: Path(path)  # type: ignore[assignment]
    torch.manual_seed(0)
    net = Net()
    recorder = Recorder()
    assert (recorder._fast is None) is (path == "python")
    for _ in range(steps):
        x = torch.randn(8, 6)
        net(x).square().sum().backward()
        with torch.no_grad():
            net(x)  # an evaluation
        torch.complex(x, x) @ torch.complex(x, x).t()  # no Gemm of a table
        torch.randn(3, 5) @ torch.randn(5, 3)  # of no module
        torch.eye(4).to_sparse() @ torch.randn(4, 4)
        recorder.next_step()
    recorder.remove()
    rows = [{k: v for k, v in row.items() if k != "time_s"} for row in recorder.rows()]
    times = [row["time_s"] for row in recorder.rows()]
    json.dump([rows, recorder.untranslated(), all(t > 0 for t in times)], sys.stdout)


if __name__ == "__main__":
    main()
