"""In which regime a job ran: at its GPU's power cap, or below it. Pure.

capture finds it out and writes it into the provenance, under "gpu"; sweep and replay read it there.
At the cap a step takes as long as its energy does, so what counts of an algorithm is how it runs
alone, for long, at the clocks that are left to it; below the cap, its time at full clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AT_CAP, BELOW = "at the power cap", "below the power cap"

NEAR = 0.95  # of the cap: an H200 at its 700 W draws 680 to 692
OFTEN = 0.5  # of the readings
SETTLED_S = 2.0  # NVML's power is a mean over the last second: nothing is told of less than this


def judge(power_w: float, cap_w: float, capped: float, seconds: float) -> str:
    """AT_CAP, BELOW, or "" where that cannot be told.

    Of readings over so many seconds: the median power, the cap, and the share of readings in which
    the cap holds the clocks down (nvml.Reading.capped, which comes without delay).
    """
    if capped >= OFTEN:
        return AT_CAP
    if seconds < SETTLED_S or not cap_w or not power_w:
        return ""
    return AT_CAP if power_w >= NEAR * cap_w else BELOW


def of(provenance: Mapping[str, Any]) -> str:
    """The regime of the job that a table was captured from; "" where it does not say."""
    gpu = provenance.get("gpu")
    said = gpu.get("regime") if isinstance(gpu, Mapping) else ""
    return said if said in (AT_CAP, BELOW) else ""
