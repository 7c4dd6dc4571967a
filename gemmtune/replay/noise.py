"""What disturbed a replay: drift, a changed clock, a busy neighbour. Pure.

Found from the step times of both arms alike; the machine's readings (gemmtune.job.readings) say
more where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Sizes from which a disturbance is worth a line; below, pairing takes care of it.
DRIFT = 0.02
JUMP = 0.03
SPIKE = 0.3
SPIKES = 0.01
STEAL = 0.01
OTHERS = 0.1
CLOCK = 0.03

_WINDOW = 6  # blocks on either side of a jump
_FEWEST = 4 * _WINDOW


class Jump(NamedTuple):
    """All blocks from `place` on take `size` more, as a difference of logarithms."""

    place: int
    size: float


class Load(NamedTuple):
    """Shares of a host's processor time during a replay: stolen, and of other processes."""

    steal: float = 0.0
    others: float = 0.0


def level(values: Sequence[float], tuned: Sequence[bool]) -> np.ndarray:
    """Logarithms of block times with the arms' difference taken out, shape (blocks,)."""
    logs: np.ndarray = np.log(np.asarray(values, dtype=float))
    arm = np.asarray(tuned, dtype=bool)
    if arm.any() and not arm.all():
        # That of neighbours, as a difference of the arms' medians would hold drift too.
        switched = arm[1:] != arm[:-1]
        steps = (np.diff(logs) * np.where(arm[1:], 1, -1))[switched]
        logs -= arm * np.median(steps)
    return logs


def jumps(logs: np.ndarray) -> list[Jump]:
    """Lasting changes from one block to the next, largest first, at most eight of them."""
    rest = np.array(logs)
    found: list[Jump] = []
    while len(rest) >= _FEWEST and len(found) < 8:
        windows = np.median(np.lib.stride_tricks.sliding_window_view(rest, _WINDOW), axis=1)
        change = windows[_WINDOW:] - windows[:-_WINDOW]
        change = change - np.median(change)  # a drift's
        noise = 1.4826 * float(np.median(np.abs(change)))
        i = int(np.argmax(np.abs(change)))
        if abs(change[i]) < max(math.log1p(JUMP), 6 * noise):
            break
        found.append(Jump(i + _WINDOW, float(change[i])))
        rest[i + _WINDOW :] -= change[i]
    return found


def drift(logs: np.ndarray) -> float:
    """How much the time rose from the first block to the last, as a difference of logarithms.

    0 where that is within the noise, whose memory from block to block is allowed for.
    """
    n = len(logs)
    if n < _FEWEST:
        return 0.0
    low, high = np.quantile(logs, (0.05, 0.95))
    values = np.clip(logs, low, high)
    places = np.arange(n) - (n - 1) / 2
    slope = float(places @ values / (places @ places))
    rest = values - values.mean() - slope * places
    power = float(rest @ rest)
    memory = float(np.clip(rest[1:] @ rest[:-1] / power, 0, 0.9)) if power > 0 else 0.0
    error = math.sqrt(power / (n - 2) / float(places @ places) * (1 + memory) / (1 - memory))
    total = slope * (n - 1)
    return total if abs(total) > DRIFT and abs(slope) > 4 * error else 0.0


def spikes(blocks: Sequence[Sequence[float]]) -> float:
    """The share of steps that take far longer than the others of their block."""
    over = []
    for steps in blocks:
        times = np.asarray(steps, dtype=float)
        over.append(times / np.median(times) - 1)
    every = np.concatenate(over) if over else np.empty(0)
    if not every.size:
        return 0.0
    spread = 1.4826 * float(np.median(np.abs(every)))
    return float(np.mean(every > max(SPIKE, 6 * spread)))


def load(ranks: Sequence[Mapping[int, Mapping[str, float]]]) -> Load:
    """The load of one host from its ranks' readings by step, first to last that all have."""
    steps = sorted(set.intersection(*(set(r) for r in ranks))) if ranks else []
    if len(steps) < 2:
        return Load()

    def spent(rank: Mapping[int, Mapping[str, float]], name: str) -> float:
        return rank[steps[-1]].get(name, 0.0) - rank[steps[0]].get(name, 0.0)

    if (every := spent(ranks[0], "all_s")) <= 0:
        return Load()
    others = spent(ranks[0], "busy_s") - sum(spent(rank, "cpu_s") for rank in ranks)
    return Load(max(spent(ranks[0], "steal_s") / every, 0.0), max(others / every, 0.0))


def clocks(readings: Mapping[int, Mapping[str, float]], step: int) -> tuple[float, float] | None:
    """The mean clock before and after a step, in MHz, where they differ."""
    known = {at: r["mhz"] for at, r in readings.items() if "mhz" in r}
    before = [mhz for at, mhz in sorted(known.items()) if at <= step][-_WINDOW:]
    after = [mhz for at, mhz in sorted(known.items()) if at > step][:_WINDOW]
    if not before or not after:
        return None
    pair = float(np.median(before)), float(np.median(after))
    return pair if abs(math.log(pair[1] / pair[0])) > CLOCK else None


def describe(
    firsts: Sequence[int],
    values: Sequence[float],
    tuned: Sequence[bool],
    steps: Sequence[Sequence[float]],
    hosts: Mapping[str, Sequence[Mapping[int, Mapping[str, float]]]],
) -> list[str]:
    """A line with a remedy for each disturbance.

    Of each block: its first step, its value, its arm, its counted steps' times. `hosts` has the
    readings of each host's ranks, by step.
    """
    lines = []
    logs = level(values, tuned)
    rest = np.array(logs)
    found = jumps(logs)
    for jump in found:
        rest[jump.place :] -= jump.size
    if found:
        largest, step = found[0], firsts[found[0].place]
        times = f"{len(found)} times, most" if len(found) > 1 else "once,"
        seen = [pair for ranks in hosts.values() for r in ranks if (pair := clocks(r, step))]
        cause = f" as the clock went from {seen[0][0]:.0f} to {seen[0][1]:.0f} MHz" if seen else ""
        lines.append(
            f"the step time changed for good {times} by {_percent(largest.size)} at step {step},"
            f" for both arms alike{cause} (a changed clock, throttling, or another job that came"
            f" or went): the pairs of that moment are trimmed; cool or limit the machine, fix its"
            f" clock, or replay when it is idle"
        )
    if rise := drift(rest):
        way = "rose" if rise > 0 else "fell"
        lines.append(
            f"the step time {way} by {100 * abs(math.expm1(rise)):.1f} % over the replay (drift):"
            f" pairs of neighbouring blocks cancel most of it; let the job come to its steady state"
            f" first, as with --warmup {max(2 * firsts[0], 50)}"
        )
    loads = {host: load(ranks) for host, ranks in hosts.items()}
    stolen = {host: seen.steal for host, seen in loads.items() if seen.steal > STEAL}
    for host, share in sorted(stolen.items()):
        lines.append(
            f"other virtual machines took {100 * share:.0f} % of the processor time of {host}: its"
            f" step times are theirs too; replay on a machine of your own, or at a quieter hour"
        )
    share = spikes(steps)
    if share > SPIKES:
        busy = [f"{100 * x.others:.0f} % of {h}" for h, x in loads.items() if x.others > OTHERS]
        cause = f" (processes other than the ranks took {', '.join(busy)})" if busy else ""
        lines.append(
            f"{100 * share:.0f} % of the steps took more than {1 + SPIKE:g} times as long as those"
            f" beside them{cause}: a noisy neighbour, or steps of the job that differ (evaluation,"
            f" checkpoints, data); stop other work, or raise --max-pairs"
        )
    return lines


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.1f} %"
