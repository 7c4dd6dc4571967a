"""How much a longer search finds: python tests/gpu/search_gpu.py SHAPES.csv RESULT.txt [SECONDS]

Sweeps the fprop GEMM that takes most of the step for SECONDS (8) and for three times as long, and
compares the winners' ratios to the default; says how many winners of a tuned.csv beside SHAPES.csv
are beyond the library's own list.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gemmtune import table
from gemmtune.table import Candidate, Shape, Tuned

LISTED = 8  # results of cuBLASLt's heuristic at most


def main() -> None:
    shapes, out = Path(sys.argv[1]), Path(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 8.0
    read = table.read(shapes, Shape)
    weights: dict[object, float] = {}
    for row in read.rows:
        if row.pass_ == "fprop" and row.gemm.fp8:
            weights[row.gemm] = weights.get(row.gemm, 0.0) + row.calls * row.gemm.flops
    chosen = max(weights, key=weights.__getitem__)
    folder = Path(tempfile.mkdtemp())
    one = folder / "one.csv"
    table.write(one, [r for r in read.rows if r.gemm == chosen], Shape, read.provenance)
    lines = [f"$ python {' '.join(sys.argv)}", f"{chosen}"]
    ratios = []
    for times in (1, 3):
        tuned = folder / f"tuned{times}.csv"
        candidates = folder / f"candidates{times}.csv"
        words = [sys.executable, "-m", "gemmtune", "sweep", one, "-o", tuned]
        words += ["--candidates", candidates, "--seconds-per-shape", str(seconds * times)]
        subprocess.run(words, check=True, capture_output=True)
        rows = table.read(candidates, Candidate).rows
        best = max((r for r in rows if r.status in ("winner", "default")), key=lambda r: r.ratio)
        ratios.append(max(best.ratio, 1.0))
        tried = sum(r.samples > 0 for r in rows)
        lines.append(
            f"{seconds * times:5.0f} s: {best.ratio:.4f} [{best.ratio_low:.4f},"
            f" {best.ratio_high:.4f}] of the default, rank {best.algo.aidx}, {tried} algorithms"
            f" timed: {best.algo.config}"
        )
    lines.append(f"the longer search's winner is {ratios[1] / ratios[0] - 1:+.2%} beside the other")
    beside = shapes.parent / "tuned.csv"
    if beside.exists():
        winners = table.read(beside, Tuned).rows
        beyond = sum(row.algo.aidx >= LISTED for row in winners)
        lines.append(f"{beyond} of the {len(winners)} winners in tuned.csv are beyond the list")
    out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
