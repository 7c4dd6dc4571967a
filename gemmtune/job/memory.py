"""Memory of a process of the job: the most that it used, and how it says that it ran out."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What torch, its allocators and the GPU libraries say, whatever class the error has.
NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|ALLOC_FAILED",
    re.IGNORECASE,
)
# The last line of a traceback, behind a launcher's prefix such as "[rank0]: ".
_RAISED = re.compile(r"^(?:\[\w+\]: ?)*[\w.]+(?:Error|Exception)\b")
_MEMORY_ERROR = re.compile(r"^(?:\[\w+\]: ?)*[\w.]*MemoryError\b")
_ON_GPU = re.compile(r"OutOfMemoryError|\b(?:CUDA|HIP)\b.*out of memory|ALLOC_FAILED", re.I)
_ON_HOST = re.compile(r"can't allocate memory|not enough memory|cannot allocate memory", re.I)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device: torch raises RuntimeError for a CPU's."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
    )


def out_of_memory_line(text: str) -> tuple[str, str] | None:
    """Whose memory ran out (GPU, CPU, Python or "" where it is not said), and the line of a job's
    output that says so; None where none does."""
    found = [x for x in text.splitlines() if _MEMORY_ERROR.search(x) or NO_MEMORY.search(x)]
    if not found:
        return None
    # A traceback also shows the line of source that raised the error.
    line = next(filter(_RAISED.search, found), found[0])
    if _ON_GPU.search(line):
        return "GPU", line.strip()
    if _ON_HOST.search(line):
        return "CPU", line.strip()
    return ("Python" if _MEMORY_ERROR.search(line) else ""), line.strip()


def peak_bytes(device: torch.device | None) -> int:
    """The most bytes that torch had allocated on a GPU; else this process's largest resident set.

    Linux's ru_maxrss also counts the process that this one was forked from (exec keeps it), so
    /proc/self/status is asked first.
    """
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
