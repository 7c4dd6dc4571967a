"""Files that a user names: read with errors in one line, written atomically (temporary file beside
them, fsync, rename)."""

from __future__ import annotations

import fcntl
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gemmtune.errors import TableError, UsageError


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, line ends and all. Raises UsageError or TableError."""
    return decode(read_bytes(path), str(path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file. Raises UsageError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from None


def decode(data: bytes, name: str) -> str:
    """The text of a table's bytes. Raises TableError naming the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        number = data.count(b"\n", 0, e.start) + 1
        raise TableError(
            f"{name}:{number}: byte {data[e.start]:#04x} is not UTF-8: is this a CSV file?"
        ) from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise UsageError if `write_text` to this path would fail: ahead of the work for it."""
    if is_special(path) and not os.path.isdir(path) and os.access(path, os.W_OK):
        return
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: name a file in a folder that you may write to")


def check_apart(*paths: str | os.PathLike[str]) -> None:
    """Raise UsageError where two of the paths are one file: what is read, and what is written."""
    seen: dict[str, str | os.PathLike[str]] = {}
    for path in paths:
        real = os.path.realpath(path)
        first = seen.get(real)
        seen[real] = path
        if first is not None and not is_special(path):
            both = str(path) if str(first) == str(path) else f"{first} and {path}"
            raise UsageError(f"{both} cannot be two files in one: name another")


@contextmanager
def hold(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other gemmtunes out of a folder; a process that is killed lets go of it.

    Raises UsageError where another one has it, or there is no such folder.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise UsageError(f"cannot read the folder {folder}: {e.strerror}") from None
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another gemmtune is writing to {folder}: wait for it, or name another -o"
                ) from None
        yield
    finally:
        os.close(fd)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically: temporary file beside it, fsync, rename.

    A link is followed; what is no plain file (/dev/stdout) is written as it is. Raises UsageError
    where it cannot be written, TableError where the text is no Unicode.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise TableError(f"cannot write {path}: {e.object[e.start]!r} is not text") from None
    try:
        if is_special(path):
            Path(path).write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}") from None


def set_aside(path: str | os.PathLike[str]) -> Path:
    """Rename a file or folder to NAME.old, .old2 and so on, so that what was measured is not lost.

    Its new path. Raises UsageError where it cannot be renamed.
    """
    number = 1
    while (aside := Path(f"{path}.old{number if number > 1 else ''}")).exists():
        number += 1
    try:
        os.rename(path, aside)
    except OSError as e:
        raise UsageError(f"cannot rename {path}: {e.strerror}") from None
    return aside


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether it is no plain file: a device, a pipe (a folder too, which no write gets into)."""
    return os.path.exists(path) and not os.path.isfile(path)


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # Not tempfile: its mode is 0600, and another user of the cluster is to read the table.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(fd)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_values(value: Any) -> Any:
    """A value of named tuples, mappings and sequences as JSON has it; None for nan and inf."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return json_values(value._asdict())
    if isinstance(value, Mapping):
        return {k: json_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(v) for v in value]
    return value
