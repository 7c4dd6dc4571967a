"""What the machine says of itself while a job runs: clock, load, stolen time; the GPU's power and
clocks. Linux; reads /proc, /sys and NVML, and leaves out what is not there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median

from gemmtune import gpu, machine, nvml

METER_S = 0.1  # between two readings of a GPU

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


class Meter:
    """Reads a GPU every METER_S in a thread, until `close`; without NVML it has no readings."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._seen: list[tuple[float, nvml.Reading]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with gpu.meter(self._uuid) as read:
            while read is not None:
                self._seen.append((time.monotonic(), read()))
                if self._closed.wait(METER_S):
                    break

    def take(self) -> list[tuple[float, nvml.Reading]]:
        """The readings since the last call, each with when it was, in seconds."""
        count = len(self._seen)
        taken, self._seen[:count] = self._seen[:count], []
        return taken

    def block(self) -> dict[str, float]:
        """What was read since the last call, as `read` gives it: medians of the later half.

        NVML's power is a mean over a second, so the first readings tell of what went before. The
        energy is that of the last reading, which was at `gpu_s`.
        """
        seen = self.take()
        if not seen:
            return {}
        later = [reading for _, reading in seen[len(seen) // 2 :]]
        return {
            "gpu_s": round(seen[-1][0], 3),
            "power_w": round(median(r.power_w for r in later), 1),
            "power_cap_w": later[-1].power_cap_w,
            "sm_mhz": float(median(r.sm_mhz for r in later)),
            "capped": sum(r.capped for r in later) / len(later),
            "energy_j": later[-1].energy_j,
        }

    def close(self) -> None:
        self._closed.set()
        self._thread.join(1.0)


def meter() -> Meter | None:
    """A meter of the GPU that this thread of the job uses; None where it uses none."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    index = torch.cuda.current_device()
    if torch.version.hip:  # whose uuid torch spells in its own way
        return Meter("".join(found.uuid for found in machine.gpus()[index : index + 1]))
    properties = torch.cuda.get_device_properties(index)
    return Meter(f"GPU-{getattr(properties, 'uuid', '')}")
