"""What the interposer costs a GEMM call on the host: over the fakes of the tests, or on a GPU.

A loop of calls in C, in a process without the interposer (bare) and in one with it: passing
through, recording, with a table that has a row for the call (hit) or only for others (miss), and
timing with events. Prints nanoseconds per call more than the bare one's: the least of several runs
in turns. On an NVIDIA GPU the calls are PyTorch's linear layers with a bias (lt) and without, since
a real library's attribute queries cost what they cost.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CALLS, ROUNDS = 20_000, 15
GPU_CALLS, TURNS = 200, 3
FLAGS = ("-O2", "-fno-strict-aliasing")
APIS = ("lt", "gemmex", "gemmstridedbatchedex")


def measure(folder: Path) -> None:
    """Print the nanoseconds per call of each API in each mode, as JSON."""
    from interposer_job import Job, algo, gemm, spec

    preloaded = bool(os.environ.get("LD_PRELOAD"))
    job = ctypes.CDLL(str(folder / "libjob.so"))
    job.job_gemm.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
    modes = {"bare": (False, False, {})}
    if preloaded:
        interposer = Job(folder).interposer
        others = {gemm(m=i): algo(20) for i in range(100, 200)}
        modes = {
            "passed through": (False, False, {}),
            "recorded": (True, False, {}),
            "applied, miss": (True, False, others),
            "applied, hit": (True, False, None),
            "timed": (True, True, {}),
        }
    out = ctypes.c_float()
    best: dict[str, dict[str, float]] = {}
    for api, name in enumerate(APIS):
        one = spec(1, 1, 1, api=api)
        own = gemm(1, 1, 1, lda=1, ldb=1, ldd=1, api=name)
        for _ in range(ROUNDS):
            for mode, (on, timed, rows) in modes.items():
                if preloaded:
                    interposer.choose({own: algo(20)} if rows is None else rows)
                    interposer.mode(on, timed)
                begin = time.perf_counter_ns()
                if job.job_gemm(ctypes.byref(one), CALLS if not timed else 1000, ctypes.byref(out)):
                    raise SystemExit("a call failed")
                each = (time.perf_counter_ns() - begin) / (CALLS if not timed else 1000)
                found = best.setdefault(mode, {})
                found[name] = min(found.get(name, each), each)
                if preloaded:
                    launched = {r.applied for r in interposer.drain() if r.calls}
                    expected = {rows is None} if on else set()
                    if launched != expected:
                        raise SystemExit(f"{mode}: not as told")
    print(json.dumps(best))


def measure_on_gpu() -> None:
    """The same of PyTorch's calls on a GPU: in host time, while the GPU works through its queue."""
    import torch

    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import Interposer

    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x, w, bias = (torch.randn(*s, **bf16) for s in ((64, 64), (64, 64), (64,)))
    linear = torch.nn.functional.linear
    calls = {"lt": lambda: linear(x, w, bias), "gemmex": lambda: linear(x, w)}
    best: dict[str, dict[str, float]] = {}
    for api, call in calls.items():
        call()
        modes = {"bare": (False, False, {})}
        if os.environ.get("LD_PRELOAD"):
            backend = CublasLt()
            interposer = Interposer(backend)
            interposer.mode(True)
            call()
            seen = next(r for r in interposer.drain() if r.calls)
            algo = seen.algo or backend.algos(seen.gemm)[1]  # the first is the plain call
            modes = {
                "passed through": (False, False, {}),
                "recorded": (True, False, {}),
                "applied, miss": (True, False, {seen.gemm._replace(m=7): algo}),
                "applied, hit": (True, False, {seen.gemm: algo}),
                "timed": (True, True, {}),
            }
        for _ in range(ROUNDS):
            for mode, (on, timed, rows) in modes.items():
                if mode != "bare":
                    interposer.choose(rows)
                    interposer.mode(on, timed)
                call()
                torch.cuda.synchronize()
                begin = time.perf_counter_ns()
                for _ in range(GPU_CALLS):
                    call()
                each = (time.perf_counter_ns() - begin) / GPU_CALLS
                torch.cuda.synchronize()
                if mode != "bare":
                    interposer.drain()
                found = best.setdefault(mode, {})
                found[api] = min(found.get(api, each), each)
    print(json.dumps(best))


def main() -> None:
    from fakes import fakes

    from gemmtune import machine
    from gemmtune.interposer import build

    on_gpu = any(gpu.vendor == "NVIDIA" for gpu in machine.gpus())
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        made = [] if on_gpu else [fakes("cublaslt", Path(scratch) / "fakes", *FLAGS)]
        for preload in ("", str(build.library())) * (TURNS if on_gpu else 1):
            env = {**os.environ, "LD_PRELOAD": preload}
            words = [sys.executable, __file__, "inside", *map(str, made)]
            done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
            for mode, each in json.loads(done.stdout).items():
                before = found.setdefault(mode, each)
                found[mode] = {api: min(ns, before[api]) for api, ns in each.items()}
    bare = found.pop("bare")
    print(f"{'ns per call':16}" + "".join(f"{api:>22}" for api in bare))
    print(f"{'bare':16}" + "".join(f"{ns:22.0f}" for ns in bare.values()))
    for mode, each in found.items():
        print(f"{mode:16}" + "".join(f"{each[api] - bare[api]:+22.0f}" for api in bare))


if __name__ == "__main__":
    if sys.argv[2:]:
        measure(Path(sys.argv[2]))
    elif sys.argv[1:]:
        measure_on_gpu()
    else:
        main()
