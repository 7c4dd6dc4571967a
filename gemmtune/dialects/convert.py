"""Conversion between the dialects: Transformer Engine's, our own tuned.csv, hipBLASLt's tuning file
and PyTorch's TunableOp results. Pure.

TE's key is coarser than ours: it has no beta, batch, alignment or fast accumulation, and its
bias_type is `-` for every GEMM without FP8, even with a bias, and the bias tensor's type for FP8,
float32 where there is none. The other two have no workspace either. Rows that fall together in a
dialect's key become one; what a dialect would say wrongly is refused. Lines that are no rows
(comments, provenance) are carried over between TE's dialects and ours; the other two have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gemmtune.dialects import (
    GEMMTUNE,
    OVERRIDE,
    TUNABLEOP,
    detect,
    hipblaslt,
    override,
    te,
    tunableop,
)
from gemmtune.dialects.finding import ERROR, WARNING, Finding
from gemmtune.errors import Incompatible, TableError, UsageError
from gemmtune.gemm import UNBIASED, Algo, Gemm
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

_LT = "lt"  # the api of every GEMM that TE tunes


class Converted(NamedTuple):
    """A table in another dialect, and what had to be left out (errors) or merged (warnings)."""

    text: str
    findings: list[Finding]


class _Entry(NamedTuple):
    key: tuple[object, ...]  # what the dialect looks it up by
    text: str
    row: Tuned


def source_of(text: str) -> str | None:
    """The dialect of a text that can be converted; None where it is none."""
    if found := detect(text):
        return found
    if override.detect(text):
        return OVERRIDE
    return TUNABLEOP if tunableop.detect(text) else None


def convert(
    text: str,
    to: str,
    calls: Mapping[Gemm, float] | None = None,
    like: str = "",
    gpu: int | None = None,
) -> Converted:
    """A table in the dialect `to`; rows that it cannot express are left out, with the reason.

    `calls` (launches per step, by Gemm) weighs rows that fall together in a key; without it all
    weigh the same. `like` is the text of the user's own file of the dialect `to`: the build that
    override and tunableop must name. `gpu` is the dev_cap of rows that name none. Raises TableError
    where the text is no table of a known dialect, UsageError where the build is not known,
    Incompatible where it is another.
    """
    source = source_of(text)
    if source is None:
        raise TableError("not a table of a known dialect: gemmtune check says why")
    if source == to:
        return Converted(text, [])
    if source in te.COLUMNS and to in (*te.COLUMNS, GEMMTUNE):
        return _of_te(text, source, to)
    rows = list(_rows(text, source, gpu))
    entries: dict[int, _Entry] = {}
    findings: list[Finding] = []
    fp8_bias = te_made(_provenance(text, source)).get("fp8_bias", "float32")
    by_layout = to == TUNABLEOP and tunableop.named_by_layout(like)
    for number, row in rows:
        try:
            if isinstance(row, str):
                raise ValueError(row)
            entries[number] = _entry(row, to, by_layout, fp8_bias)
        except ValueError as e:
            findings.append(_refusal(number, str(e)))
    merged = _merge_keys(entries, calls or {}, ranged=to in (*te.COLUMNS, GEMMTUNE))
    for number, kept in merged.items():
        if entries[number].row.algo.algo_id != entries[kept].row.algo.algo_id:
            whose = {OVERRIDE: "hipBLASLt", TUNABLEOP: "TunableOp"}.get(to, "TE")
            effect = f"the same GEMM to {whose} as line {kept}, which carries more time and is kept"
            mend = f"Nothing: {whose} cannot tell them apart"
            findings.append(Finding(number, "", "", WARNING, effect, mend))
    kept_text = {n: "" if n in merged else entries[n].text for n in entries}
    made = _provenance(text, source)
    if to in (OVERRIDE, TUNABLEOP):
        caps = {entry.row.dev_cap for entry in entries.values()}
        head = _head(to, like, made, caps)
        body = "".join(kept_text.values())
    elif source == GEMMTUNE:
        head, body = te.HEADERS[to] + "\n", _with_comments(text, {n for n, _ in rows}, kept_text)
    else:
        head = (",".join(COLUMNS[Tuned]) if to == GEMMTUNE else te.HEADERS[to]) + "\n"
        head += PROVENANCE + json.dumps(made, sort_keys=True) + "\n" if made else ""
        body = "".join(kept_text.values())
    return Converted(head + body, sorted(findings, key=lambda f: f.line))


def _rows(text: str, source: str, gpu: int | None) -> Iterator[tuple[int, Tuned | str]]:
    """The rows of a table with their line numbers, or why one cannot be converted."""
    if source == OVERRIDE:
        yield from override.read(text, gpu)
    elif source == TUNABLEOP:
        yield from tunableop.read(text, gpu)
    elif source == GEMMTUNE:
        for number, row in scan(text, Tuned):
            if isinstance(row, Fault):
                raise TableError(f"line {number}: {row}")
            yield number, row
    else:
        for number, te_line in enumerate(te.read(text).lines, 1):
            if te_line.row is not None:
                try:
                    yield number, tuned_of(te_line.row)
                except ValueError as e:
                    yield number, str(e)


def _entry(row: Tuned, to: str, by_layout: bool, fp8_bias: str) -> _Entry:
    """Raises ValueError where the dialect cannot say the row."""
    if to == OVERRIDE:
        return _Entry(override.key(row), override.render(row), row)
    if to == TUNABLEOP:
        return _Entry(tunableop.key(row), tunableop.render(row, by_layout), row)
    if to == GEMMTUNE:
        return _Entry((row.dev_cap, row.gemm), line(row), row)
    te_row = te_of(row, fp8_bias)
    return _Entry(te_row.key, te.line_of(te_row, to).text, row)


def _provenance(text: str, source: str) -> dict[str, Any]:
    """What a table says of its making; of the other two dialects, the library's build."""
    if source == OVERRIDE:
        revision = override.git_version(text)
        return {"hipblaslt_revision": revision} if revision else {}
    if source == TUNABLEOP:
        version = tunableop.validators(text).get("HIPBLASLT_VERSION", "")
        return {"machine": {"library": f"hipBLASLt {_dotted(version)}"}} if version else {}
    return read_provenance(text)[0]


