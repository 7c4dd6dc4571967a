"""How a budget of time is shared out among the Gemms of a sweep. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

FLOOR_S = 0.3  # of timing for a Gemm: below, nothing but a large gain could be told
CAP = 4.0  # no Gemm gets more than so many times the mean
OVERRUN = 0.03  # of the budget: a Gemm that is not done by then is left unfinished


def allot(shares: Sequence[float], seconds: float, overhead_s: float) -> list[float]:
    """Seconds of timing for each Gemm, the largest share first; 0 for those left out.

    `shares`, in descending order, are shares of the step's GEMM time; `seconds` is for everything,
    of which each Gemm that is swept costs `overhead_s` beside its timing. Those with the smallest
    shares are left out where FLOOR_S each would not fit in. The rest is shared out by share, with
    FLOOR_S at least and CAP times the mean at most; all that can be used is used.
    """
    count = min(len(shares), int(seconds / (overhead_s + FLOOR_S))) if seconds > 0 else 0
    if not count:
        return [0.0] * len(shares)
    timing = seconds - count * overhead_s
    cap = max(FLOOR_S, CAP * timing / count)
    # Some factor of the shares, cut off at floor and cap, adds up to the whole: halve towards it.
    weights = [max(share, 1e-12) for share in shares[:count]]
    low, high = 0.0, cap / min(weights)
    for _ in range(200):
        factor = (low + high) / 2
        total = sum(min(max(factor * w, FLOOR_S), cap) for w in weights)
        low, high = (factor, high) if total < timing else (low, factor)
    given = [min(max(low * w, FLOOR_S), cap) for w in weights]
    return given + [0.0] * (len(shares) - count)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 90s, 10m or 1h30m. Raises ValueError for any other text."""
    match = re.fullmatch(
        r"(?:([0-9]{1,4})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,9})s)?", text.strip().lower()
    )
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise ValueError(f"{text!r} is not a duration such as 90s, 10m or 1h30m")
    return float(total)
