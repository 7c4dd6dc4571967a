"""The plan of a replay: what was asked for, and the rounds of blocks that follow from it. Pure.

A replay is a list of rounds, each decided (decide.py) when the one before has ended: warm-up, a
probe of how long the step takes to settle after a switch, control pairs (default against default),
pairs of default against table, more of these until the interval is narrow enough, end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gemmtune.errors import UsageError

WARMUP, PROBE, CONTROL, COMPARE, END = "warmup", "probe", "control", "compare", "end"

# Fewest pairs that are planned: a bootstrap interval of fewer is not to be trusted.
MIN_PAIRS = 8
# Counted steps that a block has at least: of five, the trimmed mean leaves out one at each end, so
# that a single step twice as long (a gradient scaler that skipped an update) does not count.
MIN_COUNTED = 5
# A block lasts this long at least: it averages over many small steps.
BLOCK_S = 0.5
# The first quarter of a block is never counted, as slow settling may hide in the noise of a probe.
DROP_SHARE = 4
# A block is this many times as long as what is measured for settling.
SETTLED_BLOCKS = 4
# A stretch of the probe: long enough for clocks under a power cap, which settle in seconds.
PROBE_S = 6.0
PROBE_STEPS = 12, 600


class Plan(NamedTuple):
    """What the user asked for, in optimizer steps and pairs of blocks; None: to be measured.

    `warmup` steps run first, at the default. `precision` is the half-width of the 95 % interval to
    come to, in percent; `max_pairs` ends the search for it, as does `seconds` of stepping (0: no
    limit) once two pairs are compared.
    """

    seed: int = 0
    warmup: int = 3
    block: int | None = None
    pairs: int | None = None
    aa_pairs: int = MIN_PAIRS
    precision: float = 0.3
    max_pairs: int = 200
    seconds: float = 0.0

    def check(self) -> None:
        """Raise UsageError where no replay can follow from these numbers."""
        least = {"warmup": 1, "block": 2, "pairs": 2, "aa_pairs": 0, "max_pairs": MIN_PAIRS}
        for name, few in least.items():
            value = getattr(self, name)
            if value is not None and value < few:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {value} is too few: give {few} or more")
        if not 0 < self.precision < math.inf:
            raise UsageError(f"--precision {self.precision:g} is no width: give percent above 0")

    @property
    def steps(self) -> int:
        """Fewest optimizer steps that a replay takes."""
        probe = 0 if self.block else 2 * PROBE_STEPS[0]
        block = self.block or lengths(1, math.inf)[0]
        return self.warmup + probe + 2 * block * (self.aa_pairs + (self.pairs or MIN_PAIRS))


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


class Round(NamedTuple):
    """What was decided before step `first`: blocks of `block` steps, `drop` of each not counted.

    `orders` has "ab" or "ba" for each pair of blocks; the warm-up is one block of neither.
    """

    kind: str
    first: int
    block: int = 0
    drop: int = 0
    orders: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The step after its last."""
        return self.first + self.block * max(2 * len(self.orders), 1)

    @property
    def sides(self) -> str:
        return "".join(self.orders)

    def tuned(self, step: int) -> bool:
        """Whether one of its steps runs with the table."""
        tells = self.kind in (PROBE, COMPARE)
        return tells and self.sides[(step - self.first) // self.block] == "b"

    @classmethod
    def read(cls, values: Sequence[Any]) -> Round:
        """From the JSON values of one."""
        kind, first, block, drop, orders = values
        return cls(kind, first, block, drop, tuple(orders))


def blocks(rounds: Sequence[Round]) -> list[Block]:
    """The blocks to be compared, in the order of their steps."""
    found: list[Block] = []
    for entry in rounds:
        if entry.kind in (CONTROL, COMPARE):
            for i, side in enumerate(entry.sides):
                first = entry.first + i * entry.block
                pair, last = len(found) // 2, first + entry.block - 1
                control = entry.kind == CONTROL
                found.append(Block(pair, control, side, first, first + entry.drop, last))
    return found


def pairs_of(rounds: Sequence[Round], kind: str) -> int:
    """How many pairs were decided on in rounds of this kind."""
    return sum(len(entry.orders) for entry in rounds if entry.kind == kind)


def beginning(plan: Plan) -> Round:
    """The first round, which every rank knows by itself."""
    return Round(WARMUP, 0, plan.warmup)


def lengths(settle: int, step_us: float) -> tuple[int, int]:
    """Steps in a block, and how many do not count, of steps that settle within `settle`."""
    drop = max(settle, 1)
    block = max(
        SETTLED_BLOCKS * settle,
        drop + MIN_COUNTED,
        math.ceil(BLOCK_S * 1e6 / step_us),
    )
    return block, max(drop, block // DROP_SHARE)
