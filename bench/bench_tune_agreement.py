"""Do three tunings of the tiny Llama on two FSDP ranks choose the same algorithms?

Runs `gemmtune tune` three times from nothing, and prints for each GEMM what each sweep chose and by
how much it was faster, then whether all agree wherever one gained more than 5 %.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gemmtune import table
from gemmtune.gemm import Gemm
from gemmtune.table import Shape, Tuned

RUNS = 3
BUDGET = "2m"
MATTERS = 1.05
JOB = "torchrun --nproc-per-node 2 -m gemmtune.llama --model tiny --fsdp 2 --steps 100000"


def tune(folder: Path) -> tuple[set[Gemm], dict[Gemm, Tuned], str]:
    """The job's GEMMs, the rows that the sweep chose, and the last words of the tuning."""
    words = ["-m", "gemmtune", "tune", "--budget", BUDGET, "-o", str(folder), "--", *JOB.split()]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    shapes = table.read(folder / "shapes.csv", Shape).rows
    swept = table.read(folder / "swept.csv", Tuned).rows
    return {s.gemm for s in shapes}, {row.gemm: row for row in swept}, done.stdout.split("\n\n")[-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = [tune(Path(scratch) / str(i)) for i in range(RUNS)]
    agreed = total = 0
    for gemm in sorted(set.union(*(gemms for gemms, _, _ in runs)), key=lambda g: -g.flops):
        rows = [chosen.get(gemm) for _, chosen, _ in runs]
        cells = [
            f"{row.algo.config} {100 * (row.default_us / row.time_us - 1):+.1f}%" if row else "-"
            for row in rows
        ]
        big = any(row and row.default_us / row.time_us > MATTERS for row in rows)
        same = len({row.algo if row else None for row in rows}) == 1
        total += big
        agreed += big and same
        mark = ("agree" if same else "differ") if big else ""
        print(f"{gemm!s:26}" + "".join(f"{cell:22}" for cell in cells) + mark)
    for _, _, words in runs:
        print(words.strip())
    print(f"of {total} GEMMs with a gain above 5 % in a run, all runs agree on {agreed}")


if __name__ == "__main__":
    main()
