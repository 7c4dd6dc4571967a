"""The fake of Transformer Engine's cache: its faults hold, and gemmtune's lint sees them all."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hipblaslt_model import DEFAULTS, Algo, Library
from fake_te_cache import Cache, Key, Unsuitable, spell
from te_on_cpu import environment
from test_fuzz_tables import FIXTURES, GOOD, damage

from gemmtune.dialects import te
from gemmtune.dialects.finding import has_errors
from gemmtune.dialects.lint import lint
from gemmtune.errors import TableError
from gemmtune.gemm import Algo as OurAlgo
from gemmtune.gemm import Gemm
from gemmtune.table import WS_MAX, Tuned

BF16 = ("bfloat16",) * 3
KEY = Key(904, 64, 48, 32, "T", "N", *BF16, "-", "-", 32, 32, 64, 0, "-")
WS = 1 << 16


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TE_HIPBLASLT_")]:
        monkeypatch.delenv(name)


def cache(**script: object) -> Cache:
    made = {**DEFAULTS, "us": 0.0, **script}
    return Cache(Library(made), made)


def row(cached: Cache, rank: int, **changed: object) -> te.Row:
    """The row that is exactly right for an algorithm of KEY."""
    algo = cached.library.all(KEY[1:])[rank]
    fields = {name: getattr(KEY, name) for name in te.SAID}
    exact = te.Row(904, **fields, bias_type="-", comp="f32", scale="float32", ws_min=algo.ws,
                   ws_max=WS_MAX, algo_id=algo.id, aidx=rank)  # fmt: skip
    return exact._replace(**changed)


def load(cached: Cache, tmp_path: Path, *rows: te.Row, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "load.csv"
    lines = [te.line_of(r, cached.dialect).text for r in rows]
    path.write_text(te.HEADERS[cached.dialect] + "\n" + "".join(lines))
    monkeypatch.setenv("TE_HIPBLASLT_ALGO_LOAD", str(path))
    return path


def launched(cached: Cache, calls: int = 3, ws: int = WS, beta: float = 0.0) -> list[Algo]:
    seen: list[Algo] = []
    for _ in range(calls):
        cached.gemm(KEY, ws, beta, seen.append)
    return seen


# What becomes of a row that is exactly right, and of one that TE has to put right.
@pytest.mark.parametrize("rank", [1, 3])  # one that needs workspace, and one that needs none
@pytest.mark.parametrize("dialect", list(te.HEADERS))
def test_only_rows_that_te_puts_right_stay_in_memory(  # type: ignore[no-untyped-def]
    dialect, rank, tmp_path, monkeypatch
) -> None:
    exact = cache(dialect=dialect)
    load(exact, tmp_path, row(exact, rank), monkeypatch=monkeypatch)
    assert {algo.rank for algo in launched(exact)} == {rank}
    assert exact.counts["queries"][spell(KEY)] == 3

    kept = cache(dialect=dialect)
    right = row(kept, rank)
    ours = Tuned(904, Gemm(*KEY[1:9], "-", 32, 32, 64, api="lt"), right.ws_min, WS_MAX,
                 OurAlgo(right.algo_id, rank, ""))  # fmt: skip
    made = te.te_row(ours)
    changed = right._replace(ws_min=made.ws_min, aidx=made.algo.aidx)
    load(kept, tmp_path, changed, monkeypatch=monkeypatch)
    assert {algo.rank for algo in launched(kept)} == {rank}
    assert kept.counts["queries"][spell(KEY)] == 1


def test_too_low_a_rank_another_build_and_too_little_workspace_lose_the_algorithm(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch
) -> None:
    cached = cache()
    load(cached, tmp_path, row(cached, 4, aidx=1, ws_min=0), monkeypatch=monkeypatch)
    assert {algo.rank for algo in launched(cached)} == {0}  # only two results are asked for
    elsewhere = cache(build="another")
    load(elsewhere, tmp_path, row(cached, 4, ws_min=0), monkeypatch=monkeypatch)
    assert {algo.rank for algo in launched(elsewhere)} == {0}
    small = cache()
    load(small, tmp_path, row(small, 1, ws_min=0), monkeypatch=monkeypatch)
    assert {algo.rank for algo in launched(small, ws=16)} == {0}


def test_direct_te_takes_an_id_beyond_its_list_and_asks_no_heuristic(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch
) -> None:
    cached = cache(direct=True)
    load(cached, tmp_path, row(cached, 10, aidx=0, ws_min=0), monkeypatch=monkeypatch)
    assert {algo.rank for algo in launched(cached)} == {10}
    assert not cached.counts["queries"]


def test_ws_min_above_the_need_stores_and_asks_at_every_gemm(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    cached = cache()
    load(cached, tmp_path, row(cached, 3, ws_min=4096), monkeypatch=monkeypatch)
    launched(cached, 4)
    assert cached.counts["queries"][spell(KEY)] == cached.counts["stores"][spell(KEY)] == 4


def test_tuning_an_accumulating_gemm_adds_to_the_result_at_every_launch(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TE_HIPBLASLT_TUNING_RUN_COUNT", "2")
    cached = cache(count=5)
    assert len(launched(cached, calls=1, beta=1.0)) == 5 * 3 + 1
    assert len(launched(cached, calls=1, beta=0.0)) == 1  # the same key: beta is not in it


def test_te_v1_reads_beyond_a_short_list_and_te_v2_does_not(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TE_HIPBLASLT_TUNING_RUN_COUNT", "1")
    with pytest.raises(Unsuitable):
        launched(cache(dialect="te-v1"))
    launched(cache(dialect="te-v2"))


def test_te_v2_finds_no_bf16_row_where_its_stack_holds_a_scale_mode(tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = "import transformer_engine_torch as t; from fake_te_cache import spell; import torch;" \
           "x = torch.ones(16, 16); t.generic_gemm(x, True, x, False, None, None, None, None, " \
           "t.DType.kBFloat16, False, None, False, x, 64, False, False, beta=0.0);" \
           "print([k.mode for k, _ in t.CACHE.rows])"  # fmt: skip
    env = environment(tmp_path, {"stack": 3, "us": 0})
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[3]", done.stderr[-500:]


@pytest.mark.parametrize("dialect", list(te.HEADERS))
def test_saved_is_all_that_was_loaded_and_a_kill_loses_it(dialect, tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import os, sys, torch; import transformer_engine.pytorch as te;"
        "lin = te.Linear(32, 64, bias=False); lin(torch.ones(48, 32, dtype=torch.bfloat16));"
        "sys.argv[1:] == ['kill'] and os.kill(os.getpid(), 9)"
    )
    env = environment(tmp_path, {"us": 1, "dialect": dialect, "te": 1 if dialect == "te-v1" else 2})
    cached = cache(dialect=dialect)
    other = row(cached, 2, m=80, ldd=80)  # a GEMM that is never run
    path = tmp_path / "load.csv"
    path.write_text(te.HEADERS[dialect] + "\n" + te.line_of(other, dialect).text)
    saved = tmp_path / "saved-%i.csv"
    env |= {"TE_HIPBLASLT_ALGO_LOAD": str(path), "TE_HIPBLASLT_ALGO_SAVE": str(saved)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
    (made,) = tmp_path.glob("saved-*.csv")
    assert (made.name == "saved-%i.csv") == (dialect == "te-v1")
    assert {r.m for r in te.read(made.read_text()).rows} == {64, 80}
    made.unlink()
    done = subprocess.run([sys.executable, "-c", code, "kill"], env=env, check=False,
                          capture_output=True)  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert next(tmp_path.glob("saved-*.csv")).read_bytes() == b""


def in_memory(
    data: bytes, dialect: str, monkeypatch: pytest.MonkeyPatch, path: Path
) -> list[te.Row] | None:
    """The rows that the fake has loaded, as te.Row; None where it threw."""
    path.write_bytes(data)
    monkeypatch.setenv("TE_HIPBLASLT_ALGO_LOAD", str(path))
    cached = cache(dialect=dialect, dev_caps=[904, 905])
    try:
        cached.start()
    except Unsuitable:
        return None
    return [
        te.Row(
            *k[:10],
            k.lda,
            k.ldb,
            k.ldd,
            k.epi,
            "f32",
            "float32",
            e.low,
            e.high,
            e.id,
            e.index,
            k.mode,
            k.aux_type,
        )
        for k, e in cached.rows
    ]


def possible(r: te.Row) -> bool:
    """Whether some GEMM of TE has this key, and can use the row."""
    least = (r.m if r.trans_a == "N" else r.k, r.k if r.trans_b == "N" else r.n, r.m)
    bias = r.bias_type in ("float32", "float16", "bfloat16") if r.fp8 else r.bias_type == "-"
    mode = r.scale_mode == 0 or r.fp8
    aux = r.aux_type == "-" or (r.fp8 and "gelu" in r.epi)
    sizes = min(r.m, r.n, r.k) > 0 and all(
        x >= y for x, y in zip((r.lda, r.ldb, r.ldd), least, strict=True)
    )
    return sizes and bias and mode and aux and r.aidx >= 0


@pytest.mark.parametrize("dialect", list(te.HEADERS))
def test_what_the_lint_calls_clean_te_uses_and_the_other_way_round(  # type: ignore[no-untyped-def]
    dialect, tmp_path, monkeypatch
) -> None:
    rng = random.Random(5)
    texts = [p.read_bytes() for p in sorted(FIXTURES.glob("*.csv"))]
    texts += [damage(GOOD[dialect], rng) for _ in range(1500)]
    clean = 0
    for data in texts:
        found = in_memory(data, dialect, monkeypatch, tmp_path / "t.csv")
        try:
            # TE stops reading after the last number.
            text = re.sub(r"(?m)^((?:[^,\n]*,)+\d+) [^,\n]*$", r"\1", data.decode())
            meant = te.read(text).rows if te.detect(text) == dialect else None
        except (TableError, UnicodeDecodeError):
            meant = None
        used = meant is not None and found == meant and all(map(possible, meant))
        sound = not has_errors(lint(data, dialect))
        assert sound <= used, data
        # The lint also refuses what may be meant otherwise: bytes that are no text, a second header
        # (a row of GPU 0), two rows on one line.
        if used and not sound:
            assert b"\0" in data or any(len(line.split(b",")) > 24 for line in data.split(b"\n")), (
                data
            )
        clean += sound
    assert clean > 80
