"""Lint a tuned CSV: everything that Transformer Engine would reject, ignore or misread. Pure.

What TE does was observed by running its cache class on a CPU with stubbed HIP types (te-v1 and
te-v2); te-v3, whose loader is not public, is taken to be like te-v2. docs/te-csv.md explains.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator

from gemmtune.dialects import GEMMTUNE, detect, te
from gemmtune.dialects.finding import ERROR, WARNING, Finding
from gemmtune.dialects.hipblaslt import GPUS
from gemmtune.gemm import FP8_TYPES
from gemmtune.table import Fault, Tuned, read_provenance, scan, split_lines

_Range = tuple[int, int, int]  # ws_min, ws_max, and the line that has them

_IGNORED = 'TE prints "Incorrect algo storage legend", ignores the whole file and goes on untuned'
_THROWS = "TE throws out of the job's first GEMM, and reads no row after this one"
_SILENT = "TE skips the row in silence"
_LEFT_OVER = "TE takes the row in silence, with a wrong number or one left over from the row before"
_NEVER = "TE loads the row and never uses it"
_COMMON_NAMES = {
    **dict.fromkeys(("bf16", "bf", "16bf", "hip_r_16bf"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "hip_r_16f"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float", "hip_r_32f"), "float32"),
    **dict.fromkeys(("fp8", "f8", "e4m3", "float8_e4m3", "fp8_e4m3"), "float8e4m3"),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), "float8e4m3"),
    **dict.fromkeys(("bf8", "e5m2", "float8_e5m2", "fp8_e5m2", "float8_e5m2fnuz"), "float8e5m2"),
    **dict.fromkeys(("", "none", "default"), "-"),
    "gelu_aux": "geluaux",
    "gelu_aux_bias": "geluauxbias",
}


def lint(data: bytes, dialect: str | None = None, gpu: int | None = None) -> list[Finding]:
    """Every fault of a table, in the order of its lines.

    `dialect` is the one that the TE in use speaks, or "gemmtune" for a table that TE is not meant
    to read; None takes the file's own word. `gpu` is the dev_cap of the machine; None allows every
    GPU that TE for ROCm is built for. A table without a finding of severity error is used by TE
    row by row as written.
    """
    text = data.decode("utf-8", "surrogateescape")
    lines = split_lines(text)
    found = detect(text)
    if found == GEMMTUNE:
        findings = [*_ours(text, dialect), *_bytes(lines)]
    else:
        start, header = _header(lines, dialect, found)
        findings = [*header, *_bytes(lines)]
        if found := found or _near(lines[start - 1] if lines else ""):
            findings += _rows(lines, start, found, gpu)
    findings += [
        Finding(f.line, "", "", WARNING, f"TE skips the comment, but {f.reason}", "Mend the JSON")
        for f in read_provenance(text)[1]
        if GEMMTUNE not in (dialect, found)
    ]
    return sorted(findings, key=lambda f: f.line)


def _bytes(lines: list[str]) -> Iterator[Finding]:
    for number, line in enumerate(lines, 1):
        bad = re.search("[\udc80-\udcff]", line)
        if bad or "\0" in line:
            what = "a NUL byte" if not bad else f"byte {ord(bad[0]) - 0xDC00:#04x}, not UTF-8,"
            effect = f"{what} in column {(bad.start() if bad else line.index(chr(0))) + 1}"
            mend = "Two processes may have written this file: make it again, or delete the line"
            yield Finding(number, "", "", ERROR, f"{effect} of the line: no text table", mend)


def _near(line: str) -> str | None:
    """The dialect that a header means, whatever its blanks, quotes and case."""
    bare = re.sub(r"[\s\"'\ufeff]", "", line).lower()
    return next((d for d, header in te.HEADERS.items() if header == bare), None)


def _header(lines: list[str], dialect: str | None, found: str | None) -> tuple[int, list[Finding]]:
    """The number of the header's line, and what is wrong with it."""
    if found:
        if dialect and dialect != found:
            mend = f"Convert it: gemmtune convert FILE --to {dialect}"
            effect = f"the header is {found}'s: "
            effect += (
                "no gemmtune table"
                if dialect == GEMMTUNE
                else f"a TE that speaks {dialect} ignores the whole file"
            )
            return 1, [Finding(1, "", "", ERROR, effect, mend)]
        return 1, []
    wanted = dialect if dialect in te.HEADERS else None
    for number, line in enumerate(lines, 1):
        if near := _near(line):
            effect, mend = _spelling(line, number, near)
            return number, [Finding(1, "", "", ERROR, f"{_IGNORED}: {effect}", mend)]
        if te.is_row(line) and number > 1:
            break
    if not "".join(lines).strip():
        effect, mend = "the file is empty", "Write the header that your TE saves, then the rows"
    else:
        cells = lines[0].strip().split(",")
        near = wanted or min(te.COLUMNS, key=lambda d: _distance(cells, te.COLUMNS[d]))
        effect, mend = _difference(cells, near)
    return 1, [Finding(1, "", "", ERROR, f"{_IGNORED}: {effect}", mend)]