def _dotted(version: str) -> str:
    """The library's version as the library's own number has it: 100001-abc is 1.0.1-abc."""
    number, dash, revision = version.partition("-")
    if number.isdecimal() and len(number) < 10:
        major, rest = divmod(int(number), 100_000)
        number = f"{major}.{rest // 100}.{rest % 100}"
    return number + dash + revision


def _head(to: str, like: str, made: Mapping[str, Any], caps: set[int]) -> str:
    machine = made.get("machine")
    library = str(machine.get("library", "")) if isinstance(machine, dict) else ""
    revision = hipblaslt.revision(library) if library.startswith("hipBLASLt") else ""
    revision = revision or str(made.get("hipblaslt_revision", ""))
    if to == TUNABLEOP:
        return tunableop.head(like, revision, caps)
    theirs = override.git_version(like) or hipblaslt.revision(
        tunableop.validators(like).get("HIPBLASLT_VERSION", "")
    )
    if revision and theirs and revision != theirs:
        raise Incompatible(
            f"the table is of hipBLASLt {revision}, --like of {theirs}: algorithm numbers hold for"
            " one build. Sweep with the job's library"
        )
    if not (revision or theirs):
        raise UsageError(
            "the table does not say which hipBLASLt it is of, and line 1 of a tuning file must:"
            " give a tuning file or a TunableOp result of the job's machine, --like FILE; one is"
            " made by HIPBLASLT_TUNING_FILE=like.txt hipblaslt-bench -m 64 -n 64 -k 64"
        )
    return f"{override.VERSION}{theirs or revision}\n"


def _with_comments(text: str, rows: set[int], kept: Mapping[int, str]) -> str:
    """The converted rows of our table, its comments where they stand."""
    lines = []
    for number, old in enumerate(split_lines(text.removeprefix("\ufeff")), 1):
        if number in rows:
            lines.append(kept.get(number, ""))
        elif not te.is_row(old):
            lines.append(old)
    return "".join(lines)


def _of_te(text: str, source: str, to: str) -> Converted:
    """A TE table in another of TE's dialects or as ours, its other lines as they stand."""
    document = te.read(text)
    lines, findings = [_header(to, document.lines[0].text)], []
    for number, old in enumerate(document.lines[1:], 2):
        try:
            if old.row is None or to != GEMMTUNE:
                lines.append(te.recast(old, source, to).text)
            else:
                lines.append(line(tuned_of(old.row)))
        except ValueError as e:
            findings.append(_refusal(number, str(e)))
    return Converted("".join(lines), findings)


def _header(to: str, old: str) -> str:
    end = old[len(old.rstrip("\r\n")) :]
    return (",".join(COLUMNS[Tuned]) if to == GEMMTUNE else te.HEADERS[to]) + end


def _refusal(number: int, why: str) -> Finding:
    return Finding(number, "", "", ERROR, why, "Delete the row, or convert with --drop")


