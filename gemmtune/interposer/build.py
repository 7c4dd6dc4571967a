"""Builds the interposer with the C compiler found, once for each version of its source.

Reads the C files of this folder; writes the library into the user's cache folder. Any number of
processes may build at once. Needs no vendor's headers, and so no GPU.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs

from gemmtune.errors import BackendError

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Werror")  # for the tests: a user's compiler may know more of them
COMPILERS = ("cc", "gcc", "clang")
CXX_COMPILERS = ("c++", "g++", "clang++")
NAME = "libgemmtune.so"
HIP = "-DGEMMTUNE_HIP"  # of hipBLASLt in place of cuBLASLt


def compiler() -> list[str]:
    """The C compiler's words: $CC, else the first found. Raises BackendError."""
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(words[0]):
            return words
    raise BackendError(
        f"no C compiler for the interposer ({' '.join(named) or ', '.join(COMPILERS)}): install "
        "one, as in: apt install gcc"
    )


def cxx(*more: str) -> list[str]:
    """The C++ compiler's words: $CXX, else the first found; none where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = [named] if named else [[name] for name in (*CXX_COMPILERS, *more)]
    return next((words for words in found if shutil.which(words[0])), [])


def hip_library() -> Path:
    """The interposer of hipBLASLt; see `library`."""
    return library((HIP,))


def library(flags: Sequence[str] = ()) -> Path:
    """The interposer's path, built with these flags besides where it is not yet in the cache.

    Raises BackendError: no compiler, a source that it refuses, a cache that cannot be written or
    whose path LD_PRELOAD cannot hold.
    """
    digest = _digest(flags)
    folder = cache("interposer", digest)
    if any(c in str(folder) for c in " :"):
        raise BackendError(
            f"LD_PRELOAD cannot hold the path {folder}, for its blanks or colons: set "
            "XDG_CACHE_HOME to another folder"
        )
    return cached("interposer", digest, NAME, lambda out: compile_to(out, flags))


def cache(kind: str, digest: str) -> Path:
    """The folder of a library that is built from sources and settings of that digest."""
    return Path(platformdirs.user_cache_dir("gemmtune")) / kind / digest


def cached(kind: str, digest: str, name: str, make: Callable[[Path], None]) -> Path:
    """The library in its folder, built there first where it is not: `make` writes it to a path.

    Raises BackendError where the cache cannot be written, and what `make` raises.
    """
    folder = cache(kind, digest)
    made = folder / name
    if not made.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / name
                make(fresh)
                os.replace(fresh, made)
        except OSError as e:
            raise BackendError(
                f"cannot write to the cache {folder}: {e.strerror}: set XDG_CACHE_HOME to another "
                "folder"
            ) from None
    return made


def compile_to(out: Path, flags: Sequence[str] = ()) -> None:
    """Compile the library to `out`, with these flags besides. Raises BackendError."""
    sources = sorted(SOURCES.glob("*.c"))
    words = [*compiler(), *FLAGS, *flags, *map(str, sources), "-o", str(out), "-ldl"]
    compiled(words, "the interposer")


def compiled(words: Sequence[str], what: str) -> None:
    """Run a compiler. Raises BackendError with its first error."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"exit code {done.returncode}"
        raise BackendError(f"{words[0]} cannot build {what}: {reason}")


def _digest(flags: Sequence[str]) -> str:
    found = hashlib.sha256(
        " ".join((*FLAGS, *flags, platform.machine(), *platform.libc_ver())).encode()
    )
    for path in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
