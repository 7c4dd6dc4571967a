"""Conversion between the dialects: TE's with each other, and with our own tuned.csv. Pure.

TE's key is coarser than ours: it has no beta, batch, alignment or fast accumulation, and its
bias_type is `-` for every GEMM without FP8, even with a bias, and the bias tensor's type for FP8,
float32 where there is none. Lines that are no rows (comments, provenance) are carried over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gemmtune.dialects import GEMMTUNE, detect, te
from gemmtune.dialects.finding import ERROR, WARNING, Finding
from gemmtune.errors import TableError
from gemmtune.gemm import Algo, Gemm
from gemmtune.table import COLUMNS, Fault, Tuned, line, read_provenance, scan, split_lines

_LT = "lt"  # the api of every GEMM that TE tunes


class Converted(NamedTuple):
    """A table in another dialect, and what had to be left out (errors) or merged (warnings)."""

    text: str
    findings: list[Finding]


def convert(text: str, to: str, calls: Mapping[Gemm, float] | None = None) -> Converted:
    """A table in the dialect `to`; rows that it cannot express are left out, with the reason.

    `calls` (launches per step, by Gemm) weighs rows that fall together in TE's key; without it all
    weigh the same. Raises TableError where the text is no table of a known dialect.
    """
    source = detect(text)
    if source is None:
        raise TableError("not a table of a known dialect: gemmtune check says why")
    if source == to:
        return Converted(text, [])
    if source == GEMMTUNE:
        return _tuned_to_te(text, to, calls or {})
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
    bias = row.epi not in ("-", "geluaux", "dgelu")
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


def _tuned_to_te(text: str, to: str, calls: Mapping[Gemm, float]) -> Converted:
    findings = []
    fp8_bias = te_made(read_provenance(text)[0]).get("fp8_bias", "float32")
    rows: dict[int, tuple[te.Line, Tuned]] = {}
    for number, row in scan(text, Tuned):
        if isinstance(row, Fault):
            raise TableError(f"line {number}: {row}")
        try:
            rows[number] = te.line_of(te_of(row, fp8_bias), to), row
        except ValueError as e:
            findings.append(_refusal(number, str(e)))
    merged = _merge_keys(rows, calls)
    for number, kept in merged.items():
        if rows[number][1].algo.algo_id != rows[kept][1].algo.algo_id:
            effect = f"the same GEMM to TE as line {kept}, which carries more time and is kept"
            mend = "Nothing: TE cannot tell them apart"
            findings.append(Finding(number, "", "", WARNING, effect, mend))
    lines = [te.HEADERS[to] + "\n"]
    for number, old in enumerate(split_lines(text.removeprefix("\ufeff")), 1):
        if number in rows:
            if number not in merged:
                lines.append(rows[number][0].text)
        elif not te.is_row(old):
            lines.append(old)
    return Converted("".join(lines), sorted(findings, key=lambda f: f.line))


def _merge_keys(
    rows: Mapping[int, tuple[te.Line, Tuned]], calls: Mapping[Gemm, float]
) -> dict[int, int]:
    """The rows that give way to another of the same TE key and workspace, and to which.

    The algorithm that saves the most time over all rows of the key is kept; where the default's
    time is not known, the one whose GEMMs take the most.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, (te_line, _) in rows.items():
        assert te_line.row is not None
        groups.setdefault(te_line.row.key, []).append(number)
    merged: dict[int, int] = {}
    for numbers in groups.values():
        saved: dict[int, float] = {}
        taken: dict[int, float] = {}
        for number in numbers:
            row = rows[number][1]
            weight, algo = calls.get(row.gemm, 1.0), row.algo.algo_id
            gain = row.default_us - row.time_us if row.default_us and row.time_us else 0.0
            saved[algo] = saved.get(algo, 0.0) + weight * gain
            taken[algo] = taken.get(algo, 0.0) + weight * row.time_us
        rank = {a: (saved[a], taken[a]) for a in saved}
        kept: list[int] = []
        for number in sorted(numbers, key=lambda n: rank[rows[n][1].algo.algo_id], reverse=True):
            mine = rows[number][1]
            for other in kept:
                if mine.overlaps(rows[other][1]):
                    merged[number] = other
                    break
            else:
                kept.append(number)
    return merged
