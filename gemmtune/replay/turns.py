"""Two jobs by turns: their commands, and the order of their processes. Pure, needs no numpy."""

from __future__ import annotations

import random
import re
import shlex
from typing import NamedTuple

from gemmtune.errors import UsageError

ARMS = ("a", "b")

_SHELL = ("&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1")


class Command(NamedTuple):
    """An arm as it was typed: variables to set, and the words of the job."""

    text: str
    env: dict[str, str]
    words: list[str]


class Plan(NamedTuple):
    """Pairs of processes, and the steps of each: `warmup` not counted, then `steps` counted."""

    runs: int = 5
    warmup: int = 3
    steps: int = 20
    seed: int = 0

    def check(self) -> None:
        """Raise UsageError where no comparison can follow from these numbers."""
        for name, least in (("runs", 2), ("warmup", 1), ("steps", 1)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"--{name} {value} is too few: give {least} or more")

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps


class Run(NamedTuple):
    """One process: its pair, from 0, and its arm."""

    pair: int
    arm: str

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.pair + 1}"


def parse_command(option: str, text: str) -> Command:
    """VAR=value words, then the job's, read as a shell would without running one.

    Raises UsageError, in the name of the option.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}: check its quotes") from None
    env: dict[str, str] = {}
    while words and (found := re.match(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        env[found[1]] = found[2]
        del words[0]
    if not words:
        raise UsageError(f'{option} {text!r} names no job: as in: {option} "python train.py"')
    if operators := [word for word in words if word in _SHELL]:
        raise UsageError(
            f"{option}: {operators[0]} is for a shell: write {option} \"sh -c '…'\", or a script"
        )
    return Command(text, env, words)


def schedule(plan: Plan) -> list[Run]:
    """All processes in order: pair by pair, a first in one of each two pairs, at random.

    More pairs leave the order of the first ones as it was.
    """
    rng = random.Random(plan.seed)
    orders = [ARMS, ARMS[::-1]]
    runs: list[Run] = []
    for pair in range(plan.runs):
        if pair % 2 == 0:
            rng.shuffle(orders)
        runs += [Run(pair, arm) for arm in orders[pair % 2]]
    return runs
