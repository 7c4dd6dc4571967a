"""500 damaged tables through check, convert and merge: never a traceback, never a false clean."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from te_oracle import HEADERS, USED, load

from gemmtune.cli import main

FIXTURES = Path(__file__).parent / "fixtures" / "te_csv"
GOOD = {f"te-v{n}": (FIXTURES / f"v{n}_good.csv").read_bytes() for n in (1, 2, 3)}
GPUS = {904, 905}
NASTY = (
    *("", "-", "-1", "0", "00", "+7", "1e3", "12.5", "0x10", "7 ", " 7", "'7'", '"7"', "7 # seven"),
    *("2147483647", "2147483648", "4294967296", "18446744073709551615", "18446744073709551616"),
    *("9" * 5000, "9223372036854775807", "nan", "bf16", "float64", "float32", "float8e4m3", "N"),
    *("t", "bias", "None", "f32", "904", "942", "905", "\u0664", "\ufeff904", "4096\r", "\u2028"),
)


def damage(data: bytes, rng: random.Random) -> bytes:
    """One to three faults of the kinds that hands, tools and killed processes make."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(FAULTS)(data, rng)
    return data


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True) or [b""]


def _cell(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    at = rng.randrange(len(lines))
    cells = lines[at].rstrip(b"\n").split(b",")
    cells[rng.randrange(len(cells))] = rng.choice(NASTY).encode()
    lines[at] = b",".join(cells) + b"\n"
    return b"".join(lines)


def _swap(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    at = rng.randrange(len(lines))
    cells = lines[at].rstrip(b"\n").split(b",")
    i, j = rng.randrange(len(cells)), rng.randrange(len(cells))
    cells[i], cells[j] = cells[j], cells[i]
    lines[at] = b",".join(cells) + b"\n"
    return b"".join(lines)


def _drop_cell(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    at = rng.randrange(len(lines))
    cells = lines[at].split(b",")
    del cells[rng.randrange(len(cells))]
    lines[at] = b",".join(cells)
    return b"".join(lines)


def _byte(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    new = bytes([rng.choice((0, 9, 10, 13, 32, 34, 35, 44, 45, 46, 48, 57, 84, 101, 194, 255))])
    return data[:at] + new + data[at + rng.randrange(2) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _cut_line(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    at = rng.randrange(len(lines))
    lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)] + rng.choice((b"\n", b""))
    return b"".join(lines)


def _repeat(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def _shuffle(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    rng.shuffle(lines)
    return b"".join(lines)


def _extra(data: bytes, rng: random.Random) -> bytes:
    lines = _lines(data)
    at = rng.randrange(len(lines))
    lines[at] = (
        lines[at].rstrip(b"\n") + rng.choice((b",", b" # note", b",x,1", b";", b"\t")) + b"\n"
    )
    return b"".join(lines)


def _comment(data: bytes, rng: random.Random) -> bytes:
    comments = (
        b"# note\n",
        b"\n",
        b" \t\n",
        b'# gemmtune {"a": 1}\n',
        b"# gemmtune {\n",
        b"  # x\n",
    )
    lines = _lines(data)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(comments))
    return b"".join(lines)


def _whole(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        (
            data.replace(b"\n", b"\r\n"),
            b"\xef\xbb\xbf" + data,
            data + data,
            data + rng.choice(list(GOOD.values())),
            data.replace(b",", b", "),
            data.replace(b",", b";"),
            data.upper(),
            data.decode("utf-8", "replace").encode("utf-16"),
            b"",
        )
    )


FAULTS = (
    *(_cell, _cell, _cell, _swap, _drop_cell, _byte, _byte, _cut, _cut_line, _repeat),
    *(_shuffle, _extra, _comment, _whole),
)


def run(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        args,
        result.exception,
    )
    assert result.exit_code in (0, 1, 2, 3), args
    return result


def accepted(data: bytes, dialect: str) -> bool:
    outcomes = load(data, dialect, GPUS)
    return outcomes is not None and all(outcome == USED for _, outcome in outcomes)


def accepted_by_its_header(data: bytes) -> bool:
    first = data.split(b"\n", 1)[0]
    dialect = next((d for d, header in HEADERS.items() if header == first), None)
    return dialect is not None and accepted(data, dialect)


@pytest.mark.parametrize("block", range(5))
def test_no_damaged_table_passes_as_clean_and_none_makes_a_traceback(
    block: int, tmp_path: Path
) -> None:
    table, out, good = (str(tmp_path / n) for n in ("t.csv", "out.csv", "good.csv"))
    clean = 0
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        dialect = rng.choice(sorted(GOOD))
        data = damage(GOOD[dialect], rng)
        Path(table).write_bytes(data)
        Path(good).write_bytes(GOOD[dialect])
        passed = run("check", table).exit_code == 0
        clean += passed
        assert not passed or accepted_by_its_header(data), (seed, data)

        to = rng.choice((*sorted(GOOD), "gemmtune"))
        Path(out).unlink(missing_ok=True)
        converted = run("convert", table, "--to", to, "-o", out).exit_code == 0
        assert converted == Path(out).exists(), seed
        assert passed or not converted, seed
        if converted and to != "gemmtune":
            assert accepted(Path(out).read_bytes(), to), (seed, data)

        Path(out).unlink(missing_ok=True)
        force = ["--force"] * rng.randrange(2)
        pair = [table, good] if rng.randrange(2) else [good, table]
        merged = run("merge", *pair, *force, "-o", out).exit_code == 0
        assert passed or not merged, seed
        if merged:
            assert accepted_by_its_header(Path(out).read_bytes()), (seed, data)
    assert 4 < clean < 60  # both happen, or this test shows nothing
