"""Statistics of timings: trimmed means of log-ratios and their intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
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

    @property
    def precision(self) -> float:
        """Half the width as a share of the ratio; unlike it, it tells nothing of the ratio."""
        return math.log(self.high / self.low) / 2 if self.low > 0 else math.inf


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> float:
    """Mean of what is left when the share `trim` is cut off at each end."""
    cut = int(trim * len(values))
    left = sorted(values)[cut : len(values) - cut]
    return math.fsum(left) / len(left)


def trimmed_means(rows: np.ndarray, trim: float = TRIM) -> np.ndarray:
    """The trimmed mean down each column of a matrix."""
    cut = int(trim * len(rows))
    means: np.ndarray = np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0)
    return means


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """The typical ratio of paired measurements, with its interval.

    The trimmed mean of the log-ratios, with Yuen's standard error from the winsorised variance and
    Student's t (Yuen, The two-sample trimmed t for unequal population variances, 1974). Covers the
    truth as often as it says, less half a per cent at worst, from 12 pairs on; less one with 5.
    The pairs must not be correlated with one another. Fewer than two leave it unbounded: (0, inf).
    """
    logs = np.sort(np.log(np.asarray(ratios, dtype=float)))
    n = len(logs)
    if n < 2:
        return Interval(float(np.exp(logs[0])) if n else math.nan, 0.0, math.inf)
    cut = int(TRIM * n)
    left = n - 2 * cut
    centre = float(logs[cut : n - cut].mean())
    winsorised = np.clip(logs, logs[cut], logs[n - cut - 1])
    error = float(winsorised.std(ddof=1)) * math.sqrt((n - 1) / (left * (left - 1)))
    margin = _student((1 + confidence) / 2, left - 1) * error
    return Interval(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin))


@lru_cache(maxsize=4096)
def _student(share: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(share, freedom))


# Below this many pairs a resample holds too few different values.
MIN_BOOTSTRAP = 8


def trimmed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trimmed means along the last axis, and their standard errors from the winsorised variance.

    For values of shape (..., n) both have shape (...); nan where a value is nan.
    """
    ordered = np.sort(values, axis=-1)
    n = ordered.shape[-1]
    cut = int(TRIM * n)
    kept = ordered[..., cut : n - cut]
    means = kept.mean(axis=-1)
    off = kept - means[..., None]
    low, high = off[..., 0], off[..., -1]
    # nan sorts last, where it may be cut off: the sum has it still.
    means = means + 0 * ordered[..., -1]
    if n < 2:
        return means, np.full(means.shape, np.nan)
    total = off.sum(axis=-1) + cut * (low + high)
    squares = (off * off).sum(axis=-1) + cut * (low * low + high * high)
    variance = np.maximum(squares - total * total / n, 0) / (n - 1)
    return means, np.sqrt(variance) / ((1 - 2 * cut / n) * math.sqrt(n))


def bootstrap_interval(
    ratios: Sequence[float] | np.ndarray, confidence: float = 0.95, resamples: int = 999
) -> Interval:
    """The typical ratio of paired measurements in the order they were taken, with its interval.

    The trimmed mean of the log-ratios, with a symmetric bootstrap-t interval (Wilcox, section
    4.4.4): the wider one of resampled pairs and of resampled circular blocks of adjacent pairs
    (Politis and Romano, 1992). The blocks widen it where pairs resemble their neighbours; alone
    they would be too narrow for few pairs. The same ratios always give the same interval. Fewer
    than MIN_BOOTSTRAP pairs have that of `ratio_interval`.
    """
    logs = np.log(np.asarray(ratios, dtype=float))
    n = len(logs)
    if n < MIN_BOOTSTRAP:
        return ratio_interval(np.exp(logs).tolist(), confidence)
    centre, error = (float(x) for x in trimmed(logs))
    random = np.random.default_rng(0)
    quantiles = []
    for length in (1, round(n ** (1 / 3))):
        starts = random.integers(n, size=(resamples, -(-n // length), 1))
        places = ((starts + np.arange(length)) % n).reshape(resamples, -1)[:, :n]
        means, errors = trimmed(logs[places])
        off = np.abs(means - centre)
        t = np.divide(off, errors, out=np.where(off > 0, np.inf, 0.0), where=errors > 0)
        quantiles.append(float(np.quantile(t, confidence, method="higher")))
    margin = max(quantiles) * error if error else 0.0
    return Interval(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin))
