"""What capture records on a GPU against cuBLASLt's own log, key by key.

    python tests/gpu/keys_gpu.py RESULT.txt [CASE…]

Each case is a job of STEPS optimizer steps, all of them recorded, with CUBLASLT_LOG_LEVEL=2; what
`gemmtune import` reads of that log is the independent count. cublasGemmEx shows there as the calls
that it makes inside, whose workspace and alignment are its own: those two are compared for calls of
cublasLtMatmul alone. Exits with 1 where any case differs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from gemmtune.table import Shape, Table, read

STEPS = 2
HF = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
                     vocab_size=32000, num_attention_heads=16, num_key_value_heads=4,
                     use_cache=False)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
data = torch.randint(0, 32000, (2, 1024), device="cuda")
run = torch.compile(model) if "compile" in sys.argv else model
for _ in range(STEPS):
    run(input_ids=data, labels=data).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BIAS = """
import torch
from torch.nn import functional as F
bf16 = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
x, w, b, c = (torch.randn(*s, **bf16) for s in ((512, 1024), (2048, 1024), (2048,), (512, 2048)))
optimizer = torch.optim.SGD([x, w, b, c], lr=0.01)
for _ in range(STEPS):
    (F.linear(x, w, b) * torch.addmm(c, x, w.t(), beta=1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TE = ["-m", "gemmtune.llama", "--te", "--model", "llama3-8b", "--layers", "2", "--batch", "1"]
TE += ["--seq", "2048", "--warmup", "0", "--steps", str(STEPS)]
CASES = {
    "HF Llama, bf16": (HF, []),
    "HF Llama, torch.compile": (HF, ["compile"]),
    "llama --te, FP8": ("", TE),
    "linear + bias, addmm": (BIAS, []),
}


def counted(table: Table[Shape], steps: int) -> Counter[tuple[object, ...]]:
    """Calls by what both sides can tell of a key."""
    found: Counter[tuple[object, ...]] = Counter()
    for row in table.rows:
        gemm = row.gemm
        if gemm.api != "lt":
            gemm = gemm._replace(ws_bytes=0, align=0)
        if gemm.batch > 1 or gemm.api != "lt":
            gemm = gemm._replace(api="blas" if gemm.api != "lt" else "lt")
        found[tuple(gemm)] += round(row.calls * steps)
    return found


def case(folder: Path, source: str, words: list[str]) -> tuple[Counter, Counter, str]:
    script = folder / "job.py"
    script.write_text(source.replace("STEPS", str(STEPS)))
    log, shapes, logged = (folder / name for name in ("lt.log", "shapes.csv", "logged.csv"))
    env = {**os.environ, "CUBLASLT_LOG_LEVEL": "2", "CUBLASLT_LOG_FILE": str(log)}
    job = [sys.executable, *([str(script)] if source else []), *words]
    gemmtune = [sys.executable, "-m", "gemmtune"]
    capture = ["capture", "--warmup", "0", "--steps", str(STEPS), "--no-profile", "-o", shapes]
    done = subprocess.run(
        [*gemmtune, *capture, "--", *job], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode or not shapes.exists():
        raise SystemExit(f"capture failed ({done.returncode}): {done.stderr[-2000:]}")
    said = "\n".join(line for line in done.stderr.splitlines() if "no GEMM of a table" in line)
    made = subprocess.run(
        [*gemmtune, "import", log, "-o", logged], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise SystemExit(f"import failed: {made.stderr[-2000:]}")
    return counted(read(shapes, Shape), STEPS), counted(read(logged, Shape), 1), said


def main() -> None:
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    lines = [f"$ python {' '.join(sys.argv)}", ""]
    lines.append(f"{'case':26}{'keys':>6}{'recorded':>10}{'logged':>8}  equal")
    different = False
    for name, (source, words) in CASES.items():
        if wanted and not any(part in name for part in wanted):
            continue
        folder = Path(tempfile.mkdtemp())
        recorded, logged, said = case(folder, source, words)
        shutil.rmtree(folder)
        keys = {*recorded, *logged}
        same = recorded == logged
        different |= not same
        lines.append(
            f"{name:26}{len(keys):6}{recorded.total():10}{logged.total():8}"
            f"  {'yes' if same else 'NO'}"
        )
        lines += [f"  {said}"] if said else []
        for key in sorted(keys, key=str):
            if recorded[key] != logged[key]:
                lines.append(f"  recorded {recorded[key]}, logged {logged[key]}: {key}")
    out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(different)


if __name__ == "__main__":
    main()
