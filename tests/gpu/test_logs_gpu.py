"""What import reads of cuBLASLt's own log: the GEMMs that a job of known ones launched.

It settles what `beta=` says of a call that adds C, which no stored log shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemmtune.capture.logs import Reader
from gemmtune.gemm import Gemm

JOB = """
import torch
torch.backends.cuda.preferred_blas_library("cublaslt")
def new(*shape, kind=torch.bfloat16): return torch.randn(*shape, device="cuda").to(kind)
x, w, c = new(512, 1024), new(2048, 1024), new(512, 2048)
x @ w.T
torch.addmm(c, x, w.T, beta=1.0, out=torch.empty_like(c))
c.addmm_(x, w.T)
torch.nn.functional.linear(x, w, new(2048))
new(4, 128, 256) @ new(4, 256, 64)
one = torch.ones((), device="cuda")
a, b = new(512, 1024).to(torch.float8_e4m3fn), new(2048, 1024).to(torch.float8_e4m3fn)
for fast in (False, True):
    torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and torch.version.cuda), reason="no NVIDIA GPU")
def test_every_gemm_of_a_job_is_read_from_cublaslts_log(tmp_path: Path) -> None:
    log = tmp_path / "lt.log"
    env = {**os.environ, "CUBLASLT_LOG_LEVEL": "2", "CUBLASLT_LOG_FILE": str(log)}
    subprocess.run([sys.executable, "-c", JOB], env=env, check=True)
    reader = Reader()
    reader.read(str(log))
    traces = [line for line in log.read_text().splitlines() if "[Trace]" in line]
    for line in traces:
        print(line.split("computeDesc=")[0][-90:], "beta=" + line.split(" beta=")[-1])
    for (gemm, pass_), calls in reader.calls.items():
        print(gemm, pass_, calls, gemm.api, gemm.bias_type, f"fast_accum {gemm.fast_accum}")
    assert [str(unread) for unread in reader.shown] == []
    assert sum(reader.calls.values()) == len(traces)
    found = {g._replace(ws_bytes=0, align=0, api="lt", bias_type="-") for g, _ in reader.calls}
    bf16 = "bfloat16"
    plain = Gemm(2048, 512, 1024, "T", "N", bf16, bf16, bf16, "-", 1024, 1024, 2048, api="lt")
    fp8 = plain._replace(type_a="float8e4m3", type_b="float8e4m3")
    batched = Gemm(64, 128, 256, "N", "N", bf16, bf16, bf16, "-", 64, 256, 64, api="lt")
    batched = batched._replace(batch=4, stride_a=16384, stride_b=32768, stride_d=8192)
    adding, biased = plain._replace(beta=1), plain._replace(epi="bias")
    assert {plain, adding, biased, batched, fp8, fp8._replace(fast_accum=1)} <= found
