"""The protocol of a replay: which steps run which arm, decided as the step times come in. Pure.

A replay is a list of rounds, each decided when the one before has ended: warm-up, a probe of how
long the step takes to settle after a switch, control pairs (default against default), pairs of
default against table, more of these until the interval is narrow enough, end. `following` decides
from nothing but the user's numbers, the rounds so far and the step times, so that one process can
decide for all ranks, a log can be read again, and a simulated clock can stand in for a job.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmtune.errors import UsageError
from gemmtune.stats import bootstrap_interval, trimmed

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
# Departures from the settled time that are small enough, as a share of it.
SETTLED = 0.001


class Plan(NamedTuple):
    """What the user asked for, in optimizer steps and pairs of blocks; None: to be measured.

    `warmup` steps run first, at the default. `precision` is the half-width of the 95 % interval to
    come to, in percent; `max_pairs` ends the search for it.
    """

    seed: int = 0
    warmup: int = 3
    block: int | None = None
    pairs: int | None = None
    aa_pairs: int = MIN_PAIRS
    precision: float = 0.3
    max_pairs: int = 200

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
        block = self.block or _block(1, math.inf)[0]
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


def ratios(rounds: Sequence[Round], us: np.ndarray, kind: str) -> np.ndarray:
    """The ratio side a / side b of each whole pair in rounds of this kind.

    `us` has the time of each step by its index, nan where there is none (shape (steps,)).
    """
    found = [np.empty(0)]
    for entry in rounds:
        if entry.kind == kind and entry.orders:
            times = np.full(entry.end - entry.first, np.nan)
            part = us[entry.first : entry.end]
            times[: len(part)] = part
            counted = times.reshape(-1, 2, entry.block)[:, :, entry.drop :]
            values = trimmed(counted)[0]
            forth = values[:, 0] / values[:, 1]
            turned = np.array([order == "ba" for order in entry.orders])
            found.append(np.where(turned, 1 / forth, forth))
    every = np.concatenate(found)
    return every[np.isfinite(every)]


def beginning(plan: Plan) -> Round:
    """The first round, which every rank knows by itself."""
    return Round(WARMUP, 0, plan.warmup)


def following(plan: Plan, rounds: Sequence[Round], us: np.ndarray) -> Round:
    """The round after `rounds`, all of which have run; `us` as in `ratios`.

    When to stop depends on the interval's width alone, never on what it shows.
    """
    last = rounds[-1]
    if last.kind == WARMUP and plan.block is None:
        known = us[np.isfinite(us)]
        steps = PROBE_S * 1e6 / known.min() if known.size else 0
        return Round(PROBE, last.end, int(np.clip(steps, *PROBE_STEPS)), 0, ("ba",))
    if last.kind in (WARMUP, PROBE):
        block, drop = _lengths(plan, last, us)
        if plan.aa_pairs:
            return _round(plan, rounds, CONTROL, plan.aa_pairs, block, drop)
        return _round(plan, rounds, COMPARE, plan.pairs or MIN_PAIRS, block, drop)
    more = _more_pairs(plan, rounds, us)
    if more < 1:
        return Round(END, last.end)
    return _round(plan, rounds, COMPARE, more, last.block, last.drop)


def _lengths(plan: Plan, last: Round, us: np.ndarray) -> tuple[int, int]:
    """Steps in a block, and how many of them do not count."""
    if plan.block is not None:
        return plan.block, max(plan.block // DROP_SHARE, 1)
    stretches = us[last.first : last.end].reshape(2, last.block)
    return _block(max(settling(s) for s in stretches), float(np.nanmedian(us[: last.end])))


def _block(settle: int, step_us: float) -> tuple[int, int]:
    """Steps in a block, and how many do not count, of steps that settle within `settle`."""
    drop = max(settle, 1)
    block = max(
        SETTLED_BLOCKS * settle,
        drop + MIN_COUNTED,
        math.ceil(BLOCK_S * 1e6 / step_us),
    )
    return block, max(drop, block // DROP_SHARE)


def settling(stretch: np.ndarray) -> int:
    """How many steps after a switch until step times are within the noise of the stretch's end.

    At most half the stretch (shape (steps,), microseconds). Windows grow with their distance from
    the switch: what settles slowly is seen by averaging over longer.
    """
    half = len(stretch) // 2
    tail = stretch[half:]
    centre = float(np.nanmedian(tail))
    spread = 1.4826 * float(np.nanmedian(np.abs(tail - centre)))
    start = 0
    while start < half:
        width = max(start // 2, 3)
        # Three standard errors of a median of steps that go their own way for two or three.
        bound = SETTLED * centre + 3 * 2 * spread / math.sqrt(width)
        if abs(float(np.nanmedian(stretch[start : start + width])) - centre) <= bound:
            return start
        start = start + 1 if start < 4 else math.ceil(1.4 * start)
    return half


def _more_pairs(plan: Plan, rounds: Sequence[Round], us: np.ndarray) -> int:
    """How many more pairs of default against table to run; 0 ends the replay."""
    done = pairs_of(rounds, COMPARE)
    if plan.pairs is not None:
        return plan.pairs - done
    if not done:
        control = np.log(ratios(rounds, us, CONTROL))
        if len(control) < 2:
            return MIN_PAIRS
        unit = float(trimmed(control)[1]) * math.sqrt(len(control))
        needed = (2 * unit / (plan.precision / 100)) ** 2
        return math.ceil(min(max(needed, MIN_PAIRS), plan.max_pairs))
    width = 100 * bootstrap_interval(ratios(rounds, us, COMPARE)).precision
    if width <= plan.precision:
        return 0
    needed = done * (width / plan.precision) ** 2 - done
    few = max(done / 4, MIN_PAIRS / 2)  # seldom looks: each may stop at a width too narrow
    return min(math.ceil(max(needed, few)), plan.max_pairs - done)


def _round(
    plan: Plan, rounds: Sequence[Round], kind: str, pairs: int, block: int, drop: int
) -> Round:
    orders = _balanced(pairs, random.Random(f"{plan.seed} {len(rounds)}"))
    return Round(kind, rounds[-1].end, block, drop, orders)


def _balanced(pairs: int, random_: random.Random) -> tuple[str, ...]:
    """One order, "ab" or "ba", a pair: each equally often (but for one), shuffled."""
    sides = ["ab", "ba"]
    random_.shuffle(sides)
    chosen = [sides[i % 2] for i in range(pairs)]
    random_.shuffle(chosen)
    return tuple(chosen)
