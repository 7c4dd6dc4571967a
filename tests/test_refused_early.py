"""What is wrong with a request is said before the job starts."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from gemmtune.cli import main
from gemmtune.dialects import te

JOB = ["--", "python", "-c", "open('ran', 'w')"]


def test_a_backend_that_there_is_not_is_named_and_no_job_is_started(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["capture", "--backend", "cublas", *JOB])
    assert done.exit_code == 2 and "unknown backend 'cublas'" in done.output
    assert not Path("ran").exists()


def test_a_table_that_transformer_engine_would_die_of_starts_no_job(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = "904,8,8,8,T,N,bf16,bfloat16,bfloat16,-,8,8,8,-,f32,float32,0,9,1,0"
    Path("te.csv").write_text(f"{te.HEADERS['te-v1']}\n{row}\n")
    done = CliRunner().invoke(main, ["run", "te.csv", *JOB])
    assert done.exit_code == 2 and "te.csv:2: column type_a: 'bf16'" in done.output
    assert not Path("ran").exists()
