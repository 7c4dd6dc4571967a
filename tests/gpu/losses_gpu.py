"""Whether the interposer leaves a job's losses bitwise as they are: python … RESULT.txt [JOB…]

Runs the job (else `gemmtune.llama --te`, 50 steps), with torch's deterministic algorithms,
attention by plain mathematics and NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, plainly twice, under the
interposer while it records and applies nothing, with a table of the defaults of its own
cublasLtMatmul calls, and with that table made to look as of another library build; the last also
with --strict.
Exits with 1 where losses differ although the two plain runs agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gemmtune import machine, table
from gemmtune.backends.cublaslt import CublasLt
from gemmtune.gemm import Algo
from gemmtune.table import Shape, Tuned

STEPS = 50
JOB = ["--te", "--model", "llama3-8b", "--layers", "2", "--batch", "1", "--seq", "2048"]
DETERMINISTIC = """
import runpy, torch
torch.use_deterministic_algorithms(True, warn_only=True)
for kind in ("flash", "mem_efficient", "cudnn"):  # whose backward is not
    getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
runpy.run_module("gemmtune.llama", run_name="__main__", alter_sys=True)
"""
GEMMTUNE = [sys.executable, "-m", "gemmtune"]


def defaults(shapes: Path, tuned: Path, library: str | None = None) -> int:
    """Write the table of the defaults; returns how many rows it has."""
    backend = CublasLt()
    rows = [
        Tuned(backend.dev_cap(), gemm, 0, table.WS_MAX, Algo(int(config.split()[0][3:]), 0, config))
        for gemm, config in table.defaults(table.read(shapes, Shape).rows).items()
    ]
    made = machine.fingerprint(backend)
    made = {**made, "library": library or made["library"]}
    table.write(tuned, rows, Tuned, {"backend": "cublaslt", "machine": made})
    return len(rows)


def main() -> None:
    out = Path(sys.argv[1])
    folder = Path(tempfile.mkdtemp())
    os.environ |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    words = sys.argv[2:] or JOB
    script = folder / "job.py"
    script.write_text(DETERMINISTIC)
    job = [sys.executable, str(script), *words, "--steps", str(STEPS)]
    shapes, tuned, foreign = (folder / f"{x}.csv" for x in ("shapes", "tuned", "foreign"))

    def run(name: str, before: list[str]) -> tuple[int, list[float], str]:
        to = folder / f"{name}.json"
        argv = [*before, *job, "--json", str(to)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        losses = json.loads(to.read_text())["losses"] if to.exists() else []
        said = [x for x in done.stderr.splitlines() if x.startswith("gemmtune:")]
        return done.returncode, losses, "\n    ".join(said)

    first, second = run("first", []), run("second", [])
    found = {"plain again": second}
    capture = [*GEMMTUNE, "capture", "--no-profile", "--warmup", "3", "--steps", "5"]
    found["recorded in steps 4 to 8"] = run("recorded", [*capture, "-o", str(shapes), "--"])
    count = defaults(shapes, tuned)
    defaults(shapes, foreign, "cuBLASLt 1.2.3")
    found[f"{count} defaults applied"] = run("applied", [*GEMMTUNE, "run", str(tuned), "--"])
    found["another library's table"] = run("foreign", [*GEMMTUNE, "run", str(foreign), "--"])
    strict = run("strict", [*GEMMTUNE, "run", "--strict", str(foreign), "--"])
    lines = [f"$ python {' '.join(sys.argv)}", f"job: {' '.join(job[1:])}", ""]
    if len(first[1]) != STEPS:
        raise SystemExit(f"the job failed: {first[2]}")
    different = False
    for name, (code, losses, said) in found.items():
        equal = losses == first[1]
        different |= not equal and second[1] == first[1]
        lines.append(
            f"{name:28} exit code {code}, {len(losses)} losses, "
            + ("bitwise equal" if equal else "DIFFERENT")
            + (f"\n    {said}" if said else "")
        )
    lines.append(
        f"{'the same, --strict':28} exit code {strict[0]}, {len(strict[1])} losses\n    {strict[2]}"
    )
    out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(different)


if __name__ == "__main__":
    main()
