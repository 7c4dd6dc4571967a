"""check, convert and merge on the command line: what they print, write and exit with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gemmtune import table
from gemmtune.cli import main
from gemmtune.dialects import te
from gemmtune.gemm import Algo, Gemm
from gemmtune.table import Shape, Tuned

FIXTURES = Path(__file__).parent / "fixtures" / "te_csv"
GEMM = Gemm(64, 32, 16, "T", "N", "bfloat16", "bfloat16", "bfloat16", "-", 16, 16, 64, api="lt")
TUNED = Tuned(904, GEMM, 0, 2**25, Algo(7, 1, "7"), 9.0, 10.0)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def save(path: Path, *rows: Tuned, **provenance: object) -> Path:
    table.write(path, rows, Tuned, provenance)
    return path


def test_check_prints_one_line_a_finding_and_exits_with_1() -> None:
    file = FIXTURES / "v1_bad_rows.csv"
    result = run("check", file)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{file}:2: error: type_a='bf16': unknown name: TE throws")
    assert [int(line.split(":")[1]) for line in lines] == [2, 3, 4, 5, 6, 8, 8, 9, 10]
    assert result.stderr == "1 file: 8 errors, 1 warning\n"


def test_check_of_good_tables_exits_with_0_and_of_a_missing_one_with_2(tmp_path: Path) -> None:
    good = [FIXTURES / f"v{n}_good.csv" for n in (1, 2, 3)]
    result = run("check", *good)
    assert (result.exit_code, "3 files: 0 errors" in result.stderr) == (0, True)
    result = run("check", *good, tmp_path / "none.csv", FIXTURES / "v1_bom.csv")
    assert result.exit_code == 2
    assert "cannot read" in result.stderr
    assert "byte-order mark" in result.stdout
    assert run("check", tmp_path).exit_code == 2
    assert run("check").exit_code == 2


def test_check_writes_json(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff")
    findings = json.loads(
        run("check", FIXTURES / "v1_crlf.csv", tmp_path / "t.csv", "--json").stdout
    )
    assert set(findings[0]) == {"file", "line", "column", "value", "severity", "effect", "mend"}
    assert findings[0]["line"] == 1
    assert findings[0]["severity"] == "error"
    assert json.loads(run("check", FIXTURES / "v3_good.csv", "--json").stdout) == []


@pytest.mark.parametrize(
    ("gpu", "code"), [("gfx942", 0), ("gfx942:sramecc+:xnack-", 0), ("904", 0), ("gfx950", 1)]
)
def test_check_knows_the_gpu_by_either_name(gpu: str, code: int) -> None:
    assert run("check", FIXTURES / "v1_good.csv", "--gpu", gpu).exit_code == code


def test_check_refuses_a_gpu_and_a_dialect_that_it_does_not_know() -> None:
    assert "gfx942" in run("check", FIXTURES / "v1_good.csv", "--gpu", "MI300X").stderr
    assert run("check", FIXTURES / "v1_good.csv", "--dialect", "te-v9").exit_code == 2


def test_check_of_our_own_table_is_clean_only_where_te_is_not_meant_to_read_it(
    tmp_path: Path,
) -> None:
    path = save(tmp_path / "tuned.csv", TUNED._replace(dev_cap=0))
    result = run("check", path)
    assert (result.exit_code, "gemmtune convert FILE --to te-v1" in result.stdout) == (1, True)
    assert run("check", path, "--dialect", "gemmtune").exit_code == 0


@pytest.mark.parametrize("source", [1, 2, 3])
@pytest.mark.parametrize("to", ["te-v1", "te-v2", "te-v3", "gemmtune"])
def test_convert_and_back_is_the_same_to_the_byte(source: int, to: str, tmp_path: Path) -> None:
    good, there, back = FIXTURES / f"v{source}_good.csv", tmp_path / "there", tmp_path / "back"
    assert run("convert", good, "--to", to, "-o", there).exit_code == 0
    assert run("convert", there, "--to", f"te-v{source}", "-o", back).exit_code == 0
    assert back.read_bytes() == good.read_bytes()


def test_convert_writes_the_table_alone_to_stdout(tmp_path: Path) -> None:
    result = run("convert", FIXTURES / "v1_good.csv", "--to", "te-v2")
    assert result.stdout.startswith(te.HEADERS["te-v2"] + "\n904,")
    assert result.stderr == ""


def test_convert_refuses_a_table_with_errors_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("old")
    result = run("convert", FIXTURES / "v1_bad_rows.csv", "--to", "te-v2", "-o", out)
    assert result.exit_code == 1
    assert ":2: error: type_a='bf16'" in result.stderr
    assert "nothing written" in result.stderr
    assert (result.stdout, out.read_text()) == ("", "old")
    assert run("convert", tmp_path / "none.csv", "--to", "te-v2").exit_code == 2


def test_convert_refuses_rows_that_te_cannot_say_unless_told_to_drop_them(tmp_path: Path) -> None:
    batched = TUNED._replace(gemm=GEMM._replace(batch=8))
    path = save(tmp_path / "tuned.csv", batched, TUNED, stage="sweep")
    result = run("convert", path, "--to", "te-v1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{path}:3: error: batch 8" in result.stderr
    result = run("convert", path, "--to", "te-v1", "--drop")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [
        '# gemmtune {"stage": "sweep"}',
        "904,64,32,16,T,N,bfloat16,bfloat16,bfloat16,-,16,16,64,-,f32,float32,0,33554432,7,1",
    ]
    assert "batch 8" in result.stderr


def test_convert_never_writes_a_table_that_te_would_not_use(tmp_path: Path) -> None:
    path = save(tmp_path / "tuned.csv", TUNED._replace(dev_cap=900))  # an H100's number
    result = run("convert", path, "--to", "te-v1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no GPU that TE for ROCm is built for" in result.stderr
    assert run("convert", path, "--to", "te-v1", "--gpu", "gfx90a").exit_code == 0


def test_convert_weighs_gemms_that_te_cannot_tell_apart_by_their_calls(tmp_path: Path) -> None:
    accumulating = TUNED._replace(gemm=GEMM._replace(beta=1), algo=Algo(8, 1, "8"), time_us=8.0)
    path = save(tmp_path / "tuned.csv", TUNED, accumulating)
    shapes = tmp_path / "shapes.csv"
    table.write(shapes, [Shape(GEMM, calls=9.0), Shape(accumulating.gemm)], Shape, {})
    assert ",8,1\n" in run("convert", path, "--to", "te-v1").stdout
    result = run("convert", path, "--to", "te-v1", "--shapes", shapes)
    assert ",7,1\n" in result.stdout
    assert "the same GEMM to TE" in result.stderr


def test_merge_keeps_the_faster_row_and_tells_the_conflict(tmp_path: Path) -> None:
    slow = save(tmp_path / "0.csv", TUNED, machine={"library": "x"})
    fast = save(
        tmp_path / "1.csv",
        TUNED._replace(algo=Algo(8, 1, "8"), time_us=8.0),
        machine={"library": "x"},
    )
    out = tmp_path / "out.csv"
    result = run("merge", slow, fast, "-o", out)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "kept 8, the faster, 8 us against 9 us" in result.stderr
    assert "2 tables merged, 1 conflict" in result.stderr
    merged = table.read(out, Tuned)
    assert [r.algo.algo_id for r in merged.rows] == [8]
    assert merged.provenance == {"machine": {"library": "x"}}


def test_merge_refuses_other_builds_dialects_and_faulty_tables(tmp_path: Path) -> None:
    a = save(tmp_path / "a.csv", TUNED, machine={"library": "x"})
    b = save(tmp_path / "b.csv", TUNED, machine={"library": "y"})
    result = run("merge", a, b)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "the GEMM library is x in" in result.stderr
    assert run("merge", a, b, "--force").exit_code == 0
    assert run("merge", FIXTURES / "v1_good.csv", FIXTURES / "v2_good.csv").exit_code == 3
    result = run("merge", FIXTURES / "v1_good.csv", FIXTURES / "v2_good.csv", "--force")
    assert result.stdout.count("\n90") == 5
    result = run("merge", FIXTURES / "v1_good.csv", FIXTURES / "v1_bad_rows.csv")
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize("command", ["check", "convert", "merge"])
def test_the_example_in_the_help_runs(command: str, tmp_path: Path) -> None:
    shown = run(command, "--help").stdout
    example = re.search(r"Example:\s+gemmtune ([^#]+)", shown)
    assert example
    save(tmp_path / "tuned.csv", TUNED)
    if command == "check":
        shutil.copy(FIXTURES / "v1_good.csv", tmp_path / "tuned.csv")
    for rank in (0, 1):
        save(tmp_path / f"tuned-rank{rank}.csv", TUNED)
    done = subprocess.run(
        f"{sys.executable} -m gemmtune {' '.join(example[1].split())}",
        shell=True,  # as a user would: the example has a pattern
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
