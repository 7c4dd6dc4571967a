"""What a sweep came to: the rows of both tables and a summary, made from a journal's records alone.

A recorded Gemm is put through the search again, with the answers that the journal holds. The
verdicts are those of the task as it was recorded; only the last choice, which of the finalists
takes the default's place, is made with the least gain asked for now. So a least gain above the
recorded one is exact; under one below it, what the recorded one had kept out of the last comparison
stays out (`--fresh` asks anew).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gemmtune import table
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm
from gemmtune.stats import Interval
from gemmtune.sweep.journal import Record
from gemmtune.sweep.search import Answer, Ask, Task, Verdict, choose, search
from gemmtune.table import Candidate, Tuned

UNLISTED = (
    "beyond the library's list: only a Transformer Engine that takes ids directly could use it, "
    "for which --te-direct puts it into the tuned table"
)
# Stands in the row of a Gemm of which nothing could be measured.
NO_ALGO = Algo(0, 0, "-")


class Line(NamedTuple):
    """What became of one Gemm. `algo` is None where the default stays."""

    gemm: Gemm
    calls: float
    share: float
    default_us: float
    algo: Algo | None
    gain: Interval | None  # ratio of the default's time to the chosen one's
    reason: str = ""  # why it has no times

    @property
    def saved_us(self) -> float:
        """Per optimizer step."""
        return self.calls * self.default_us * (1 - 1 / self.gain.ratio) if self.gain else 0.0


class Summary(NamedTuple):
    """What a sweep came to. Times are of GEMMs per optimizer step on one rank, as swept."""

    lines: list[Line]  # swept Gemms, the largest share first
    unsupported: dict[Gemm, str]
    beyond: dict[Gemm, float]  # Gemms beyond `top`, with their shares
    unswept: dict[Gemm, float]  # Gemms for which the budget did not suffice, with their shares
    resumed: int  # Gemms that the journal held already
    seconds: float  # that the sweep took, all sessions added up
    candidates: str
    tuned: str
    journal: str
    provenance: dict[str, Any]

    @property
    def before_us(self) -> float:
        return sum(line.calls * line.default_us for line in self.lines)

    @property
    def after_us(self) -> float:
        return self.before_us - sum(line.saved_us for line in self.lines)

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line.reason]


class Diverged(Exception):
    """The search asks otherwise than was recorded: by another version, or with another seed."""


class Unfinished(Exception):
    """The recorded answers do not reach to the verdicts."""


def conduct(
    task: Task,
    configs: Sequence[str],
    recorded: Iterable[tuple[Ask, Answer]],
    answer: Callable[[int, Sequence[Ask]], list[Answer]],
) -> list[Verdict]:
    """Put the algorithms of a Gemm, by their spellings, through the search.

    Answers come first from `recorded`, then from `answer`.

    `answer` gets the number of its first question, counted over the Gemm. Raises Diverged;
    BackendError where the default fails; whatever `answer` raises.
    """
    held = deque(recorded)
    number = 0
    questions = search(len(configs), task, configs)
    given: list[Answer] | None = None
    while True:
        try:
            asks = next(questions) if given is None else questions.send(given)
        except StopIteration as stop:
            if held:
                raise Diverged from None
            verdicts: list[Verdict] = stop.value
            return verdicts
        given = []
        while held and len(given) < len(asks):
            asked, known = held.popleft()
            if asked != asks[len(given)]:
                raise Diverged
            given.append(known)
        if len(given) < len(asks):
            given += answer(number + len(given), asks[len(given) :])
        number += len(asks)


def rows_of(record: Record, min_gain: float, te_direct: bool = False) -> list[Candidate]:
    """The rows of a recorded Gemm, the default's first. Raises Unfinished or Diverged."""

    def missing(number: int, asks: Sequence[Ask]) -> list[Answer]:
        raise Unfinished

    if record.failed:
        return failed_rows(record.task.gemm, record.failed)
    if not record.choices:  # a kill came before the reason why there are none
        raise Unfinished
    try:
        configs = [choice.algo.config for choice in record.choices]
        verdicts = conduct(record.task, configs, record.answered, missing)
    except BackendError as e:
        return failed_rows(record.task.gemm, str(e))
    return candidate_rows(record, verdicts, min_gain, te_direct)


def failed_rows(gemm: Gemm, reason: str) -> list[Candidate]:
    """The one row of a Gemm of which nothing can be measured."""
    return [Candidate(gemm, NO_ALGO, "failed", reason)]


def candidate_rows(
    record: Record, verdicts: Sequence[Verdict], min_gain: float, te_direct: bool = False
) -> list[Candidate]:
    """A row for each algorithm tried, in the backend's order; `min_gain` chooses the winner.

    What is unlisted wins with `te_direct` alone.
    """
    last = {i: v.ratio for i, v in enumerate(verdicts) if v.status in ("finalist", "winner")}
    barred = {i for i in last if record.choices[i].unlisted and not te_direct}
    won = choose({i: ratio for i, ratio in last.items() if i not in barred}, min_gain)
    rows = []
    for index, (choice, v) in enumerate(zip(record.choices, verdicts, strict=True)):
        if v.status == "untried":
            continue
        status = ("winner" if index == won else "finalist") if index in last else v.status
        # 0: not known
        bounds = (v.ratio.low, v.ratio.high) if math.isfinite(v.ratio.high) else (0.0, 0.0)
        reason = UNLISTED if index in barred else v.reason
        rows.append(
            Candidate(
                *(record.task.gemm, choice.algo, status, reason, v.time_us),
                *(v.ratio.ratio, *bounds, v.samples, v.regime),
            )
        )
    return rows


def winner(rows: Iterable[Candidate]) -> Candidate | None:
    """The row that takes the default's place; None where it stays."""
    return next((row for row in rows if row.status == "winner"), None)


def line_of(gemm: Gemm, calls: float, share: float, rows: Sequence[Candidate]) -> Line:
    default = next((row for row in rows if row.status == "default"), None)
    if default is None:
        return Line(gemm, calls, share, 0.0, None, None, rows[-1].reason)
    won = winner(rows)
    if won is None:
        return Line(gemm, calls, share, default.time_us, None, None)
    gain = Interval(won.ratio, won.ratio_low, won.ratio_high)
    return Line(gemm, calls, share, default.time_us, won.algo, gain)


def tuned_row(record: Record, rows: Sequence[Candidate], dev_cap: int) -> Tuned | None:
    """The row for the job, None where the default stays."""
    won = winner(rows)
    if won is None:
        return None
    default = next(row for row in rows if row.status == "default")
    needs = next(choice.ws_bytes for choice in record.choices if choice.algo == won.algo)
    return Tuned(
        *(dev_cap, won.gemm, needs, table.WS_MAX, won.algo),
        *(won.time_us, default.time_us, won.ratio_low, won.ratio_high),
    )
