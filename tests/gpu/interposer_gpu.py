"""Tries the interposer on a real GPU: python tests/gpu/interposer_gpu.py

Starts itself in a new process with the interposer preloaded and cuBLASLt's own log on, runs a few
kinds of GEMM there, and compares what was recorded with the log, key by key. Prints a table last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def from_log(text: str) -> Counter[tuple]:
    """Launches of cublasLtMatmul by what the log tells of a key."""
    from gemmtune.capture import trace

    begun = filter(None, map(trace.start, text.splitlines()))
    return Counter(told(trace.gemm(f, [line])) for f, line in begun if f == "cublasLtMatmul")


def told(g) -> tuple:
    types = g.type_a, g.type_b, g.type_d
    lds = g.lda, g.ldb, g.ldd
    own = g.epi, g.beta, g.ws_bytes, g.fast_accum
    return (g.m, g.n, g.k, g.trans_a, g.trans_b, *types, *lds, *own)


def cases(torch):
    """Name and function of each kind of call; what they use is made first."""
    f = torch.nn.functional
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x, w, bias = (torch.randn(*s, **bf16) for s in ((512, 1024), (2048, 1024), (2048,)))
    c = torch.randn(512, 2048, **bf16)
    fp8 = torch.float8_e4m3fn
    xs, ws = x.to(fp8), w.to(fp8)
    one = torch.ones((), device="cuda")
    compiled = torch.compile(lambda t: f.linear(t, w, bias).relu())
    scaled = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    yield "linear", lambda: f.linear(x, w)
    yield "linear + bias", lambda: f.linear(x, w, bias)
    yield "addmm beta=1", lambda: torch.addmm(c, x, w.t())
    yield "bmm", lambda: torch.bmm(x.view(4, 128, 1024), w.view(4, 512, 1024).mT)
    yield "fp8", lambda: torch._scaled_mm(xs, ws.t(), **scaled)
    yield "fp8 fast", lambda: torch._scaled_mm(xs, ws.t(), use_fast_accum=True, **scaled)
    yield "compiled", lambda: compiled(x)


def inside(out: Path) -> None:
    import torch

    from gemmtune.backends.blas import PLAIN
    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import REASONS, Interposer

    interposer = Interposer(CublasLt())
    interposer.mode(True, timed=True)
    backend = CublasLt()
    seen: Counter[tuple] = Counter()
    applied: Counter[bool] = Counter()

    def drain(how=interposer.drain) -> list:
        torch.cuda.synchronize()
        records = how()
        for r in records:
            # The log has what goes to cublasLtMatmul: not the plain calls of cuBLAS.
            if r.calls and (r.gemm.api == "lt" or (r.applied and r.algo != PLAIN)):
                seen[told(r.gemm)] += r.calls
        return [r for r in records if r.calls]

    for name, call in cases(torch):
        call()  # what is made once
        drain()
        expected = call()
        records = drain()
        for r in records:
            g = r.gemm
            print(
                f"{name:14} {r.calls} x {g} ld={g.lda},{g.ldb},{g.ldd} ws={g.ws_bytes}"
                f" align={g.align} fast={g.fast_accum} api={g.api}: timed {r.timed},"
                f" {r.time_us:.1f} us, default {r.algo.config if r.algo else None}"
            )
        for r in records:
            found = [
                a for a in backend.algos(r.gemm) if r.algo is None or a.config != r.algo.config
            ]
            for algo in (*(() if r.algo is None else (r.algo,)), *found[:2]):
                interposer.choose({r.gemm: algo})
                got = call()
                used = sum(x.calls for x in drain() if x.applied and x.algo == algo)
                bitwise = torch.equal(got, expected)
                close = torch.allclose(got.float(), expected.float(), rtol=3e-2, atol=1.0)
                kind = f"default, {algo.config}" if algo is r.algo else algo.config
                print(f"{name:14} launched {used}, bitwise {bitwise}, close {close}: {kind}")
                applied[bool(used and close)] += 1
            interposer.choose({})
    call()
    with ThreadPoolExecutor(1) as pool:  # as capture's saving thread: none that has used the GPU
        records = drain(lambda: pool.submit(interposer.drain).result())
    calls, timed = (sum(getattr(r, name) for r in records) for name in ("calls", "timed"))
    print(f"drained by a thread without a context: {calls} calls, {timed} timed")
    counts = dict(zip(REASONS, interposer.faults(), strict=True))
    print("faults:", {k: v for k, v in counts.items() if v} or "none")
    print("calls that no Gemm has a name for:", interposer.unspelled)
    print(f"applied as told: {applied[True]} of {applied[True] + applied[False]}")
    out.write_text(json.dumps(sorted(seen.items(), key=str)))


def compare(recorded: Path, log: Path) -> None:
    """The log is whole once the process has ended."""
    ours = Counter({tuple(key): calls for key, calls in json.loads(recorded.read_text())})
    logged = from_log(log.read_text(errors="replace"))
    total = sum(logged.values())
    print(
        f"recorded {sum(ours.values())} calls of {len(ours)} keys, logged {total} of {len(logged)}"
    )
    for key in sorted({*ours, *logged}, key=str):
        if ours[key] != logged[key]:
            print(f"DIFFER {key}: recorded {ours[key]}, logged {logged[key]}")
    print("recorded and logged are", "EQUAL" if ours == logged else "DIFFERENT")


def graph() -> None:
    import torch

    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import GRAPHED, Interposer

    interposer = Interposer(CublasLt())
    name, call = list(cases(torch))[1]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    interposer.mode(True, timed=True)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    captured.replay()
    torch.cuda.synchronize()
    got = [(r.calls, r.timed) for r in interposer.drain()]
    print(f"\ngraph of {name}: captured, replayed; (calls, timed) {got}, untimed as it must be")
    print(f"calls that went into a graph: {interposer.faults()[GRAPHED]}")
    interposer.mode(False)


def main() -> None:
    from gemmtune.interposer import build

    env = {**os.environ, "LD_PRELOAD": str(build.library())}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "recorded.json", Path(folder) / "lt.log"
        logging = {"CUBLASLT_LOG_LEVEL": "2", "CUBLASLT_LOG_FILE": str(log)}
        for words, extra in (("inside", logging), ("graph", {})):
            argv = [sys.executable, __file__, words, str(out)]
            code = subprocess.run(argv, env={**env, **extra}, check=False).returncode
            print(f"[{words}: exit code {code}]", flush=True)
        if out.exists():
            compare(out, log)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(Path(sys.argv[2]))
    elif sys.argv[1:]:
        graph()
    else:
        main()
