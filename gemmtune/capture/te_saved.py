"""Transformer Engine's own table of the GEMMs that it ran, as a second source beside its hook.

Each process's TE is told to save its table (TE_HIPBLASLT_ALGO_SAVE) into the capture's folder,
unless the user has it saved elsewhere; when the job has ended, `compare` reads what is there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemmtune.dialects import te
from gemmtune.dialects.te import ALGO_SAVE
from gemmtune.errors import GemmtuneError
from gemmtune.gemm import Gemm
from gemmtune.textfile import read_text

FILES = "te-*.csv"


def save_beside(out: str) -> None:
    """Have TE save its table of this process, unless the user has: it reads this at its first GEMM.

    The name carries the process, as TE itself would leave `%i` as it is before te-v2. What a parent
    process has set here is not the user's.
    """
    before = os.environ.get(ALGO_SAVE)
    if not before or os.path.dirname(before) == out:
        os.environ[ALGO_SAVE] = os.path.join(out, f"te-{socket.gethostname()}-{os.getpid()}.csv")


def compare(folder: str | os.PathLike[str], gemms: Iterable[Gemm]) -> list[str]:
    """Remarks on where TE's saved tables and the recorded Gemms differ; none where TE saved none.

    TE's tables hold every GEMM since the start, and what it had loaded: more there is no fault.
    """
    saved: set[tuple[Any, ...]] = set()
    unread = 0
    for path in sorted(Path(folder).glob(FILES)):
        try:
            saved |= {tuple(getattr(r, n) for n in te.SAID) for r in te.read(read_text(path)).rows}
        except GemmtuneError:  # cut short by the end of a process that was killed
            unread += 1
    remarks = []
    if unread:
        remarks.append(
            f"{unread} tables of Transformer Engine's own are empty or cut short: it writes them"
            " when a process ends in order"
        )
    seen = {tuple(getattr(g, n) for n in te.SAID): g for g in gemms if g.api == "lt"}
    if saved and (missing := [seen[key] for key in seen if key not in saved]):
        remarks.append(
            f"{len(missing)} of {len(seen)} GEMMs that Transformer Engine was seen to issue are not"
            f" in its own table: {missing[0]} first"
        )
    if saved and (more := saved - set(seen)):
        m, n, k, *_ = min(more)
        remarks.append(
            f"{len(more)} GEMMs of Transformer Engine's own table were not recorded (they ran"
            f" outside the recorded steps, or were loaded): {m}x{n}x{k} first"
        )
    return remarks
