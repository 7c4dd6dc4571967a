#!/usr/bin/env bash
# A trial on a GPU, of a minute or two: what capture says of a job at its power cap and of one below
# it, which kernels it takes for GEMMs, and what a reading costs. Run in the repository's root;
# PYTHON names the interpreter.
set -e
PYTHON=${PYTHON:-python3}
out=$(mktemp -d)
more="--profile"
"$PYTHON" -m gemmtune capture --help | grep -q -- --time && more="$more --time"
capture() {  # name, options of the job
    name=$1
    shift
    "$PYTHON" -m gemmtune capture -o "$out/$name.csv" --warmup 5 --steps 20 --stop $more -- \
        "$PYTHON" -m gemmtune.llama --model llama3-8b --steps 60 "$@" > "$out/$name.log" 2>&1 ||
        echo "CAPTURE FAILED"
    echo "== $name: $*"
    grep "^gemmtune:" "$out/$name.log" || tail -5 "$out/$name.log"
}
capture heavy --layers 4 --batch 2 --seq 4096
capture light --layers 2 --batch 1 --seq 256
"$PYTHON" - "$out" <<'PY'
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gemmtune import machine, nvml, table
from gemmtune.capture.profile import is_gemm

print("== kernels by name (GEMM or other)")
x, w = (torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16) for n in (2048, 4096))
q = torch.randn(2, 16, 1024, 64, device="cuda", dtype=torch.bfloat16)
one = torch.ones((), device="cuda")
a8, b8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
calls = {
    "linear": lambda: F.linear(x, w),
    "linear, bias": lambda: F.linear(x, w, w[:, 0]),
    "linear, float32": lambda: F.linear(x.float(), w.float()),
    "one row": lambda: F.linear(x[:1], w),
    "deep": lambda: x[:, :64].T.contiguous() @ x[:, :64].contiguous(),
    "bmm": lambda: q[0] @ q[0].transpose(1, 2),
    "fp8": lambda: torch._scaled_mm(a8, b8.T, one, one, out_dtype=torch.bfloat16),
    "attention": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "conv": lambda: F.conv2d(q, q[:1, :, :3, :3].repeat(8, 1, 1, 1)),
    "softmax": lambda: x.softmax(-1),
}
for name, call in calls.items():
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            print(f"{name:16} {'GEMM' if is_gemm(event.name) else 'other':5} {event.name[:110]}")
with nvml.meter(machine.gpus()[0].uuid) as read:
    read()
    began = time.perf_counter()
    for _ in range(50):
        reading = read()
    print(f"== a reading takes {(time.perf_counter() - began) / 50 * 1e6:.0f} us: {reading}")
uuid = torch.cuda.get_device_properties(0).uuid
print(f"torch's uuid {uuid}, NVML's {machine.gpus()[0].uuid}")
for path in sorted(Path(sys.argv[1]).glob("*.csv")):
    made = table.read(path, table.Shape).provenance
    print(path.stem, {k: made.get(k) for k in ("step_us", "gpu", "profile")})
PY
