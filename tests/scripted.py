"""A backend that follows a script: which algorithms a Gemm has, how each behaves, what it takes.

The Gemm's m picks the script. It is a module of its own so that worker processes can import it.
Run as a program it sweeps a shapes file with this backend, for tests that kill a sweep.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import sys
import time

import torch

from gemmtune.errors import DeviceLost
from gemmtune.gemm import Algo, Gemm

# m: {algorithm: its time over the default's}
SCRIPT = {
    31: {},
    32: {"fast": 0.8, "tie": 1.0, "slow": 1.5, "dreadful": 9.0},
    33: {"tie": 1.0, "a-hair": 0.998},
    34: {"unwritten": 0.5, "wrong": 0.5, "outside": 0.5, "no-beta": 0.5, "raises": 0.5, "tie": 1.0},
    35: {"unrepeatable": 0.5},
    36: {"narrow": 0.5},
    37: {"overflows": 0.5},
    38: {"aborts": 0.5},
    39: {"hangs": 0.5},
    40: {"naps": 1.0},
    41: {"segfaults": 0.5, "fast": 0.8, "exits": 0.5, "aborts": 0.5, "nan": 0.5, "wrong": 0.5},
    42: {"hangs": 0.5, "fast": 0.8},
    43: {"no-memory": 0.5, "fast": 0.8, "torch-no-memory": 0.5, "oom-killed": 0.5},
    44: {"backwards": 0.5, "stands-still": 0.5, "no-number": 0.5, "set-back-once": 0.8},
    45: {"dies-timed": 0.5, "fast": 0.8, "tie": 1.0},
    46: {"ruins": 2.0, "fast": 0.8},
    47: {"loses-the-device": 0.5, "fast": 0.8},
}
DEFAULT_US = 100.0
LAUNCHES = itertools.count()
RUINED: list[object] = []  # an algorithm that has corrupted this process, of which others die


def gemm(m: int, n: int = 24, k: int = 16, *, beta: int = 0, pad: int = 0) -> Gemm:
    types = ("float32",) * 3
    return Gemm(m, n, k, "N", "N", *types, "-", m, k, m + pad, beta=beta, api="mm")


class Scripted:
    name = "scripted"
    device = "cpu"
    numerics = "type"

    def __init__(self, library: str = "scripted 1", cap: int = 0) -> None:
        self._library, self._cap = library, cap

    def dev_cap(self) -> int:
        return self._cap

    def library(self) -> str:
        return self._library

    def unsupported(self, gemm: Gemm) -> str | None:
        return None if gemm.m in SCRIPT else "no script"

    def algos(self, gemm: Gemm) -> list[Algo]:
        return [Algo(i, i, name) for i, name in enumerate(("default", *SCRIPT[gemm.m]))]

    def workspace_bytes(self, gemm: Gemm, algo: Algo) -> int:
        return 4096

    def launcher(self, gemm: Gemm, algo: Algo):
        return Launcher(algo.config, gemm)

    def time_us(self, launch: Launcher, operands, launches: int) -> float:
        """From the script, with one per cent of noise; nothing is launched and no clock read.

        The noise follows from the question alone: `random` is seeded with its number.
        """
        share = SCRIPT[launch.gemm.m].get(launch.config, 1.0)
        us = DEFAULT_US * share * (1 + random.gauss(0, 0.01))
        match launch.config:
            case "backwards":
                return -us
            case "stands-still":
                return 0.0
            case "no-number":
                return math.nan
            case "set-back-once" if next(LAUNCHES) == 0:
                return -us
            case "ruins" if launches == 1:
                RUINED.append(launch)
            case "default" if RUINED:
                os.abort()
            case "dies-timed" if launches > 1:
                os.kill(os.getpid(), signal.SIGSEGV)
        return us


class Launcher:
    def __init__(self, config: str, gemm: Gemm) -> None:
        self.config, self.gemm = config, gemm

    def __call__(self, o) -> None:  # noqa: PLR0912
        value = o.x @ o.w
        match self.config:
            case "unwritten":
                o.d[:-1] = value[:-1]
                return
            case "wrong":
                value[3] *= 1.01
            case "outside":
                o.d.as_strided((1,), (1,), o.d.shape[1]).fill_(1.0)
            case "no-beta":
                o.d.copy_(value)
                return
            case "raises":
                raise RuntimeError("no such kernel\non two lines")
            case "unrepeatable":
                value *= 1 + 2.0**-23 * (next(LAUNCHES) % 2)  # never twice the same
            case "narrow":
                value = (o.x.bfloat16() @ o.w.bfloat16()).float()
            case "overflows":
                value = value * 2.0**100 / 2.0**100
            case "aborts":
                print("the library says why", file=sys.stderr, flush=True)
                os.abort()
            case "hangs":
                time.sleep(600)
            case "segfaults":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exits":
                os._exit(3)
            case "nan":
                value[0, 0] = math.nan
            case "no-memory":
                raise MemoryError
            case "torch-no-memory":
                torch.empty(1 << 60)
            case "oom-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "loses-the-device":
                raise DeviceLost("an illegal memory access")
            case "naps":
                time.sleep(0.1)
        o.d.copy_(value if o.c is None else value + o.c)


if __name__ == "__main__":
    from gemmtune import table
    from gemmtune.sweep import run

    shapes, folder, *more = sys.argv[1:]
    read = table.read(shapes, table.Shape)
    paths = f"{folder}/candidates.csv", f"{folder}/tuned.csv"
    options = run.Options(seconds_per_shape=0.01, timeout_s=float(more[0]) if more else None)
    run.sweep(read, Scripted(), *paths, options)
