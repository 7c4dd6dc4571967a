"""The kernels of capture in C++: they record what those in Python do, and leave torch alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.capture import noting
from gemmtune.capture.ops import UNNOTED, Recorder
from gemmtune.errors import BackendError
from gemmtune.interposer import build
from gemmtune.job import kernels

JOB = Path(__file__).parent / "noting_job.py"


@pytest.fixture(scope="session")
def module() -> Path:
    path = noting.library()
    if path is None:
        pytest.skip("this torch cannot hand out the kernel that is there")
    return path


@pytest.fixture
def recorder(module: Path) -> Iterator[Recorder]:
    one = Recorder()
    assert one._fast is not None
    yield one
    if one._fast is not None:
        one.remove()


def record(how: str | Path, **env: str) -> Any:
    words = [sys.executable, str(JOB), str(how)]
    done = subprocess.run(
        words, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def calls(recorder: Recorder) -> dict[tuple[int, ...], int]:
    return {tuple(row["gemm"][:3]): row["calls"] for row in recorder.rows()}


def test_rows_are_those_of_pythons_kernels_and_each_call_has_its_time(module: Path) -> None:
    rows, untranslated, timed = record(module)
    assert [rows, untranslated] == record("python")[:2] and timed
    found = {(row["site"], row["pass"], row["recompute"]) for row in rows}
    assert {("square", "dgrad", 0), ("block.0", "fprop", 1), ("own", "wgrad", 0)} <= found
    assert {"mm of complex64", "mm of sparse_coo"} <= {name.strip() for name in untranslated}


def test_the_source_compiles_without_warnings_and_runs_under_the_sanitizers(tmp_path: Path) -> None:
    made, flags = tmp_path / noting.NAME, ["-Wall", "-Wextra", "-Werror"]
    runtimes = [
        subprocess.check_output([*build.cxx(), f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if all(os.path.isabs(path) for path in runtimes):
        flags += ["-fsanitize=address,undefined", "-fno-sanitize=vptr"]
    folder = noting._torch()
    assert folder is not None
    build.compiled([*noting.words(folder), *flags, "-o", str(made)], "noting")
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    preload = {"LD_PRELOAD": ":".join(runtimes)} if len(flags) > 3 else {}
    assert record(made, **options, **preload)[:2] == record("python")[:2]


def test_calls_of_many_threads_are_all_counted(recorder: Recorder) -> None:
    def work() -> None:
        w = torch.randn(5, 7, requires_grad=True)
        for _ in range(200):
            (torch.randn(3, 5) @ w).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.rows()
    recorder.remove()
    assert calls(recorder) == {(7, 3, 5): 800, (7, 5, 3): 800}
    assert UNNOTED not in recorder.untranslated()


def test_a_product_inside_a_gemm_that_is_handled_is_not_told(recorder: Recorder) -> None:
    kernels.inside.add(threading.get_ident())
    torch.ones(2, 3) @ torch.ones(3, 4)
    kernels.inside.discard(threading.get_ident())
    kernels.inside.add(-1)  # another thread
    torch.ones(2, 3) @ torch.ones(3, 5)
    kernels.inside.discard(-1)
    assert calls(recorder) == {(5, 2, 3): 1}


def test_a_call_that_torch_refuses_raises_as_ever_and_is_not_noted(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(4, 5)
    assert recorder.rows() == []


def test_calls_of_both_kinds_of_kernel_keep_their_order(recorder: Recorder) -> None:
    seen = []
    x, c = torch.ones(2, 2), torch.ones(2, 2)
    for i in range(3):
        x @ x
        torch.addmm(c, x, x)
        if i == 1:
            seen += [call.signature[0] for call in recorder._in_order()]
    seen += [call.signature[0] for call in recorder._in_order()]
    assert seen == ["mm", "addmm"] * 3


def test_a_forked_child_begins_anew(recorder: Recorder) -> None:
    torch.ones(2, 3) @ torch.ones(3, 4)
    recorder.next_step()
    child = os.fork()
    if not child:
        recorder.forget()
        torch.ones(2, 3) @ torch.ones(3, 5)
        rows = recorder.rows()
        ok = calls(recorder) == {(5, 2, 3): 1} and [row["step"] for row in rows] == [0]
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert calls(recorder) == {(4, 2, 3): 1}


def test_after_it_nothing_is_noted_and_the_next_recorder_starts_at_nothing(module: Path) -> None:
    first = Recorder()
    torch.ones(2, 3) @ torch.ones(3, 4)
    first.remove()
    torch.ones(2, 3) @ torch.ones(3, 5)
    second = Recorder()
    torch.ones(2, 3) @ torch.ones(3, 6)
    second.remove()
    assert calls(first) == {(4, 2, 3): 1} and calls(second) == {(6, 2, 3): 1}
    assert "gemmtune" not in torch._C._dispatch_dump("aten::mm")


def test_it_is_built_once_and_said_so(module: Path, tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    noting.prepare(said.append)
    assert said == []  # it is there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        build, "compiled", lambda words, what: Path(words[-1]).write_bytes(module.read_bytes())
    )
    assert noting.load() is None
    noting.prepare(said.append)
    assert len(said) == 1 and "once for this torch" in said[0]
    assert noting.load() is not None
    noting.prepare(said.append)
    assert len(said) == 1


def test_without_a_compiler_one_line_says_that_python_does_it(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    said: list[str] = []
    noting.prepare(said.append)
    assert len(said) == 1
    assert "no C++ compiler (no-such-compiler)" in said[0] and "Recording works" in said[0]
    recorder = Recorder()
    torch.ones(2, 3) @ torch.ones(3, 4)
    recorder.remove()
    assert recorder._fast is None and calls(recorder) == {(4, 2, 3): 1}


def test_a_source_that_cannot_be_built_is_said_in_one_line(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(noting, "SOURCE", tmp_path / "noting.cpp")
    noting.SOURCE.write_text("#include <no_such_header.h>\n")
    with pytest.raises(BackendError, match=r"cannot build capture's C\+\+ part: .*no_such_header"):
        noting.library()


def test_a_torch_without_its_headers_or_too_old_is_left_to_python(tmp_path: Path) -> None:
    for text in (None, "class KernelFunction;"):
        if text:
            header = tmp_path / "torch" / "include" / noting.HEADER
            header.parent.mkdir(parents=True)
            header.write_text(text)
        else:
            (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").touch()
        code = "from gemmtune.capture import noting; noting.prepare(print); print(noting.library())"
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == "None\n"


def test_a_module_that_cannot_be_loaded_is_said_and_left_to_python(tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    broken = tmp_path / noting.NAME
    broken.write_text("not a library")
    monkeypatch.setattr(noting, "_made", lambda _: broken)
    assert noting.load() is None
    assert "C++ part" in capsys.readouterr().err
