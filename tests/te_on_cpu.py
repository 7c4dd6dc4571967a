"""The backend te over the fake Transformer Engine, on a CPU. As a program: gemmtune with it.

Only the device differs from the real one, and who tells hipBLASLt's build.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fake_hipblaslt_model import script

from gemmtune.backends import base
from gemmtune.backends.te import Te

HERE = Path(__file__).parent
PATHS = [str(HERE / "fake_te"), str(HERE), str(HERE.parent)]


class TeOnCpu(Te):
    device = "cpu"

    def library(self) -> str:
        return f"hipBLASLt {script()['build']}"


def environment(folder: Path, made: dict[str, Any]) -> dict[str, str]:
    """The variables of a process with a fake TE of that script; what it counts goes to folder."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.json").write_text(json.dumps(made))
    (folder / "counts").mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TE_HIPBLASLT_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(PATHS),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "FAKE_TE": str(folder / "script.json"),
        "FAKE_TE_COUNTS": str(folder / "counts"),
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    base.BACKENDS["te"] = "te_on_cpu:TeOnCpu"
    from gemmtune.cli import main

    main()
