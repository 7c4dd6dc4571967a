"""What stands behind the fake Transformer Engine: a hipBLASLt of made-up algorithms, from a script.

FAKE_TE names a JSON object: `build` (algorithm ids hold for one build), `dev_caps`, `dialect`
(te-v1, te-v2, te-v3), `direct` (ids are taken directly, as since ROCm/TransformerEngine PR 310),
`te` (1 or 2), `stack` (what te-v2 finds uninitialised as the scale mode of a GEMM without FP8),
`count` (algorithms of a GEMM), `us` (what the default takes) and `plant`: algorithms that are out
of the ordinary, {"m":, "n":, "k": (each optional), "rank":, "speed": time over the default's,
"ws": bytes needed, "kind": "nan" | "accumulate" | "wrong"}. An accumulate algorithm has its speed
with beta alone, and is three times slower than the default without.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from typing import Any, NamedTuple

DEFAULTS = {
    "build": "100200-abcdef",
    "dev_caps": [904],
    "dialect": "te-v2",
    "direct": False,
    "te": 2,
    "stack": 0,
    "count": 12,
    "us": 200.0,
    "plant": [],
}


def script() -> dict[str, Any]:
    path = os.environ.get("FAKE_TE")
    if not path:
        return dict(DEFAULTS)
    with open(path) as f:
        return {**DEFAULTS, **json.load(f)}


class Algo(NamedTuple):
    id: int
    rank: int  # among all; what a workspace admits is ranked anew
    ws: int
    us: float
    kind: str = ""

    def takes_us(self, beta: float, default_us: float) -> float:
        return 3 * default_us if self.kind == "accumulate" and not beta else self.us


class Library:
    """The algorithms of a problem, in the order of the heuristic."""

    def __init__(self, made: dict[str, Any]) -> None:
        self.made = made
        self.queries = 0

    def all(self, problem: tuple[Any, ...]) -> list[Algo]:
        """Beta is part of the problem to the real one too, but only through the time it takes."""
        m, n, k = problem[:3]
        algos = []
        for rank in range(self.made["count"]):
            number = zlib.crc32(f"{self.made['build']} {problem} {rank}".encode())
            speed = 1.0 + 0.15 * (rank > 0) + 0.02 * rank
            algo = Algo(number, rank, (rank % 3) * 4096, speed * self.made["us"])
            for plant in self.made["plant"]:
                sizes = {"m": m, "n": n, "k": k}
                if plant["rank"] == rank and all(plant.get(x, v) == v for x, v in sizes.items()):
                    algo = algo._replace(
                        ws=plant.get("ws", algo.ws),
                        us=plant.get("speed", speed) * self.made["us"],
                        kind=plant.get("kind", ""),
                    )
            algos.append(algo)
        return algos

    def heuristic(self, problem: tuple[Any, ...], ws: int, wanted: int) -> list[Algo]:
        """The first `wanted` that the workspace admits."""
        self.queries += 1
        return [algo for algo in self.all(problem) if algo.ws <= ws][:wanted]

    def by_id(self, problem: tuple[Any, ...], number: int) -> Algo | None:
        """What hipblaslt_ext::getAlgosFromIndex finds, if it can run the problem."""
        return next((a for a in self.all(problem) if a.id == number & 0xFFFFFFFF), None)


def spin(us: float) -> None:
    """A launch takes its time: the CPU is the device here, and launches are synchronous."""
    end = time.perf_counter_ns() + us * 1e3
    while time.perf_counter_ns() < end:
        pass
