"""Runs each bench/bench_*.py and keeps its table, with the machine's fingerprint, in results/.

A benchmark is a script that prints its table on stdout. Named on the command line, only those run:
python bench/run.py capture_cost. Writes results/<name>-<arch>.txt.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from gemmtune import __version__, machine, textfile
from gemmtune.backends import base

ROOT = Path(__file__).parent.parent


def main(wanted: list[str]) -> int:
    here = machine.fingerprint(base.get(base.detect()))
    arch = re.sub(r"\W+", "-", re.sub(r"\(\w+\)", "", here["arch"])).strip("-").lower()
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    failed = 0
    for script in sorted(ROOT.glob("bench/bench_*.py")):
        name = script.stem.removeprefix("bench_")
        if wanted and name not in wanted:
            continue
        print(f"== {name}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, end="", flush=True)
        if done.returncode:
            print(f"{script.name} failed with {done.returncode}", file=sys.stderr)
            failed = 1
            continue
        head = f"# gemmtune {__version__} bench {name}\n# {json.dumps(here)}\n"
        textfile.write_text(results / f"{name}-{arch}.txt", head + done.stdout)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
