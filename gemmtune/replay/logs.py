"""The folder of a replay's step logs: `replay.steps` beside `replay.json`.

The processes of the job write `steps-*.jsonl` into it (arms.py); `job.json` says what was run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmtune import textfile
from gemmtune.errors import UsageError
from gemmtune.replay.analyse import Rank
from gemmtune.replay.arms import FILES, read_steps

ABOUT = "job.json"


def folder(output: Path) -> Path:
    """Where the step logs of a replay are that is written to `output`."""
    return output.with_suffix(".steps")


def prepare(output: Path, about: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Make the folder for a new replay, and say what it is about.

    Logs of an earlier one go when `output` holds what they showed. Those of a replay that was
    killed first are kept under another name, which is returned beside the folder.
    """
    made = folder(output)
    kept = None
    logs = list(made.glob(FILES))
    try:
        if any(not output.exists() or p.stat().st_mtime > output.stat().st_mtime for p in logs):
            kept = next(
                aside
                for i in range(1, len(logs) + 10_000)
                if not (aside := made.with_name(f"{made.name}.{i}")).exists()
            )
            made.rename(kept)
        elif logs:
            shutil.rmtree(made)
        made.mkdir(exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to the folder {made}: {e.strerror}") from None
    textfile.write_text(made / ABOUT, json.dumps(about) + "\n")
    return made, kept


def reread(output: Path, gemms: list[str]) -> tuple[dict[str, Any], list[Rank]]:
    """What an earlier replay was about, and its ranks' records; `gemms` are the table's.

    Raises UsageError where there are none, or they are of another table.
    """
    made = folder(output)
    ranks = read_steps(made)
    if not ranks:
        raise UsageError(f"no step logs in {made}: replay the job first, with -o {output}")
    if any(list(rank.gemms) != gemms for rank in ranks):
        raise UsageError(f"{made} has the steps of another table: name the one that was replayed")
    return json.loads(textfile.read_text(made / ABOUT)), ranks
