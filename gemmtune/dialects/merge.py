"""Merging of tuned tables, as the ranks of a job write them: one row per GEMM and workspace. Pure.

The faster of two rows is kept where both have a time (TE's tables have none), else the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gemmtune.dialects import GEMMTUNE, detect, te
from gemmtune.dialects.convert import convert, tuned_of
from gemmtune.dialects.finding import has_errors
from gemmtune.errors import Incompatible, TableError
from gemmtune.machine import HARD
from gemmtune.table import (
    COLUMNS,
    PROVENANCE,
    Fault,
    Tuned,
    line,
    read_provenance,
    scan,
    split_lines,
)


class Merged(NamedTuple):
    """The merged table, and in plain words each conflict and whatever else was decided."""

    text: str
    conflicts: list[str]
    notes: list[str]


class _Entry(NamedTuple):
    source: str  # file:line
    text: str
    key: tuple[object, ...]
    row: Tuned


def merge(tables: Sequence[tuple[str, str]], force: bool = False) -> Merged:
    """Merge tables, given as (name, text), into one in the dialect of the first.

    Raises Incompatible for mixed dialects, GPUs or library builds unless `force`, TableError for a
    text that is no table.
    """
    (first, text), *_ = tables
    dialect = detect(text)
    notes: list[str] = []
    entries: list[_Entry] = []
    comments: dict[str, None] = {}
    for name, text in tables:
        found = detect(text)
        if found is None or dialect is None:
            raise TableError(f"{name}: not a table of a known dialect: gemmtune check {name}")
        if found != dialect:
            if not force:
                raise Incompatible(
                    f"{name} is a {found} table and {first} a {dialect} one: convert it first"
                    f" (gemmtune convert {name} --to {dialect}), or merge with --force"
                )
            converted = convert(text, dialect)
            if has_errors(converted.findings):
                problem = converted.findings[0]
                raise Incompatible(f"{name}:{problem.line}: not as {dialect}: {problem.effect}")
            text = converted.text
        entries += _entries(name, text, dialect)
        for other in split_lines(text):
            if other.startswith("#") and not other.startswith(PROVENANCE):
                comments[other.rstrip() + "\n"] = None
    provenance = _provenance([(n, read_provenance(t)[0]) for n, t in tables], force, notes)
    kept, conflicts = _choose(entries)
    header = ",".join(COLUMNS[Tuned]) if dialect == GEMMTUNE else te.HEADERS[str(dialect)]
    made = PROVENANCE + json.dumps(provenance, sort_keys=True) + "\n" if provenance else ""
    body = "".join(e.text for e in kept)
    return Merged(f"{header}\n{made}{''.join(comments)}{body}", conflicts, notes)


def _entries(name: str, text: str, dialect: str) -> list[_Entry]:
    entries = []
    if dialect == GEMMTUNE:
        for number, row in scan(text, Tuned):
            if isinstance(row, Fault):
                raise TableError(f"{name}:{number}: {row}")
            key = (row.dev_cap, row.gemm)
            entries.append(_Entry(f"{name}:{number}", line(row), key, row))
        return entries
    for number, te_line in enumerate(te.read(text, name).lines, 1):
        if te_line.row is not None:
            row = tuned_of(te_line.row._replace(aux_type="-"))
            body = te_line.text.strip(te.BLANKS) + "\n"
            entries.append(_Entry(f"{name}:{number}", body, te_line.row.key, row))
    return entries


def _choose(entries: Sequence[_Entry]) -> tuple[list[_Entry], list[str]]:
    kept: list[_Entry] = []
    by_key: dict[tuple[object, ...], list[_Entry]] = {}
    conflicts = []
    for new in entries:
        rivals = [e for e in by_key.setdefault(new.key, []) if e.row.overlaps(new.row)]
        faster = bool(rivals) and all(0 < new.row.time_us < e.row.time_us for e in rivals)
        for old in rivals:
            if (conflict := _conflict(old, new, faster)) is not None:
                conflicts.append(conflict)
        if rivals and not faster:
            continue
        for old in rivals:
            by_key[new.key].remove(old)
        if rivals:
            kept[kept.index(rivals[0])] = new
            kept = [e for e in kept if e not in rivals[1:]]
        else:
            kept.append(new)
        by_key[new.key].append(new)
    return kept, conflicts


def _algorithm(row: Tuned) -> tuple[int, str]:
    return row.algo.algo_id, row.algo.config


def _conflict(old: _Entry, new: _Entry, faster: bool) -> str | None:
    winner, loser = (new, old) if faster else (old, new)
    if _algorithm(old.row) == _algorithm(new.row):
        if winner.row.ws_min <= loser.row.ws_min and winner.row.ws_max >= loser.row.ws_max:
            return None
        return (
            f"{old.row.gemm}: other workspace ranges in {old.source} and {new.source}:"
            f" kept {winner.row.ws_min} to {winner.row.ws_max} of {winner.source}"
        )
    if winner.row.time_us and loser.row.time_us:
        why = f"the faster, {winner.row.time_us:.6g} us against {loser.row.time_us:.6g} us"
    else:
        why = "the first, as they do not both have a time"
    return (
        f"{old.row.gemm}: algorithm {old.row.algo.algo_id} in {old.source},"
        f" {new.row.algo.algo_id} in {new.source}: kept {winner.row.algo.algo_id}, {why}"
    )


def _hard(provenance: Mapping[str, Any]) -> dict[str, Any]:
    machine = provenance.get("machine")
    facts = {**provenance, **(machine if isinstance(machine, dict) else {})}
    return {name: facts[name] for name in HARD if name in facts}


def _provenance(
    made: Sequence[tuple[str, dict[str, Any]]], force: bool, notes: list[str]
) -> dict[str, Any]:
    """What holds for all tables at the top; what differs under "merged", table by table."""
    first_name, first = made[0]
    for name, other in made[1:]:
        a, b = _hard(first), _hard(other)
        for fact, called in HARD.items():
            if fact in a and fact in b and a[fact] != b[fact]:
                difference = f"the {called} is {a[fact]} in {first_name} and {b[fact]} in {name}"
                if not force:
                    raise Incompatible(
                        f"{difference}: algorithm numbers hold for one build on one GPU."
                        " Merge tables of one kind, or use --force"
                    )
                notes.append(difference)
            elif (fact in a) != (fact in b) and fact == "library":
                silent = name if fact in a else first_name
                notes.append(f"{silent} does not say which library build it was made with")
    common = _common([p for _, p in made])
    rest = [{"table": n, **_rest(p, common)} for n, p in made]
    return common | {"merged": rest} if any(len(r) > 1 for r in rest) else common


def _common(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of them say, nested dicts (the machine) key by key."""
    common: dict[str, Any] = {}
    for key, value in made[0].items():
        others = [p.get(key) for p in made]
        if all(key in p and p[key] == value for p in made):
            common[key] = value
        elif all(isinstance(o, dict) for o in others) and (part := _common(others)):  # type: ignore[arg-type]
            common[key] = part
    return common


def _rest(made: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for key, value in made.items():
        if key not in common:
            rest[key] = value
        elif value != common[key]:
            rest[key] = _rest(value, common[key])
    return rest
