"""Tries the interposer on a real GPU: python tests/gpu/interposer_gpu.py

Starts itself in a new process with the interposer preloaded and cuBLASLt's own log on, runs a few
kinds of GEMM there, and compares what was recorded with the log, key by key. Prints a table last.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

LOGGED = {"R_16BF": "bfloat16", "R_8F_E4M3": "float8e4m3", "R_8F_E5M2": "float8e5m2"}
LOGGED |= {"R_32F": "float32", "R_16F": "float16"}
EPILOGUES = {"": "-", "EPILOGUE_BIAS": "bias", "EPILOGUE_DEFAULT": "-"}
CALLS = 2000


def from_log(text: str) -> Counter[tuple]:
    """Calls by what the log tells of a key."""
    found: Counter[tuple] = Counter()
    for line in text.splitlines():
        if "[Trace][cublasLtMatmul]" not in line:
            continue

        def part(name: str, line: str = line) -> dict[str, str]:
            inside = re.search(rf" {name}=\[([^\]]*)\]", line)
            return dict(re.findall(r"(\w+)=(\S+)", inside[1])) if inside else {}

        a, b, d, desc = (part(name) for name in ("Adesc", "Bdesc", "Ddesc", "computeDesc"))
        rows, cols = int(a["rows"]), int(a["cols"])
        ta = "T" if desc.get("transa") == "OP_T" else "N"
        tb = "T" if desc.get("transb") == "OP_T" else "N"
        epi = desc.get("epilogue", "")
        beta = re.search(r" beta=(\S+)", line)
        ws = re.search(r"workSpaceSizeInBytes=(\d+)", line)
        found[
            int(d["rows"]),
            int(d["cols"]),
            cols if ta == "N" else rows,
            ta,
            tb,
            *(LOGGED.get(x["type"], x["type"]) for x in (a, b, d)),
            *(int(x["ld"]) for x in (a, b, d)),
            EPILOGUES.get(epi, epi),
            int(bool(beta) and float(beta[1]) != 0),
            int(ws[1]) if ws else 0,
            int(desc.get("fastAccumulationFlag", "0")),
        ] += 1
    return found


def from_record(record) -> tuple:
    g = record.gemm
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


def inside(log: Path) -> None:
    import torch

    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import REASONS, Interposer

    interposer = Interposer(CublasLt())
    seen: Counter[tuple] = Counter()
    applied, lines, kept = Counter(), [], []
    for name, call in cases(torch):
        call()  # what is made once
        torch.cuda.synchronize()
        interposer.mode(True, timed=True)
        before = len(from_log_text(log))
        expected = call()
        torch.cuda.synchronize()
        interposer.mode(False)
        records = interposer.drain()
        logged = from_log(from_log_text(log)[before:])
        lt = Counter()
        for r in records:
            if r.gemm.api == "lt":
                lt[from_record(r)] += r.calls
            lines.append(
                f"{name:14} {r.calls} x {r.gemm} ws={r.gemm.ws_bytes} align={r.gemm.align}"
                f" api={r.gemm.api} timed={r.timed} {r.time_us:.1f} us"
                f" default={r.algo.config if r.algo else None}"
            )
        same = "equal" if lt == logged else f"DIFFER: recorded {dict(lt)} logged {dict(logged)}"
        lines.append(f"{name:14} log: {same}")
        seen += lt
        kept.append((name, call, records, expected))
    print("\n".join(lines))
    backend = CublasLt()
    for name, call, records, expected in kept:
        for r in records:
            default = r.algo
            algos = [
                a for a in backend.algos(r.gemm) if default is None or a.config != default.config
            ]
            same = [default] if default is not None else []
            for algo in (*same, *algos[:2]):
                interposer.choose({r.gemm: algo})
                interposer.mode(True)
                got = call()
                torch.cuda.synchronize()
                interposer.mode(False)
                used = sum(x.calls for x in interposer.drain() if x.applied and x.algo == algo)
                bitwise = torch.equal(got, expected)
                close = torch.allclose(got.float(), expected.float(), rtol=3e-2, atol=1.0)
                kind = "default" if algo is default else algo.config
                print(f"{name:14} apply: launched {used}, bitwise {bitwise}, close {close}: {kind}")
                applied[bool(used and close)] += 1
    interposer.choose({})
    counts = dict(zip(REASONS, interposer.faults(), strict=True))
    print("faults:", {k: v for k, v in counts.items() if v} or "none")
    print(f"applied as told: {applied[True]} of {applied.total()}")


def from_log_text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def overhead() -> None:
    import torch

    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import Interposer

    interposer = Interposer(CublasLt())
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x, w, bias = (torch.randn(*s, **bf16) for s in ((64, 64), (64, 64), (64,)))
    calls = {
        "lt (linear + bias)": lambda: torch.nn.functional.linear(x, w, bias),
        "gemmex (linear)": lambda: torch.nn.functional.linear(x, w),
    }
    backend = CublasLt()
    print(
        f"\n{'host us per call':22}{'off':>8}{'recorded':>10}{'miss':>8}{'applied':>9}{'timed':>8}"
    )
    for name, call in calls.items():
        call()
        interposer.mode(True)
        call()
        record = next(r for r in interposer.drain() if r.calls)
        algo = record.algo or backend.algos(record.gemm)[0]
        other = record.gemm._replace(m=7)
        modes = {
            "off": (False, False, {}),
            "recorded": (True, False, {}),
            "miss": (True, False, {other: algo}),
            "applied": (True, False, {record.gemm: algo}),
            "timed": (True, True, {}),
        }
        best = dict.fromkeys(modes, 1e9)
        for _ in range(15):
            for mode, (on, timed, choices) in modes.items():
                interposer.choose(choices)
                interposer.mode(on, timed)
                call()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS // 10):
                    call()
                best[mode] = min(best[mode], (time.perf_counter() - begin) / (CALLS // 10) * 1e6)
                torch.cuda.synchronize()
                interposer.drain()
        widths = (8, 10, 8, 9, 8)
        print(
            f"{name:22}"
            + "".join(f"{v:>{n}.2f}" for v, n in zip(best.values(), widths, strict=True))
        )
    interposer.mode(False)


def graph() -> None:
    import torch

    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import Interposer

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
    interposer.mode(False)


def main() -> None:
    from gemmtune.interposer import build

    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "LD_PRELOAD": str(build.library()), "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "lt.log"
        logging = {"CUBLASLT_LOG_LEVEL": "2", "CUBLASLT_LOG_FILE": str(log)}
        for words, extra in ((["inside", str(log)], logging), (["graph"], {}), (["overhead"], {})):
            code = subprocess.run(
                [sys.executable, __file__, *words], env={**env, **extra}
            ).returncode
            print(f"[{words[0]}: exit code {code}]", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(Path(sys.argv[2]))
    elif sys.argv[1:]:
        {"overhead": overhead, "graph": graph}[sys.argv[1]]()
    else:
        main()
