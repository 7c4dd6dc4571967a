"""How a job uses its GPU: power and clocks while capture recorded, and the kernels of a step. Pure.

What a rank saw becomes JSON values for its rank file (`power`, `summarise`); `merge_power` and
`merge_steps` join those of all ranks into what the provenance says under "gpu" and "profile".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from gemmtune import nvml, regime
from gemmtune.table import format_ranks

OTHERS = 5  # largest kernels that are named beside the GEMMs
NAME = 200  # characters of a kernel's name that are kept

# Kernels of cuBLAS and cuBLASLt (nvjet_…, sm90_xmma_gemm_…, cutlass_80_tensorop_…gemm_…,
# ampere_…gemm_…, gemv, the sums after split-K) and of hipBLASLt and rocBLAS (Cijk_…). Attention
# and convolutions are built of the same parts, and are none.
_GEMM = re.compile(r"nvjet_|gemm|gemv|Cijk_|cublas|splitKreduce", re.IGNORECASE)
_NO_GEMM = re.compile(r"flash|fmha|attention|sdpa|implicit|igemm|conv[o_]|fprop|dgrad|wgrad", re.I)

Fields = Mapping[str, Callable[[nvml.Reading], float]]
_METERED: Fields = {
    "power_w": lambda r: r.power_w,
    "sm_mhz": lambda r: r.sm_mhz,
    "mem_mhz": lambda r: r.mem_mhz,
    "temperature_c": lambda r: r.temperature_c,
    "busy_percent": lambda r: r.busy_percent,
}


def is_gemm(kernel: str) -> bool:
    """Whether a GPU kernel of that name is a GEMM of a vendor's library."""
    return bool(_GEMM.search(kernel)) and not _NO_GEMM.search(kernel)


def power(taken: Sequence[tuple[float, nvml.Reading]]) -> dict[str, Any]:
    """What a meter's readings say, as JSON values: median, lowest and highest of each; {} of none.

    Beside them the cap, the highest clock, the share of readings with each throttle reason, and the
    seconds that they span.
    """
    read = [reading for _, reading in taken if reading.power_w or reading.sm_mhz]
    if not read:
        return {}
    found: dict[str, Any] = {"seconds": round(taken[-1][0] - taken[0][0], 3)}
    for name, field in _METERED.items():
        values = [field(reading) for reading in read]
        found[name] = [median(values), min(values), max(values)]
    found["power_cap_w"] = read[-1].power_cap_w
    found["max_sm_mhz"] = read[-1].max_sm_mhz
    found["capped"] = sum(reading.capped for reading in read) / len(read)
    reasons = [reason for reading in read for reason in reading.throttled]
    found["throttled"] = {r: round(reasons.count(r) / len(read), 3) for r in dict.fromkeys(reasons)}
    return found


def merge_power(ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Join what `power` gave on each rank, and judge the regime; {} where no rank has any.

    Of medians the median over ranks, of the rest the extremes. The regime is that of most ranks;
    `ranks_at_cap` names those at their cap where it is not all or none.
    """
    known = {rank: found for rank, found in ranks.items() if found}
    if not known:
        return {}
    every = list(known.values())
    joined: dict[str, Any] = {"seconds": min(one["seconds"] for one in every)}
    for name in _METERED:
        middles, lows, highs = zip(*(one[name] for one in every), strict=True)
        joined[name] = [median(middles), min(lows), max(highs)]
    for name in ("power_cap_w", "max_sm_mhz"):
        joined[name] = median(one[name] for one in every)
    joined["throttled"] = {
        reason: round(sum(one["throttled"].get(reason, 0.0) for one in every) / len(every), 3)
        for reason in sorted({reason for one in every for reason in one["throttled"]})
    }
    regimes = {rank: _regime(one) for rank, one in known.items()}
    joined["regime"] = max(dict.fromkeys(regimes.values()), key=list(regimes.values()).count)
    at_cap = [rank for rank, one in regimes.items() if one == regime.AT_CAP]
    if 0 < len(at_cap) < len(known):
        joined["ranks_at_cap"] = format_ranks(at_cap)
    return joined


def _regime(found: Mapping[str, Any]) -> str:
    return regime.judge(
        found["power_w"][0], found["power_cap_w"], found["capped"], found["seconds"]
    )


def merge_steps(found: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The profiled step of the rank on which it was shortest; {} where there is none.

    Profilers do not start at the same moment, and the ranks whose did wait for the others, in
    collective operations that are not so long otherwise.
    """
    known = [step for step in found if step]
    return dict(min(known, key=lambda step: step["step_us"])) if known else {}


def summarise(
    times: Iterable[tuple[str, float]],
    busy_us: float,
    step_us: float,
    gemm: Callable[[str], bool],
) -> dict[str, Any]:
    """What a step was spent on, as JSON values, from the name and time of each kernel.

    step_us, busy_us (in any kernel), gemm_us; others: name, time and calls of the largest kernels
    that are no GEMMs. Kernels that run beside each other can add up to more than the step.
    """
    totals: dict[str, tuple[float, int]] = {}
    for name, us in times:
        before, calls = totals.get(name, (0.0, 0))
        totals[name] = before + us, calls + 1
    others = sorted((t for t in totals.items() if not gemm(t[0])), key=lambda t: -t[1][0])
    return {
        "step_us": round(step_us, 1),
        "busy_us": round(min(busy_us, step_us), 1),
        "gemm_us": round(sum(us for name, (us, _) in totals.items() if gemm(name)), 1),
        "others": [
            [name.removeprefix("void ")[:NAME], round(us, 1), calls]
            for name, (us, calls) in others[:OTHERS]
            if us
        ],
    }


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Time in which at least one of the spans (start, end) runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
