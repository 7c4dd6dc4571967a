"""What the interposer costs a GEMM call on the host, over the fakes of the tests; no GPU needed.

A loop of calls in C, in a process without the interposer (bare) and in one with it: passing
through, recording, with a table that has a row for the call (hit) or only for others (miss), and
timing with the fake's events. Prints nanoseconds per call more than the bare one's: the least of
several runs in turns. A real library's attribute queries cost what they cost there: on an NVIDIA
GPU its own calls are timed too, by tests/gpu/interposer_gpu.py.
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


def main() -> None:
    from fakes import fakes

    from gemmtune import machine
    from gemmtune.interposer import build

    with tempfile.TemporaryDirectory() as scratch:
        folder = fakes("cublaslt", Path(scratch) / "fakes", "-O2", "-fno-strict-aliasing")
        found: dict[str, dict[str, float]] = {}
        for preload in ("", str(build.library())):
            env = {**os.environ, "LD_PRELOAD": preload}
            words = [sys.executable, __file__, str(folder)]
            done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found |= json.loads(done.stdout)
    bare = found.pop("bare")
    print(f"{'ns per call':16}" + "".join(f"{api:>22}" for api in APIS))
    print(f"{'bare':16}" + "".join(f"{bare[api]:22.0f}" for api in APIS))
    for mode, each in found.items():
        print(f"{mode:16}" + "".join(f"{each[api] - bare[api]:+22.0f}" for api in APIS))

    if [gpu for gpu in machine.gpus() if gpu.vendor == "NVIDIA"]:
        trial = ROOT / "tests" / "gpu" / "interposer_gpu.py"
        env = {**os.environ, "LD_PRELOAD": str(build.library())}
        sys.stdout.flush()
        subprocess.run([sys.executable, str(trial), "overhead"], env=env, check=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(Path(sys.argv[1]))
    else:
        main()
