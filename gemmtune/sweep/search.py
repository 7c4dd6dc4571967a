"""The search: which algorithm of a Gemm to take. Pure: a generator of questions to a device."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from gemmtune.gemm import Gemm
from gemmtune.stats import Interval

CHECK, WHOLE, TIME = "check", "whole", "time"


class Task(NamedTuple):
    """What is asked for one Gemm."""

    gemm: Gemm
    seconds: float  # of timing
    sustained: bool  # whether it matters enough to be confirmed alone, at its own clocks
    min_gain: float
    seed: int


class Ask(NamedTuple):
    """One question to the device about one algorithm.

    CHECK: quick verification and two launches at first sight, `us` is the better of the two.
    WHOLE: a finalist's full verification. TIME: the time of a sample.
    """

    kind: str
    algo: int  # index in the backend's list for this Gemm; 0 is the default
    launches: int = 0  # TIME: back-to-back launches in the sample
    settle: int = 0  # TIME: launches right before it that are not counted


class Answer(NamedTuple):
    us: float = 0.0  # mean microseconds per launch; 0 where there is none
    reason: str = ""  # why this algorithm is out of the race; "" if it is fine


class Verdict(NamedTuple):
    """What became of one algorithm. `ratio`: default time / its (above 1: faster)."""

    status: str  # default | winner | finalist | dropped | failed
    reason: str = ""
    time_us: float = 0.0
    ratio: Interval = Interval(0.0, 0.0, 0.0)  # noqa: RUF009  (immutable)
    samples: int = 0
    regime: str = ""  # screen | sustained


def search(count: int, task: Task) -> Generator[list[Ask], list[Answer], list[Verdict]]:
    """The verdicts of `count` algorithms, the default's first. Raises BackendError: no default."""
    raise NotImplementedError
    yield []