def tuned_of(row: te.Row) -> Tuned:
    """A TE row as ours, beta 0 standing for both. Raises ValueError for an aux_type."""
    if row.aux_type != "-":
        raise ValueError(f"a gemmtune table has no aux_type, and this row's is {row.aux_type}")
    # float32 is TE's word for no bias at all; any other type is the job's and is kept.
    bias = row.epi not in UNBIASED
    gemm = Gemm(
        *(row.m, row.n, row.k, row.trans_a, row.trans_b, row.type_a, row.type_b, row.type_d),
        bias_type="-" if row.bias_type == "float32" and not bias else row.bias_type,
        lda=row.lda,
        ldb=row.ldb,
        ldd=row.ldd,
        epi=row.epi,
        comp=row.comp,
        scale=row.scale,
        scale_mode=row.scale_mode,
        api=_LT,
    )
    algo = Algo(row.algo_id, row.aidx, str(row.algo_id))
    return Tuned(row.dev_cap, gemm, row.ws_min, row.ws_max, algo)


def te_of(row: Tuned, fp8_bias: str = "float32") -> te.Row:
    """Our row as TE would look it up. Raises ValueError with the reason where TE never would.

    `fp8_bias` stands in the key of an FP8 GEMM without a bias: bfloat16 in TE 1.x.
    """
    g = row.gemm
    if row.dev_cap == 0:
        raise ValueError("made on a CPU (dev_cap 0): TE tunes GEMMs of AMD GPUs only")
    if g.api != _LT:
        raise ValueError(f"api {g.api}: TE tunes only what it launches through the Lt API (lt)")
    if g.batch != 1:
        raise ValueError(f"batch {g.batch}: TE's key has no batch, it launches single GEMMs")
    for name in ("type_a", "type_b", "type_d", "bias_type"):
        if getattr(g, name) not in te.NAMES[name]:
            raise ValueError(f"{name} {getattr(g, name)}: TE knows {' '.join(te.TYPES)}")
    if g.comp != "f32" or g.scale != "float32":
        raise ValueError(f"comp {g.comp}, scale {g.scale}: TE computes in f32, scaled by float32")
    if min(g.m, g.n, g.k) == 0 or max(g.m, g.n, g.k, g.lda, g.ldb, g.ldd) >= 2**31:
        raise ValueError("a size of 0, or of 2147483648 or more: TE cannot look it up")
    if not 0 <= row.algo.aidx < 2**31 or row.algo.algo_id < 0:
        raise ValueError(f"algo_id {row.algo.algo_id}, aidx {row.algo.aidx}: TE finds no such one")
    return te.Row(
        *(row.dev_cap, g.m, g.n, g.k, g.trans_a, g.trans_b, g.type_a, g.type_b, g.type_d),
        bias_type="-" if not g.fp8 else fp8_bias if g.bias_type == "-" else g.bias_type,
        lda=g.lda,
        ldb=g.ldb,
        ldd=g.ldd,
        epi=g.epi,
        comp=g.comp,
        scale=g.scale,
        ws_min=row.ws_min,
        ws_max=row.ws_max,
        algo_id=row.algo.algo_id,
        aidx=row.algo.aidx,
        scale_mode=g.scale_mode,
    )


def te_made(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep learnt of the installed TE: dialect, dev_cap, fp8_bias; empty if nothing."""
    said = provenance.get("te")
    return said if isinstance(said, dict) else {}


def _merge_keys(
    entries: Mapping[int, _Entry], calls: Mapping[Gemm, float], ranged: bool
) -> dict[int, int]:
    """The rows that give way to another of the same key and workspace, and to which.

    The algorithm that saves the most time over all rows of the key is kept; where the default's
    time is not known, the one whose GEMMs take the most. `ranged`: rows say which workspaces they
    are for.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, entry in entries.items():
        groups.setdefault(entry.key, []).append(number)
    merged: dict[int, int] = {}
    for numbers in groups.values():
        saved: dict[int, float] = {}
        taken: dict[int, float] = {}
        for number in numbers:
            row = entries[number].row
            weight, algo = calls.get(row.gemm, 1.0), row.algo.algo_id
            gain = row.default_us - row.time_us if row.default_us and row.time_us else 0.0
            saved[algo] = saved.get(algo, 0.0) + weight * gain
            taken[algo] = taken.get(algo, 0.0) + weight * row.time_us
        rank = {a: (saved[a], taken[a]) for a in saved}
        kept: list[int] = []
        for number in sorted(
            numbers, key=lambda n: rank[entries[n].row.algo.algo_id], reverse=True
        ):
            mine = entries[number].row
            for other in kept:
                if not ranged or mine.overlaps(entries[other].row):
                    merged[number] = other
                    break
            else:
                kept.append(number)
    return merged
