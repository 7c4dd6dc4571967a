"""What the machine says of itself while a job runs: clock, load, stolen time. Linux; reads /proc
and /sys, and leaves out what is not there."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Clocks are read of this many processors at most: a read can take a millisecond each.
_CLOCKS = 4


def read() -> dict[str, float]:
    """Readings of this moment, by name; differences between two moments tell of what lies between.

    `mhz`: mean clock of some processors that this process may use. Seconds since the boot, of all
    processors together: `busy_s`, `steal_s` (taken by other virtual machines), `all_s`. `cpu_s`:
    what this process has used of them, its own children left out.
    """
    found = {"cpu_s": time.process_time()}
    clocks = _clocks()
    if clocks:
        found["mhz"] = sum(clocks) / len(clocks)
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
        spent = [int(word) / os.sysconf("SC_CLK_TCK") for word in first[1:9]]
        found["all_s"] = sum(spent)
        found["steal_s"] = spent[7]
        found["busy_s"] = sum(spent) - spent[3] - spent[4] - spent[7]
    except (OSError, ValueError, IndexError):
        pass
    return {name: round(value, 3) for name, value in found.items()}


def _clocks() -> list[float]:
    """Clocks of some of this process's processors, in MHz."""
    try:
        mine = sorted(os.sched_getaffinity(0))[:_CLOCKS]
    except (AttributeError, OSError):
        return []
    clocks = []
    for cpu in mine:
        try:
            path = Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq")
            clocks.append(int(path.read_text()) / 1000)
        except (OSError, ValueError):
            return []  # a virtual machine's, as a rule: its /proc/cpuinfo shows a constant
    return clocks
