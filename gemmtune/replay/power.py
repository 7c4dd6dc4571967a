"""What the GPUs drew in each arm of a replay, from the readings at the ends of blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from gemmtune import regime

# A block shorter than this says nothing: NVML's power is a mean over a second, its energy moves in
# ticks of a tenth of one.
LEAST_S = 1.0
ENERGY_S = 10.0  # of an arm's blocks together, from which its energy is told


class Drawn(NamedTuple):
    """One arm: medians over blocks and GPUs, the energy of a step of one GPU; 0 where unknown."""

    power_w: float
    sm_mhz: float
    energy_j: float
    regime: str  # of gemmtune.regime


class Spell(NamedTuple):
    """A block of one rank: its readings (job.readings) at both ends, its step's time."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    step_us: float

    @property
    def seconds(self) -> float:
        return self.after.get("gpu_s", 0.0) - self.before.get("gpu_s", self.after.get("gpu_s", 0.0))

    @property
    def energy_j(self) -> float:
        """Of one step."""
        joules = self.after["energy_j"] - self.before["energy_j"]
        return max(joules, 0.0) / self.seconds * self.step_us / 1e6


def drawn(spells: Sequence[Spell]) -> Drawn | None:
    """What the GPUs drew in the blocks of one arm; None where no block is long enough to tell."""
    known = [spell for spell in spells if spell.seconds >= LEAST_S]
    if not known:
        return None

    def middle(name: str) -> float:
        return median(spell.after[name] for spell in known)

    spent_s = sum(spell.seconds for spell in known)
    return Drawn(
        power_w=middle("power_w"),
        sm_mhz=middle("sm_mhz"),
        energy_j=fmean(spell.energy_j for spell in known) if spent_s >= ENERGY_S else 0.0,
        regime=regime.judge(middle("power_w"), middle("power_cap_w"), middle("capped"), spent_s),
    )


def words(arm: Drawn) -> str:
    """As in: 684 W, SM clock 1,412 MHz, 105.2 J a step; without what the driver does not tell."""
    energy = f", {arm.energy_j:.1f} J a step" if arm.energy_j else ""
    power = f"{arm.power_w:.0f} W" if arm.power_w else "power not told"
    return f"{power}, SM clock {arm.sm_mhz:,.0f} MHz{energy}"
