"""A model of Transformer Engine's loader, written apart from gemmtune: what becomes of each row.

It reads as C++ streams do (`is >> int >> char`, getline up to a comma), with their error states,
and is strict: a row counts as used only if every value was read from its own cell.
"""

from __future__ import annotations

HEADERS = {
    "te-v1": b"dev_cap,m,n,k,trans_a,trans_b,type_a,type_b,type_d,bias_type,lda,ldb,ldd,epi,comp,"
    b"scale,ws_min,ws_max,algo_id,aidx",
    "te-v2": b"dev_cap,m,n,k,trans_a,trans_b,type_a,type_b,type_d,bias_type,lda,ldb,ldd,fp8_scale,"
    b"epi,comp,scale,ws_min,ws_max,algo_id,aidx",
    "te-v3": b"dev_cap,m,n,k,trans_a,trans_b,type_a,type_b,type_d,bias_type,aux_type,lda,ldb,ldd,"
    b"scale_mode,epi,comp,scale_type,ws_min,ws_max,algo_id,aidx",
}
TYPES = {b"float32", b"float16", b"bfloat16", b"float8e4m3", b"float8e5m2"}
EPILOGUES = {b"-", b"bias", b"geluaux", b"geluauxbias", b"dgelu", b"dgelubgrad", b"bgradb"}
SPACE = b" \t\n\r\f\v"
USED, SKIPPED, THROWS, GARBAGE, LOST = "used", "skipped", "throws", "garbage", "lost"


class Stream:
    """std::istringstream as far as the loader uses it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.eof = self.fail = False
        self.separators: list[bytes] = []
        self.signs = 0

    def _sentry(self, skip: bool) -> bool:
        if self.eof or self.fail:
            self.fail = True
            return False
        while skip and self.at < len(self.data) and self.data[self.at] in SPACE:
            self.at += 1
        if skip and self.at == len(self.data):
            self.eof = self.fail = True
            return False
        return True

    def number(self, old: int | None, low: int, high: int) -> int | None:
        if not self._sentry(skip=True):
            return old
        start = self.at
        if self.data[start : start + 1] in (b"+", b"-"):
            self.at += 1
        digits = self.at
        while self.at < len(self.data) and 48 <= self.data[self.at] <= 57:
            self.at += 1
        self.eof = self.at == len(self.data)
        if self.at == digits:
            self.fail = True
            return 0
        magnitude = int(self.data[digits : self.at].lstrip(b"0")[:30] or b"0")
        negative = self.data[start : start + 1] == b"-"
        self.signs += negative
        if negative and low == 0:  # strtoull: modulo
            if magnitude > high:
                self.fail = True
                return high
            return (high + 1 - magnitude) % (high + 1)
        value = -magnitude if negative else magnitude
        if not low <= value <= high:
            self.fail = True
            return max(low, min(high, value))
        return value

    def char(self) -> None:
        if self._sentry(skip=True):
            self.separators.append(self.data[self.at : self.at + 1])
            self.at += 1

    def word(self) -> bytes:
        if not self._sentry(skip=False):
            return b""
        end = self.data.find(b",", self.at)
        if end < 0:
            text, self.at, self.eof = self.data[self.at :], len(self.data), True
            self.fail = not text
            return text
        text, self.at = self.data[self.at : end], end + 1
        return text


INT, LONG, SIZE = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1), (0, 2**64 - 1)


def load(data: bytes, dialect: str, dev_caps: set[int]) -> list[tuple[int, str]] | None:
    """(line, outcome) of each row; None where the whole file is ignored."""
    first, *lines = data.split(b"\n")
    if first != HEADERS[dialect]:
        return None
    outcomes: list[tuple[int, str]] = []
    loaded: list[tuple[tuple[object, ...], int, int]] = []
    dead = False
    for line_number, line in enumerate(lines, 2):
        line = line.strip(SPACE)
        if not line or line.startswith(b"#"):
            continue
        outcome = LOST if dead else _row(line, dialect, dev_caps, loaded)
        dead = dead or outcome == THROWS
        outcomes.append((line_number, outcome))
    return outcomes


def _row(  # noqa: PLR0912
    line: bytes, dialect: str, dev_caps: set[int], loaded: list[tuple[tuple[object, ...], int, int]]
) -> str:
    s = Stream(line)
    dims = []
    for _ in range(4):
        dims.append(s.number(None, *INT))
        s.char()
    if dims[0] not in dev_caps:
        return SKIPPED
    trans = [s.word(), s.word()]
    types = [s.word() for _ in range(4)]
    aux = s.word() if dialect == "te-v3" else b"-"
    mode: int | None = 0
    for _ in range(3):
        dims.append(s.number(None, *INT))
        s.char()
    if dialect != "te-v1":
        mode = s.number(None, *INT)
        s.char()
    epi, comp, scale = s.word(), s.word(), s.word()
    ws_min = s.number(None, *SIZE)
    s.char()
    ws_max = s.number(None, *SIZE)
    s.char()
    s.number(None, *LONG)
    s.char()
    aidx = s.number(None, *INT)
    after = line[s.at : s.at + 1]
    misread = s.fail or s.signs or any(c != b"," for c in s.separators)
    misread = misread or after not in (b"", b",", *(SPACE[i : i + 1] for i in range(len(SPACE))))
    if None not in (ws_min, ws_max) and ws_min > ws_max:  # type: ignore[operator]
        return SKIPPED
    known = [
        all(t in TYPES for t in types[:3]),
        types[3] in TYPES | {b"-"},
        aux in TYPES | {b"-"},
        all(t in (b"N", b"T") for t in trans),
        epi in EPILOGUES,
    ]
    compute = [comp == b"f32", scale in TYPES]
    if dialect == "te-v1":
        if not all(known + compute):
            return THROWS
        if scale != b"float32":
            return SKIPPED
    else:
        if not all(compute):
            return THROWS
        if scale != b"float32" or mode is None or not 0 <= mode <= 5:
            return SKIPPED
        if not all(known):
            return THROWS
    if misread or aidx is None:
        return GARBAGE
    assert ws_min is not None and ws_max is not None
    key = (*dims, *trans, *types, aux, mode, epi)
    if any(k == key and ws_min <= high and ws_max >= low for k, low, high in loaded):
        return SKIPPED
    loaded.append((key, ws_min, ws_max))
    return USED
