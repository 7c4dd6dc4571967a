"""Statistics of timings: trimmed means of log-ratios and their intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TRIM = 0.2  # share cut off at each end: a fifth withstands the spikes that shared machines give


class Interval(NamedTuple):
    """A ratio and its confidence interval: centre, low, high."""

    ratio: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> float:
    """Mean of what is left when the share `trim` is cut off at each end."""
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = int(trim * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """The typical ratio of paired measurements, with its interval.

    The trimmed mean of the log-ratios, with Tukey and McLaughlin's standard error from the
    winsorised variance and Student's t (Wilcox, Introduction to Robust Estimation, section 4.3).
    Fewer than two pairs leave the interval unbounded: (0, inf).
    """
    from scipy.stats import t

    logs = np.sort(np.log(np.asarray(ratios, dtype=float)))
    n = len(logs)
    if n < 2:
        return Interval(float(np.exp(logs[0])) if n else math.nan, 0.0, math.inf)
    cut = int(TRIM * n)
    centre = trimmed_mean(logs.tolist())
    winsorised = np.clip(logs, logs[cut], logs[n - cut - 1])
    error = float(winsorised.std(ddof=1)) / ((1 - 2 * cut / n) * math.sqrt(n))
    margin = float(t.ppf((1 + confidence) / 2, n - 2 * cut - 1)) * error
    return Interval(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin))
