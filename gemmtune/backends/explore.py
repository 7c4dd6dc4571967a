"""Which settings to try beyond the library's own choices: drawn by a seed, filtered by the library.

Pure: reads capabilities and asks a function whether a configuration can run. Half of what is drawn
changes a setting or two of one of the library's choices; the other half draws all settings anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gemmtune.backends.lt_api import Config

SPLITS = (1, 1, 1, 2, 3, 4, 6, 8)  # parts of k: most kernels that win do not split it
CHOSEN_IDS = 0.8  # share of the draws that use an algorithm number of the library's choices
CROWDED = 2.5  # times the waves of the library's choices: smaller tiles than that hardly win
MOST_DRAWS = 30  # for each configuration wanted
NONE, COMPUTE_TYPE = 0, 2  # reduction schemes (a mask's bits): those that add up in compute type


class Space(NamedTuple):
    """The settings that an algorithm number has, each with its possible values."""

    tile: Sequence[int]
    stages: Sequence[int]
    custom: Sequence[int]
    swizzle: Sequence[int]
    cluster: Sequence[int]
    reductions: Sequence[int]  # for a k that is split; empty: it cannot be


def draw(
    spaces: Mapping[int, Space],
    chosen: Sequence[Config],
    check: Callable[[Config], float | None],
    wanted: int,
    seed: int,
) -> list[Config]:
    """Up to `wanted` configurations that pass, none twice and none of `chosen`; by seed.

    `check` gives the waves of the GPU that a configuration takes, None where it cannot run.
    """
    rng = random.Random(seed)
    seen = {_key(c) for c in chosen}
    known = [c for c in chosen if c["id"] in spaces]
    limit = CROWDED * max([1.0, *(waves for c in chosen if (waves := check(c)) is not None)])
    found: list[Config] = []
    for _ in range(MOST_DRAWS * wanted if spaces else 0):
        if len(found) == wanted:
            break
        config = (
            _near(rng, spaces, known) if known and rng.random() < 0.5 else _any(rng, spaces, known)
        )
        key = _key(config)
        if key in seen:
            continue
        seen.add(key)
        waves = check(config)
        if waves is not None and waves <= limit:
            found.append(config)
    return found


def _near(rng: random.Random, spaces: Mapping[int, Space], known: Sequence[Config]) -> Config:
    """One of the library's choices with one or two settings changed."""
    config = dict(rng.choice(known))
    space = spaces[config["id"]]
    for name in rng.sample(["tile", "stages", "custom", "swizzle", "cluster", "splitk"], 2):
        if name == "splitk":
            config |= _split(rng, space)
        else:
            config[name] = rng.choice(getattr(space, name))
        if rng.random() < 0.5:
            break
    return config


def _any(rng: random.Random, spaces: Mapping[int, Space], known: Sequence[Config]) -> Config:
    usual = known and rng.random() < CHOSEN_IDS
    number = rng.choice(known)["id"] if usual else rng.choice(sorted(spaces))
    space = spaces[number]
    return {
        "id": number,
        "tile": rng.choice(space.tile),
        "stages": rng.choice(space.stages),
        **_split(rng, space),
        "swizzle": rng.choice(space.swizzle),
        "custom": rng.choice(space.custom),
        "inner": 0,
        "cluster": rng.choice(space.cluster),
    }


def _split(rng: random.Random, space: Space) -> Config:
    parts = rng.choice(SPLITS) if space.reductions else 1
    return {"splitk": parts, "reduction": rng.choice(space.reductions) if parts > 1 else NONE}


def _key(config: Config) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(config.items()))
