"""Which of many configurations to try next, from the times of those tried. Pure.

A configuration is its spelling, "name=value name=value …". Two resemble each other by the settings
that they share; what is likely to be fast is what resembles the fast ones most.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

APART = 6.0  # times less that a tried one counts for each setting in which it differs
SURPRISES = 4  # one in so many is drawn by chance, so that a first impression can be put right


class Guide:
    """Proposes among `configs`, named by their indices."""

    def __init__(self, configs: Sequence[str]) -> None:
        settings = [config.split() for config in configs]
        names = {s: i for i, s in enumerate(dict.fromkeys(s for each in settings for s in each))}
        self._has = np.zeros((len(configs), len(names)), dtype=np.float32)
        for row, each in zip(self._has, settings, strict=True):
            row[[names[s] for s in each]] = 1

    def next(self, us: Mapping[int, float], wanted: int, rng: random.Random) -> list[int]:
        """Up to `wanted` of those that have no time in `us` yet (microseconds; all positive)."""
        tried = np.array(sorted(us))
        left = [i for i in range(len(self._has)) if i not in us]
        chance = rng.sample(left, min(len(left), max(1, wanted // SURPRISES)))
        rest = [i for i in left if i not in chance]
        if not rest:
            return chance
        shared = self._has[rest] @ self._has[tried].T
        weights = APART ** (shared - shared.max(axis=1, keepdims=True))
        # The mean of the inverse: a fast one among slow ones is what is looked for.
        speed = weights @ (1 / np.array([us[i] for i in tried])) / weights.sum(axis=1)
        # Rounded and in order of index where equal: the same on every machine.
        order = np.argsort(-np.round(speed / speed.max(), 9), kind="stable")
        return [rest[i] for i in order[: wanted - len(chance)]] + chance
