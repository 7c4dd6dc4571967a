"""Joining what ranks recorded: the remarks, by rank files written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemmtune.capture.merge import merge
from gemmtune.capture.session import Session
from gemmtune.job import files, steps


def rank(number: int, **more: Any) -> dict[str, Any]:
    """A rank file's record of one step on a GPU, without GEMMs."""
    record = {
        "rank": number,
        "world": 2,
        "rows": [],
        "untranslated": {},
        "te": {},
        "waited": 1,
        "step_s": [0.1],
        "optimizers": {"AdamW": 2},
        "timed": False,
        "device": "cuda",
        "compiled": {"graphs": 0, "hidden": []},
        "gpu": {},
        "profile": None,
    }
    return record | more


def test_nothing_is_said_of_transformer_engine_where_it_was_not_asked() -> None:
    assert merge([rank(0), rank(1, te={"agree": 0, "differ": {}})]).remarks == []


def test_gemms_that_the_library_was_asked_for_as_te_was_are_counted_over_the_ranks() -> None:
    (said,) = merge([rank(i, te={"agree": 3 + i, "differ": {}}) for i in range(2)]).remarks
    assert said == "Transformer Engine was asked for 7 GEMMs, and the library for the same ones"


def test_each_gemm_that_differs_from_the_librarys_is_named_once_with_its_count() -> None:
    differ = {"8x8x8 TN float32 -> 8x8x16 TN float32 (k)": 2}
    ranks = [rank(0, te={"agree": 1, "differ": differ}), rank(1, te={"agree": 0, "differ": differ})]
    (said,) = merge(ranks).remarks
    assert "was asked for 5 GEMMs" in said and "but for 4: 8x8x8 TN" in said
    assert said.count("8x8x16 TN float32 (k) 4x") == 1


def test_times_of_a_gpus_calls_are_not_the_hosts_where_nothing_times_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(files, "save", lambda out, record: saved.append(record))
    monkeypatch.setattr(files, "at_exit", lambda function: None)
    monkeypatch.setattr(steps, "on_step", lambda *_: None)
    options = {"steps": 1, "warmup": 9, "stop": False, "dims": False, "optimizer": None}
    options |= {"profile": False, "time": True, "backend": None}  # no interposer
    session = Session(options, str(tmp_path))
    session._save()
    session._done.set()
    gemm = [8, 8, 8, "N", "N", *["float32"] * 3, "-", 8, 8, 8]
    row = {"gemm": gemm, "pass": "fprop", "recompute": 0, "site": "", "calls": 1, "step": 0}
    (made,) = merge([rank(0, rows=[{**row, "time_s": 0.5}], timed=saved[0]["timed"])]).rows
    assert made.time_us == 0
