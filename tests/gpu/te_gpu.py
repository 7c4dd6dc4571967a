"""Tries the TE worker and hook on a real GPU: python tests/gpu/te_gpu.py [SHAPES.CSV…]

Starts itself with the interposer preloaded. Issues every Gemm of a Llama layer through TE's own
entry points, and a few steps of TE's layers with the hook in place, and compares both with what the
interposer saw of the library's calls, key by key and count by count. With tables of captured shapes
it issues those of their Gemms that are the Lt API's instead, and compares the whole keys, workspace
and alignment with them. Prints a table last; exits with 1 where something differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

TOKENS, HIDDEN, FFN = 512, 1024, 2048


def gemms():
    """fprop, dgrad and wgrad of one linear layer in bf16 and FP8, and what else the worker can."""
    from gemmtune.gemm import Gemm

    def made(m, n, k, trans, types, bias="-", **more):
        ld = (k if trans[0] == "T" else m, n if trans[1] == "T" else k, m)
        return Gemm(m, n, k, *trans, *types, bias, *ld, api="lt", **more)

    out, into, tokens = FFN, HIDDEN, TOKENS
    bf16, f32 = ("bfloat16",) * 3, ("bfloat16", "bfloat16", "float32")
    yield made(out, tokens, into, "TN", bf16)
    yield made(into, tokens, out, "NN", bf16)
    yield made(into, out, tokens, "NT", bf16)
    yield made(into, out, tokens, "NT", f32, beta=1)
    yield made(out, tokens, into, "TN", bf16, "bfloat16", epi="bias")
    yield made(out, tokens, into, "TN", bf16, "bfloat16", epi="geluauxbias")
    yield made(out, tokens, into, "TN", bf16, epi="geluaux")
    yield made(into, tokens, out, "NN", bf16, epi="dgelu")
    yield made(into, out, tokens, "NT", bf16, "bfloat16", epi="bgradb")
    e4, e5 = "float8e4m3", "float8e5m2"
    for fast in (0, 1):
        yield made(out, tokens, into, "TN", (e4, e4, "bfloat16"), fast_accum=fast)
        yield made(into, tokens, out, "TN", (e4, e5, "bfloat16"), fast_accum=fast)
        yield made(into, out, tokens, "TN", (e4, e5, "bfloat16"), fast_accum=fast)
        yield made(into, out, tokens, "TN", (e4, e5, "float32"), fast_accum=fast, beta=1)
    yield made(out, tokens, into, "TN", (e4, e4, "bfloat16"), "bfloat16", epi="bias")


def key(gemm) -> tuple:
    from gemmtune.job.te_calls import TOLD

    return tuple(getattr(gemm, name) for name in TOLD)


def captured(paths):
    """The Lt API's Gemms of tables of shapes; the others are not TE's."""
    from gemmtune.table import Shape, read

    found = dict.fromkeys(row.gemm for path in paths for row in read(Path(path), Shape).rows)
    for gemm in found:
        if gemm.api == "lt":
            yield gemm
        else:
            print(f"{gemm!s:52} is {gemm.api}, not issued by TE")


def worker(drain, gemms, key) -> tuple[int, int]:
    from gemmtune.backends.te_call import Call, unsupported
    from gemmtune.sweep import operands
    from gemmtune.sweep.verify import Checker

    right = total = 0
    for gemm in gemms:
        assert unsupported(gemm) is None, (gemm, unsupported(gemm))
        call, o = Call(gemm), operands.draw(gemm, 0, "cuda")
        drain()
        call.run(call.prepare(o), o)
        launched = drain()
        seen = Counter({key(g): n for g, n in launched.items()})
        ok = seen == Counter({key(gemm): 1})

        def launch(o, call=call):
            call.run(call.prepare(o), o)

        wrong = Checker(gemm, launch, o, 0).whole(launch)
        print(
            f"{gemm!s:52} fast={gemm.fast_accum} {'EQUAL' if ok else 'DIFFERS'} {wrong or 'right'}"
        )
        for other in launched if not ok else ():
            different = [
                f"{a}: {x} for {y}"
                for a, x, y in zip(gemm._fields, other, gemm, strict=True)
                if x != y
            ]
            print("    launched instead:", ", ".join(different))
        right, total = right + (ok and not wrong), total + 1
    return right, total


def hook(drain) -> tuple[int, int]:
    import torch
    import transformer_engine.pytorch as te

    from gemmtune.job.te_calls import Hook
    from gemmtune.llama import te as ours

    calls: list = []
    Hook(lambda call, _: calls.append(call))
    bf16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
    right = total = 0
    for fuse in (False, True):
        more = {**bf16, "bias": False, "fuse_wgrad_accumulation": fuse}
        model = torch.nn.Sequential(
            te.Linear(HIDDEN, HIDDEN, **more),
            te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", **more),
        )
        if fuse:
            for p in model.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        for name, context in (("bf16", None), ("fp8", ours.fp8(None))):
            for recompute in (False, True):
                x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
                x.requires_grad_()

                def step(x=x, context=context, recompute=recompute, model=model):
                    run = (lambda t: te.checkpoint(model, t)) if recompute else model
                    if context is None:
                        y = run(x)
                    else:
                        with context():
                            y = run(x)
                    y.float().mean().backward()

                step()
                drain()
                calls.clear()
                step()
                seen, told = drain(), Counter(call.gemm for call in calls)
                theirs = Counter()
                for gemm, n in seen.items():
                    theirs[key(gemm)] += n
                mine = Counter()
                for gemm, n in told.items():
                    mine[key(gemm)] += n
                ok = mine == theirs
                sides = Counter((c.pass_, c.recompute, c.site) for c in calls)
                print(
                    f"hook: {name} fuse={fuse} recompute={recompute}: {sum(mine.values())} calls,"
                    f" {'EQUAL' if ok else 'DIFFERENT'}; {dict(sides)}"
                )
                for k in {*mine, *theirs} if not ok else ():
                    if mine[k] != theirs[k]:
                        print("   ", k, "hook", mine[k], "interposer", theirs[k])
                right, total = right + ok, total + 1
    return right, total


def inside(paths) -> int:
    import torch

    from gemmtune.backends.cublaslt import CublasLt
    from gemmtune.interposer.client import Interposer

    interposer = Interposer(CublasLt())
    interposer.mode(True)

    def drain() -> Counter:
        torch.cuda.synchronize()
        return Counter(
            {r.gemm: r.calls for r in interposer.drain() if r.calls and r.gemm.api == "lt"}
        )

    if paths:
        rows = {"worker keys": worker(drain, captured(paths), tuple)}
    else:
        rows = {"worker keys": worker(drain, gemms(), key), "hook counts": hook(drain)}
    print("calls that no Gemm has a name for:", interposer.unspelled)
    for name, (right, total) in rows.items():
        print(f"{name:14} {right} of {total}")
    return int(any(right < total for right, total in rows.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        sys.exit(inside(sys.argv[2:]))
    else:
        from gemmtune.interposer import build

        env = {**os.environ, "LD_PRELOAD": str(build.library())}
        words = [sys.executable, __file__, "inside", *sys.argv[1:]]
        sys.exit(subprocess.run(words, env=env, check=False).returncode)
