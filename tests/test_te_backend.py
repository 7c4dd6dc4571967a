"""The backend te and its worker over the fake Transformer Engine, of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from te_on_cpu import HERE, TeOnCpu, environment

from gemmtune import machine
from gemmtune.backends import te_call
from gemmtune.backends.te import PROBES, Te
from gemmtune.capture import te_saved
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm

ISSUED = """
import sys
sys.path.insert(0, sys.argv[1])
import te_gpu, transformer_engine_torch as tex
from gemmtune.backends.te_call import Call
from gemmtune.dialects import te
from gemmtune.sweep import operands
from gemmtune.sweep.verify import Checker
te_gpu.TOKENS, te_gpu.HIDDEN, te_gpu.FFN = 48, 32, 64
for gemm in te_gpu.gemms():
    call, o = Call(gemm), operands.draw(gemm, 0)
    before = len(tex.CACHE.rows)
    launch = lambda o: call.run(call.prepare(o), o)
    wrong = Checker(gemm, launch, o, 0).whole(launch)
    assert not wrong, (gemm, wrong)
    new = [key for key, _ in tex.CACHE.rows[before:]]  # none where only beta is another
    for key in new:
        assert all(getattr(key, n) == getattr(gemm, n) for n in te.SAID), (gemm, key)
print(len(tex.CACHE.rows))
"""


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def make(**script: object) -> Te:
        for name, value in environment(tmp_path, {"us": 50.0, **script}).items():
            monkeypatch.setenv(name, value)
        return TeOnCpu(run_count=2)

    return make


@pytest.mark.parametrize(("dialect", "version"), [("te-v1", 1), ("te-v3", 2)])
def test_every_gemm_is_issued_as_asked_and_right(  # type: ignore[no-untyped-def]
    tmp_path, dialect, version
) -> None:
    env = environment(tmp_path, {"us": 0, "dialect": dialect, "te": version})
    words = [sys.executable, "-c", ISSUED, str(HERE / "gpu")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 12


@pytest.mark.parametrize(
    ("dialect", "version", "bias"), [("te-v1", 1, "bfloat16"), ("te-v2", 2, "float32")]
)
def test_a_te_is_known_by_what_it_saves_and_tunes_though_its_list_is_short(  # type: ignore[no-untyped-def]
    backend, dialect, version, bias
) -> None:
    te = backend(dialect=dialect, te=version, plant=[{"rank": 4, "speed": 0.2}])
    assert te.know() == (dialect, 904, bias)
    found = te.algos(PROBES[0])  # of 100 algorithms asked for there are 12
    assert found[0].aidx == 0 and 4 in [algo.aidx for algo in found]
    assert te.workspace_bytes(PROBES[0], found[1]) in (0, 4096, 8192)


def test_a_gemm_that_te_cannot_launch_like_the_job_is_refused(backend) -> None:  # type: ignore[no-untyped-def]
    te = backend(te=2)
    with pytest.raises(BackendError, match="gives this GEMM 65536 bytes of workspace"):
        te.algos(PROBES[0]._replace(ws_bytes=1 << 20))
    with pytest.raises(BackendError, match="not an algorithm of this backend"):
        te.launcher(PROBES[0], Algo(66, 0, "id=66 tile=24"))


def test_a_process_of_te_that_dies_costs_its_algorithm_alone(backend) -> None:  # type: ignore[no-untyped-def]
    te = backend(te=2)
    launch = te.launcher(PROBES[0], Algo(1, 0, "rank=0"))
    launch.child.kill()
    with pytest.raises(BackendError, match="ended with code -9"):
        launch.ask("run", 0)


def test_no_transformer_engine_is_said_in_one_line(backend) -> None:  # type: ignore[no-untyped-def]
    te = backend(te=2)
    os.environ["PYTHONPATH"] = str(HERE.parent)
    with pytest.raises(BackendError, match=r"Transformer Engine: .*cannot be imported here"):
        te.know()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"api": "gemmex"}, "through the Lt API"),
        ({"batch": 2}, "batched"),
        ({"trans_b": "T"}, "layout TT"),
        ({"lda": 96}, "contiguous"),
        ({"ldd": 96}, "contiguous"),
        ({"epi": "dgelubgrad"}, "epilogue"),
        ({"epi": "bias"}, "without a bias type"),
        ({"type_d": "float16"}, "mixed types"),
        ({"m": 0, "ldd": 0}, "never launched"),
    ],
)
def test_what_tes_entry_points_cannot_say_is_left_out(changed, reason) -> None:  # type: ignore[no-untyped-def]
    gemm: Gemm = PROBES[0]._replace(**changed)
    assert reason in str(te_call.unsupported(gemm))


def test_each_process_saves_its_own_table_unless_the_user_has_it_saved(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv(te_saved.ALGO_SAVE, raising=False)
    te_saved.save_beside(str(tmp_path))
    launcher = os.environ[te_saved.ALGO_SAVE]
    monkeypatch.setattr(os, "getpid", lambda: 7)
    te_saved.save_beside(str(tmp_path))
    assert os.environ[te_saved.ALGO_SAVE] != launcher
    monkeypatch.setenv(te_saved.ALGO_SAVE, "/elsewhere/mine.csv")
    te_saved.save_beside(str(tmp_path))
    assert os.environ[te_saved.ALGO_SAVE] == "/elsewhere/mine.csv"


@pytest.mark.skipif(any(g.vendor == "AMD" for g in machine.gpus()), reason="an AMD GPU is here")
def test_without_an_amd_gpu_the_next_step_is_named() -> None:
    with pytest.raises(BackendError, match="no AMD GPU is seen here: gemmtune doctor"):
        Te().know()
