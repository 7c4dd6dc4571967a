"""How long a sweep takes and how quiet a replay is: the reference job on this machine's backend.

Captures a small Llama (of tiny size without a GPU), sweeps its GEMMs, and replays a table of one
default with twelve control pairs. Prints the seconds of the sweep, and what the control says.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gemmtune import machine, table
from gemmtune.backends import base

CPU = ["--model", "tiny"]
GPU = ["--model", "llama3-8b", "--layers", "2", "--batch", "1", "--seq", "2048"]
AA_PAIRS, BLOCK = 12, 8


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    shapes, tuned, replay = folder / "shapes.csv", folder / "tuned.csv", folder / "replay.json"
    job = ["--", sys.executable, "-m", "gemmtune.llama", *(GPU if machine.gpus() else CPU)]
    job += ["--steps", "2000"]

    def gemmtune(*words: object) -> float:
        began = time.perf_counter()
        argv = [sys.executable, "-m", "gemmtune", *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode > 1:  # 1: the table makes the step slower
            raise SystemExit(f"gemmtune {words[0]} failed: {done.stderr[-500:]}")
        return time.perf_counter() - began

    gemmtune("capture", "--stop", "--no-profile", "-o", shapes, *job)
    spent_s = gemmtune("sweep", shapes, "-o", tuned)
    by_gemm = table.by_gemm(table.read(shapes, table.Shape).rows)
    rows = table.read(tuned, table.Tuned)
    print(f"sweep of {len(by_gemm)} GEMMs: {spent_s:.0f} s, {len(rows.rows)} tuned", flush=True)
    backend = base.get(base.detect())
    gemm = max(by_gemm, key=lambda g: g.flops)
    row = table.Tuned(backend.dev_cap(), gemm, 0, table.WS_MAX, backend.algos(gemm)[0])
    made = {"backend": backend.name, "machine": machine.fingerprint(backend)}
    table.write(tuned, [row], table.Tuned, made)
    more = ["--pairs", 4, "--aa-pairs", AA_PAIRS, "--block", BLOCK, "-o", replay]
    gemmtune("replay", tuned, *more, *job)
    found = json.loads(replay.read_text())
    control = [found["control"][name] - 1 for name in ("ratio", "low", "high")]
    print(
        f"control, default against default, {found['aa_pairs']} pairs of blocks of {BLOCK} steps of"
        f" {found['default_us'] / 1e3:.4g} ms: {{:+.2%}} [{{:+.2%}}, {{:+.2%}}]".format(*control)
    )


if __name__ == "__main__":
    main()