def _spelling(line: str, number: int, near: str) -> tuple[str, str]:
    first = line.removesuffix("\n")
    if number > 1:
        return f"the header is on line {number}", "Move the header to line 1, comments below it"
    if first.startswith("\ufeff"):
        return "it starts with a byte-order mark", r"Run: sed -i '1s/^\xef\xbb\xbf//' FILE"
    if first.endswith("\r") and first[:-1] == te.HEADERS[near]:
        return "its lines end in CRLF", r"Run: sed -i 's/\r$//' FILE"
    what = "blanks" if re.sub(r"\s", "", first) == te.HEADERS[near] else "quotes, case or blanks"
    return f"{what} in the header", f"Write line 1 as {te.HEADERS[near]}"


def _distance(cells: list[str], columns: tuple[str, ...]) -> int:
    return len(set(cells) ^ set(columns))


def _difference(cells: list[str], near: str) -> tuple[str, str]:
    columns = te.COLUMNS[near]
    pairs = itertools.zip_longest(cells, columns)
    number, (cell, column) = next((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1])
    have = "missing" if cell is None else repr(cell[:40])
    want = "none" if column is None else repr(column)
    effect = f"column {number} is {have}, where {near}, the nearest dialect, has {want}"
    mend = "Let your TE save one GEMM (TE_HIPBLASLT_ALGO_SAVE) and copy its line 1"
    return effect, f"{mend}; known: {', '.join(te.HEADERS)}. The rows were not checked"


def _rows(lines: list[str], start: int, dialect: str, gpu: int | None) -> Iterator[Finding]:
    loaded: dict[tuple[object, ...], list[_Range]] = {}
    first_cap: tuple[int, int] | None = None
    rows = 0
    for number, line in enumerate(lines[start:], start + 1):
        if not te.is_row(line):
            continue
        rows += 1
        cells = te.split(line)[1]
        add = _Adder(number)
        row = _cells(cells, dialect, add)
        if row is not None:
            _machine(row, gpu, add)
            if gpu is None and first_cap and row.dev_cap != first_cap[1]:
                effect = f"line {first_cap[0]} is for {first_cap[1]}: each GPU reads its own rows"
                add("dev_cap", str(row.dev_cap), WARNING, effect, "Nothing, if that is meant")
            first_cap = first_cap or (number, row.dev_cap)
            _key(row, dialect, add)
            if _workspace(row, add):
                _overlap(row, number, loaded, add)
        yield from add.findings
    if not rows:
        yield Finding(len(lines), "", "", WARNING, "no rows: TE loads nothing", "Add rows")
    elif not lines[-1].endswith("\n") and te.is_row(lines[-1]):
        effect = "the last line has no end: TE takes it, but a row cut short looks the same"
        mend = "See that its last number is whole, and end the line"
        yield Finding(len(lines), "", "", WARNING, effect, mend)


