"""The interposer over fakes of cuBLASLt, cuBLAS and the driver: counted, applied, timed, built."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import fake_lt
import interposer_job
import pytest
from fakes import cc, environment, fakes

from gemmtune.backends import base
from gemmtune.errors import BackendError
from gemmtune.interposer import build, client
from gemmtune.job import launch

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=fake_lt.FAKES)
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(vendor: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes(vendor, tmp_path_factory.mktemp("fakes"))


@pytest.mark.parametrize("scenario", interposer_job.SCENARIOS)
def test_in_a_job(scenario, vendor, folder):
    if vendor == "hipblaslt" and scenario in interposer_job.OF_CUBLAS:
        pytest.skip("of hipBLAS nothing is caught, and it has no such batches")
    env = environment(folder, GEMMTUNE_TEST_VENDOR=vendor)
    words = [sys.executable, HERE / "interposer_job.py", scenario, folder]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SANITIZERS = {
    "none": ((), (), 3000),
    "thread": (("-fsanitize=thread",), ("libtsan.so",), 200),
    "address": (("-fsanitize=address,undefined",), ("libasan.so", "libubsan.so"), 400),
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_threads_on_two_devices_count_exactly_whatever_the_others_do(name, vendor, tmp_path):
    """Another thread chooses, drains and forks; one captures graphs; the library errs at random."""
    flags, runtimes, calls = SANITIZERS[name]
    if (
        flags
        and subprocess.run(
            [*build.compiler(), *flags, "-x", "c", "-", "-o", tmp_path / "try"],
            input="int main(void){return 0;}",
            text=True,
            check=False,
            capture_output=True,
        ).returncode
    ):
        pytest.skip(f"this compiler has no {name} sanitizer")
    made = fakes(vendor, tmp_path / "fakes", *flags)
    kind = ["-DHIP"] * (vendor == "hipblaslt")
    main = cc(
        tmp_path / "main", *flags, *kind, "-DMAIN", HERE / "interposer_job.c", "-pthread", "-ldl"
    )
    found = [
        subprocess.run(
            [*build.compiler(), f"-print-file-name={runtime}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for runtime in runtimes
    ]
    env = {
        **os.environ,
        "LD_PRELOAD": ":".join((*found, str(made / build.NAME))),
        "TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1",
        "ASAN_OPTIONS": "detect_leaks=0",  # what is known of a GEMM is kept to the end
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    for one_in in (0, 20):  # calls that fail for no reason
        done = subprocess.run(
            [main, made / "libjob.so", "8", str(calls), str(one_in)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        seen, applied, unread, failed, violations = map(int, done.stdout.split())
        assert (seen + unread, failed, violations) == (8 * calls, 0, 0)
        assert bool(unread) is bool(one_in)
        assert 0 < applied < seen


def test_it_is_built_once_and_by_many_at_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(build.library())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and len(set(made)) == 1
    assert [p.name for p in made[0].parent.iterdir()] == [build.NAME]
    before = made[0].stat().st_mtime_ns
    assert build.library() == made[0] and made[0].stat().st_mtime_ns == before


def test_each_vendors_backend_has_its_own_build_to_preload(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = {name: base.preload(name) for name in ("cublaslt", "hipblaslt")}
    calls = {"cublaslt": b"cublasGemmEx\0", "hipblaslt": b"hipblasLtMatmul\0"}
    for name, path in made.items():
        found = path.read_bytes()
        assert [call in found for call in calls.values()] == [c == name for c in calls]
    assert base.preload("cpu") is None


def test_without_a_compiler_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BackendError, match=r"no C compiler .* apt install gcc"):
        build.library()


def test_a_cache_whose_path_ld_preload_cannot_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    with pytest.raises(BackendError, match=r"LD_PRELOAD cannot hold .* XDG_CACHE_HOME"):
        build.library()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendError, match=r"cannot write to the cache .*XDG_CACHE_HOME"):
        build.library()


def test_a_process_that_it_was_not_preloaded_into_is_told():
    with pytest.raises(BackendError, match=r"LD_PRELOAD"):
        client.InterposerApplier()


def test_a_jobs_own_preloaded_libraries_stay():
    base_env = {"LD_PRELOAD": "libjemalloc.so"}
    made = launch.environment("a:b", {}, "out", base_env, Path("/cache/libgemmtune.so"))
    assert made["LD_PRELOAD"] == "/cache/libgemmtune.so:libjemalloc.so"
    assert "LD_PRELOAD" not in launch.environment("a:b", {}, "out", base_env)


def test_only_backends_whose_calls_are_caught_preload_it(folder):
    assert base.preload("cpu") is None
    assert base.preload("cublaslt").name == build.NAME
