"""import and convert on damaged, endless and hopeless files: no made-up row, no traceback."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_vendor import LIKE, ours
from test_convert_vendor import TUNED as ROW
from test_logs import BENCH, FIXTURES, HEADER, TE_CSV, TN, TRACE, TUNED, read, run

from gemmtune import table
from gemmtune.capture.logs import Reader
from gemmtune.dialects import OVERRIDE, override, tunableop
from gemmtune.dialects.convert import convert
from gemmtune.gemm import Gemm
from gemmtune.table import Shape

ORIGINALS = [
    p.read_bytes() for p in (*sorted(FIXTURES.iterdir()), *sorted(TE_CSV.glob("*good.csv")))
]
ORIGINALS += [f"{HEADER},solution_index,gcnArchName,CUs\n{TUNED},7,gfx942,304\n".encode()]


def cut(data: bytes, rng: random.Random) -> bytes:
    """One of the faults of killed processes, full disks and torn writes, in one line."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line = lines[at]
    where = rng.randrange(len(line))
    lines[at] = rng.choice(
        (
            line[:where] + b"\n",
            line[:where],
            line[where:],
            line[:where] + b"\0" * rng.randrange(1, 9) + line[where:],
            line[:where] + bytes([rng.randrange(128, 256)]) + line[where:],
            line[:where] + line,
            line[:where] + rng.choice(lines),
            b"",
        )
    )
    return b"".join(lines)


@pytest.mark.parametrize("block", range(4))
def test_two_thousand_damaged_logs_make_up_no_row(block: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.log"
    known: list[set[Gemm]] = []
    for data in ORIGINALS:
        known.append({gemm for gemm, _ in read(tmp_path, data).calls})
    damaged = 0
    for seed in range(block * 500, block * 500 + 500):
        rng = random.Random(seed)
        which = rng.randrange(len(ORIGINALS))
        path.write_bytes(cut(ORIGINALS[which], rng))
        reader = Reader()
        reader.read(str(path))
        made_up = {gemm for gemm, _ in reader.calls} - known[which]
        assert not made_up, (seed, made_up)
        assert sum(reader.kinds.values()) + reader.other + reader.unread == reader.lines, seed
        damaged += reader.unread > 0
    assert damaged > 100


@pytest.mark.parametrize("module", [override, tunableop])
def test_a_damaged_file_of_algorithms_gives_no_other_algorithm(module: Any) -> None:
    text = LIKE if module is tunableop else convert(ours(ROW), OVERRIDE).text

    def rows(damaged: str) -> set[tuple[Gemm, int]]:
        found = (row for _, row in module.read(damaged))
        return {(row.gemm, row.algo.algo_id) for row in found if not isinstance(row, str)}

    for seed in range(1000):
        damaged = cut(text.encode(), random.Random(seed)).decode("utf-8", "replace")
        assert rows(damaged) <= rows(text), seed


BEGINNINGS = (
    *(BENCH, TRACE, HEADER, "Validator,", "T,N,0", "[Trace][cublasLtMatmul] A=", "GemmTunableOp_"),
    *("- { function: matmul,", "m=1 k=1 n=1 transa=T", "904,1,1,1,T,N,", "hipblaslt-bench -m"),
    *("\n", "\0", "\r\n"),
)
anything = st.binary(max_size=60) | st.sampled_from([text.encode() for text in BEGINNINGS])


@settings(max_examples=200, deadline=None)
@given(st.lists(anything, max_size=12))
def test_any_bytes_are_read_without_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.log"
    path.write_bytes(b"".join(parts))
    out = path.with_name("any.csv")
    result = run("import", path, "-o", out)
    assert result.exit_code in (0, 1)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code == 0:
        assert table.read(out, Shape).rows


def test_the_command_writes_a_table_and_says_what_it_could_not_read(tmp_path: Path) -> None:
    path, out = tmp_path / "a.log", tmp_path / "shapes.csv"
    bad = BENCH.replace("--transB N", "")
    path.write_text(f"epoch 1\n{BENCH}\n{BENCH}\n" + f"{bad}\n" * 7)
    result = run("import", path, "-o", out, "--steps", "2")
    assert result.exit_code == 0
    (row,) = table.read(out, Shape).rows
    assert (row.gemm, row.calls, row.pass_) == (TN, 1.0, "other")
    lines = result.stderr.splitlines()
    assert lines[0].startswith(
        f"{path}:4: not read: no --transB: the line is cut: 'hipblaslt-bench"
    )
    assert lines[5] == "and 2 more lines not read"
    assert lines[6].endswith("of 10 lines: 2 hipblaslt-bench lines; 1 without a GEMM, 7 not read")


def test_what_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("nothing\n")
    result = run("import", path, "-o", tmp_path / "s.csv")
    assert (result.exit_code, "no GEMM in these files" in result.stderr) == (1, True)
    assert not (tmp_path / "s.csv").exists()
    for args in ((tmp_path / "none.log",), (tmp_path,), (path, path), (path, "-o", path)):
        result = run("import", *args, *(() if "-o" in args else ("-o", tmp_path / "s.csv")))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr


def test_a_log_of_a_hundred_megabytes_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    with path.open("wb") as f:
        for _ in range(50):
            f.write(b"x" * (1 << 20))  # one line of 50 MiB
        f.write(b"\n")
        for _ in range(50):
            f.write(f"{BENCH}\n".encode() + (b"noise " * 170 + b"\n") * (1 << 10))
    code = (  # the process's own peak: ru_maxrss begins with that of whoever started it
        "import re, sys; from gemmtune.capture.logs import Reader; r = Reader();"
        "r.read(sys.argv[1]); status = open('/proc/self/status').read();"
        "print(int(*r.calls.values()), r.unread, re.search(r'VmHWM:\\s+(\\d+)', status)[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    calls, unread, kib = map(int, done.stdout.split())
    assert (calls, unread) == (50, 1)
    assert kib < 70_000