class _Adder:
    """Collects the findings of one line."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.findings: list[Finding] = []

    def __call__(self, column: str, value: str, severity: str, effect: str, mend: str) -> None:
        self.findings.append(Finding(self.line, column, value, severity, effect, mend))


def _cells(cells: list[str], dialect: str, add: _Adder) -> te.Row | None:
    """The row, if every cell of it is read as it is meant."""
    columns = te.COLUMNS[dialect]
    if [c.strip().lower() for c in cells[:4]] == list(columns[:4]):
        effect = f"a second header, read as a row of GPU 0: {_SILENT}"
        add("", "", ERROR, effect, "Delete the line, or use gemmtune merge to join tables")
        return None
    values = {}
    cut = len(cells) < len(columns)
    for column, cell in list(zip(columns, cells, strict=False))[: -1 if cut else None]:
        field = te.FIELD_OF.get(column, column)
        if column == columns[-1]:
            cell = _last(cell, add)
        try:
            values[field] = te.value(field, cell)
        except ValueError as e:
            effect, mend = _bad_cell(field, cell, str(e))
            add(column, cell, ERROR, effect, mend)
            continue
        if field not in te.NAMES and cell != str(values[field]):
            mend = f"Write {values[field]}"
            add(column, cell, WARNING, f"TE reads it as {values[field]}", mend)
    if cut:
        missing = columns[len(cells)]
        late = columns.index("ws_min") <= len(cells)
        effect = f"the row ends before {missing}: {_LEFT_OVER if late else _THROWS}"
        add("", "", ERROR, effect, "Delete the row, or tune this GEMM again")
        return None
    if extra := cells[len(columns) :]:
        joined = ",".join(extra)
        if {"N", "T", "f32", *te.TYPES} & set(extra):
            effect = "two rows on one line: TE reads one, with numbers of both, in silence"
            add("", joined, ERROR, effect, "Delete the line, or tune its GEMMs again")
            return None
        add("", joined, WARNING, "TE ignores what stands after aidx", "Delete it")
    return te.Row(**values) if len(values) == len(columns) else None


def _last(cell: str, add: _Adder) -> str:
    """aidx without the words that may follow it: TE stops reading after the number."""
    number, blank, rest = cell.strip(te.BLANKS).partition(" ")
    if blank and number.isdecimal() and not re.match(r"\s*[0-9.,eE+-]", rest):
        add("aidx", cell, WARNING, f"TE reads {number} and ignores the rest", f"Write {number}")
        return number
    return cell


def _bad_cell(field: str, cell: str, reason: str) -> tuple[str, str]:
    if field in te.NAMES:
        allowed = te.NAMES[field]
        bare = cell.strip().strip("\"'")
        guess = {name.lower(): name for name in allowed}.get(bare.lower())
        guess = guess or _COMMON_NAMES.get(bare.lower())
        close = difflib.get_close_matches(bare, allowed, 1)
        if guess not in allowed:
            guess = close[0] if close else None
        hint = f"Write {guess}" if guess else f"One of {' '.join(allowed)}"
        if field == "comp":
            hint = "Write f32, the only one that TE computes in"
        return f"unknown name: {_THROWS}", hint
    negative = re.fullmatch("-[0-9]+", cell.strip(te.BLANKS))
    if field == "dev_cap":
        return f"{reason}, so no GPU's: {_SILENT}", "Write major*100+minor: 904 is gfx942"
    if field in te.DIMENSIONS:
        if negative and len(cell.strip()) < 11:
            return f"negative: {_NEVER}", "Write the size that the job runs"
        return f"{reason}: {_THROWS}", "Write a whole number below 2147483648, without quotes"
    if field == "scale_mode":
        effect = _SILENT if negative else _THROWS
        return f"{reason}: {effect}", "Write 0, or 2 for MXFP8"
    if field == "aidx" and negative:
        return "negative: TE ignores the row's algo_id and takes its default", "Write 0 or the rank"
    return f"{reason}: {_LEFT_OVER}", "Write a whole number from 0 up"


def _machine(row: te.Row, gpu: int | None, add: _Adder) -> None:
    cap = str(row.dev_cap)
    if gpu is not None and row.dev_cap != gpu:
        mend = f"Tune on this GPU ({gpu}): algorithms of another do not carry over"
        add("dev_cap", cap, ERROR, f"another GPU than {gpu}: {_SILENT}", mend)
    elif gpu is None and row.dev_cap not in GPUS:
        known = ", ".join(f"{c} ({name})" for c, name in GPUS.items())
        effect = f"no GPU that TE for ROCm is built for has it; there {_SILENT}"
        add("dev_cap", cap, ERROR, effect, f"Known: {known}. If yours reports it: --gpu {cap}")


def _key(row: te.Row, dialect: str, add: _Adder) -> None:
    def never(column: str, why: str, mend: str, severity: str = ERROR) -> None:
        field = te.FIELD_OF.get(column, column)
        effect = f"{why}: {_NEVER}" if severity == ERROR else why
        add(column, str(getattr(row, field)), severity, effect, mend)

    sizes = {"m": row.m, "n": row.n, "k": row.k}
    for name, size in sizes.items():
        if size == 0:
            never(name, "an empty GEMM is never launched", "Delete the row")
        elif row.fp8 and size % 16:
            why = "FP8 GEMMs want multiples of 16: such a one may not run at all"
            never(name, why, "Pad the model's or the batch's dimension", WARNING)
    least = {
        "lda": ("m" if row.trans_a == "N" else "k", f"A is {row.trans_a}"),
        "ldb": ("k" if row.trans_b == "N" else "n", f"B is {row.trans_b}"),
        "ldd": ("m", "D is m by n"),
    }
    for name, (size_name, why) in least.items():
        if getattr(row, name) < sizes[size_name]:
            why = f"smaller than the matrix ({why}, so at least {size_name}={sizes[size_name]})"
            never(name, why, f"Write {sizes[size_name]}, or the stride that the job has")
    if not row.fp8 and row.bias_type != "-":
        never("bias_type", "only FP8 GEMMs have a bias type in TE's key", "Write -")
    elif row.fp8 and (row.bias_type == "-" or row.bias_type in FP8_TYPES):
        never(
            "bias_type", "an FP8 GEMM always has a bias type", "Write float32, or the bias's type"
        )
    if row.fp8 and (row.trans_a, row.trans_b) != ("T", "N"):
        why = "TE turns FP8 GEMMs into T,N over transposed copies (all but MXFP8)"
        never("trans_a", why, "Write T,N if this is no MXFP8 row", WARNING)
    if row.scale != "float32":
        name = "scale_type" if dialect == "te-v3" else "scale"
        add(name, row.scale, ERROR, f"not float32: {_SILENT}", "Write float32")
    if "fp8_scale" in te.COLUMNS[dialect] or "scale_mode" in te.COLUMNS[dialect]:
        _scale_mode(row, dialect, add)
    if row.aux_type != "-" and not (row.fp8 and "gelu" in row.epi):
        never("aux_type", "only FP8 GEMMs with gelu have an aux_type", "Write -")


def _scale_mode(row: te.Row, dialect: str, add: _Adder) -> None:
    column = "fp8_scale" if dialect == "te-v2" else "scale_mode"
    mode = str(row.scale_mode)
    if row.scale_mode > 5:
        add(column, mode, ERROR, f"outside 0 to 5: {_SILENT}", "Write 0, or 2 for MXFP8")
    elif not row.fp8 and row.scale_mode != 0:
        add(column, mode, ERROR, f"no scale mode without FP8: {_NEVER}", "Write 0")
    elif row.fp8 and row.scale_mode not in (0, 2):
        effect = "TE is known to launch 0 (a scale per tensor) and 2 (MXFP8) only"
        add(column, mode, WARNING, effect, "Write 0 unless your TE saved this row")
    elif not row.fp8 and dialect == "te-v2":
        effect = (
            "te-v2 with hipBLASLt 0.15 or later leaves the scale mode of GEMMs without FP8"
            " uninitialised: the row matches only where the stack happens to hold 0"
        )
        add(column, mode, WARNING, effect, "See in TE_HIPBLASLT_LOG_TUNING=1 that it is used")


def _workspace(row: te.Row, add: _Adder) -> bool:
    """Whether TE keeps the row."""
    if row.ws_min > row.ws_max:
        effect = f"above ws_max={row.ws_max}: TE prints a warning to stdout and skips the row"
        add("ws_min", str(row.ws_min), ERROR, effect, "Exchange the two, or write ws_min 0")
        return False
    if row.ws_min > 0:
        effect = (
            "a row that is exactly right is never kept in memory: if this is the algorithm's real"
            " need and aidx its true rank, TE asks the heuristic again at every GEMM"
        )
        mend = "Write ws_min 0, or where a range of the same GEMM below it ends"
        add("ws_min", str(row.ws_min), WARNING, effect, mend)
    if row.aidx > 10_000:
        effect = f"TE asks hipBLASLt for {row.aidx + 1} results"
        add("aidx", str(row.aidx), WARNING, effect, "Write the algorithm's rank in the list")
    return row.scale == "float32" and row.scale_mode <= 5


def _overlap(
    row: te.Row,
    number: int,
    loaded: dict[tuple[object, ...], list[_Range]],
    add: _Adder,
) -> None:
    if clash := _clash(row, number, loaded.setdefault(row.key, [])):
        _, high, other = clash
        effect = (
            f"the same GEMM as line {other}, with an overlapping workspace range: TE prints"
            f' "Duplicated/overlapped entry" to stdout and keeps line {other}'
        )
        mend = "Delete one of the two"
        if row.ws_max > high:
            mend += f", or start this range at {high + 1}"
        add("ws_min", str(row.ws_min), ERROR, effect, mend)


def _clash(row: te.Row | Tuned, number: int, ranges: list[_Range]) -> _Range | None:
    """The first of `ranges` that overlaps the row's; where there is none, the row's is added."""
    for known in ranges:
        if row.ws_min <= known[1] and row.ws_max >= known[0]:
            return known
    ranges.append((row.ws_min, row.ws_max, number))
    return None


def _ours(text: str, dialect: str | None) -> Iterator[Finding]:
    """Faults of a gemmtune table: whether gemmtune can use it, and that TE cannot."""
    severity = WARNING if dialect == GEMMTUNE else ERROR
    to = dialect if dialect in te.HEADERS else "te-v1"
    mend = f"For TE: gemmtune convert FILE --to {to}. For gemmtune run: --dialect gemmtune"
    effect = f"a gemmtune table: {_IGNORED}"
    yield Finding(1, "", "", severity, effect, mend)
    seen: dict[tuple[object, ...], list[_Range]] = {}

    def refuse(line: int, column: str, value: str, why: str) -> Finding:
        effect = f"gemmtune refuses the table: {why}"
        return Finding(line, column, value, ERROR, effect, "Mend or delete the row")

    for fault in read_provenance(text)[1]:
        yield refuse(fault.line, "", "", fault.reason)
    for number, row in scan(text, Tuned):
        if isinstance(row, Fault):
            yield refuse(number, row.column, row.value, row.reason)
            continue
        if row.ws_min > row.ws_max:
            yield refuse(number, "ws_min", str(row.ws_min), f"above ws_max={row.ws_max}")
            continue
        if clash := _clash(row, number, seen.setdefault((row.dev_cap, row.gemm), [])):
            why = f"the same GEMM as line {clash[2]}, with an overlapping workspace range"
            yield refuse(number, "ws_min", str(row.ws_min), why)
