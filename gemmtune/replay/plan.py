"""The schedule of a replay: which steps run which arm. Pure.

Every rank computes the schedule from the same numbers, so all switch at the same step without a
word between them. Pairs of blocks come first as controls (default against default), then default
against tuned; within a pair the order is random, and balanced over the pairs.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from gemmtune.errors import UsageError


class Plan(NamedTuple):
    """What the user asked for, in optimizer steps and pairs of blocks.

    `warmup` steps run first, at the default. `drop` steps at the start of each block are not
    counted: caches and clocks still belong to the block before.
    """

    seed: int = 0
    warmup: int = 3
    block: int = 5
    pairs: int = 10
    aa_pairs: int = 4
    drop: int = 1

    def check(self) -> None:
        """Raise UsageError where no replay can follow from these numbers."""
        for name, least in (("warmup", 1), ("pairs", 2), ("aa_pairs", 0), ("drop", 0)):
            value = getattr(self, name)
            if value < least:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {value} is too few: give {least} or more")
        if self.block <= self.drop:
            raise UsageError(
                f"--block {self.block} leaves nothing to count: give {self.drop + 1} or more "
                f"(the first of each block is not counted)"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps that the whole schedule takes."""
        return self.warmup + 2 * self.block * (self.pairs + self.aa_pairs)


class Block(NamedTuple):
    """Consecutive steps of one arm: `first` to `last`, those before `counted` not counted.

    `side` "a" is the default; side "b" is the table, or in a control the default once more.
    """

    pair: int
    control: bool
    side: str
    first: int
    counted: int
    last: int

    @property
    def steps(self) -> range:
        """The steps that count."""
        return range(self.counted, self.last + 1)

    @property
    def tuned(self) -> bool:
        return self.side == "b" and not self.control


def schedule(plan: Plan) -> list[Block]:
    """All blocks in the order of their steps, steps counted from 0 as the job's."""
    orders = random.Random(plan.seed)
    blocks: list[Block] = []
    first = plan.warmup
    for control, pairs in ((True, plan.aa_pairs), (False, plan.pairs)):
        for sides in _balanced(pairs, orders):
            pair = len(blocks) // 2
            for side in sides:
                last = first + plan.block - 1
                blocks.append(Block(pair, control, side, first, first + plan.drop, last))
                first = last + 1
    return blocks


def _balanced(pairs: int, orders: random.Random) -> list[str]:
    """One order, "ab" or "ba", a pair: each equally often (but for one), shuffled."""
    sides = ["ab", "ba"]
    orders.shuffle(sides)
    chosen = [sides[i % 2] for i in range(pairs)]
    orders.shuffle(chosen)
    return chosen
