"""The interposer as Python in the job sees it: what it counted and timed, what it is to launch.

Calls the library that LD_PRELOAD put into this process. The C structures are those of gemmtune.h;
here alone they are translated to Gemm and Algo and back.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from ctypes import c_int32, c_int64, c_size_t, c_uint32, c_uint64
from typing import Any, ClassVar, NamedTuple

from gemmtune.backends import lt
from gemmtune.backends.blas import PLAIN
from gemmtune.backends.cublaslt import CublasLt
from gemmtune.backends.hipblaslt import HipblasLt
from gemmtune.backends.lt_api import Vendor
from gemmtune.errors import BackendError
from gemmtune.gemm import LIBRARY_APIS, Algo, Gemm
from gemmtune.job.apply import Launches

MODE_ON, MODE_TIME = 1, 2
REASONS = (
    "",
    "the library would not tell an attribute of the call",
    "calls that no table can spell",
    "more GEMMs than can be kept",
    "the algorithm needs more workspace than the call has",
    "the library refused the algorithm",
    "no event to time with",
    "captured into a graph",
)
UNSEEN = REASONS[1:4]  # the call was not counted as any Gemm's
FALLBACKS = (1, 3, 4, 5)  # of REASONS: the call might have been launched otherwise
GRAPHED = 7  # of REASONS, no fault: of all calls while times are taken, else of chosen ones
ROOM = 1024  # rows drained at a time

_SIZES = ("m", "n", "k")
_LENGTHS = ("lda", "ldb", "ldd", "stride_a", "stride_b", "stride_d")
_NAMED = ("trans_a", "trans_b", "type_a", "type_b", "type_d", "bias_type", "epi", "comp", "scale")
_NUMBERS = ("beta", "batch", "fast_accum", "scale_mode", "align")
_NO_BIAS = -1


class Key(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_uint64) for name in _SIZES),
        *((name, c_int64) for name in _LENGTHS),
        ("ws_bytes", c_uint64),
        *((name, c_int32) for name in (*_NAMED, *_NUMBERS, "api", "unused")),
    ]


def row_type(vendor: Vendor) -> Any:
    """The C structure Row: a key, and an algorithm's settings or the halves of its words."""
    settings = c_uint32 * (len(vendor.config) or 2 * vendor.algo_words)
    fields = [("key", Key), ("settings", settings), ("unused", c_uint32)]
    return type("Row", (ctypes.Structure,), {"_fields_": fields})


class Trail(ctypes.Structure):
    _fields_: ClassVar = [("calls", c_uint64), ("launched", c_uint64 * 64)]


def launch_type(algo_words: int) -> Any:
    """The C structure Launch, for a vendor whose algorithms have so many 64-bit words."""
    fields = [
        ("key", Key),
        ("algo", c_uint64 * algo_words),
        *((name, c_uint64) for name in ("id", "applied", "calls", "timed", "time_ns")),
    ]
    return type("Launch", (ctypes.Structure,), {"_fields_": fields})


class Record(NamedTuple):
    """Calls of one Gemm by one algorithm since the last look.

    `applied`: the algorithm was chosen; else it is what the job itself gave, None where it gave
    none. `time_us` is the sum over the `timed` of the calls, which may be others than those
    counted now: they are timed when they have completed. `id` is one for each Gemm and algorithm.
    """

    id: int
    gemm: Gemm
    algo: Algo | None
    applied: bool
    calls: int
    timed: int
    time_us: float


class Translation:
    """Between a vendor's numbers and the names in a Gemm."""

    def __init__(self, vendor: Vendor) -> None:
        types = {"float64": vendor.types.get("float64", 1), **vendor.types}
        numbers: dict[str, dict[str, int]] = {name: types for name in _NAMED if "type" in name}
        numbers["bias_type"] = {"-": _NO_BIAS, **types}
        numbers["scale"] = types
        numbers["trans_a"] = numbers["trans_b"] = dict(vendor.ops)
        numbers["epi"] = dict(vendor.epilogues)
        numbers["comp"] = dict(vendor.compute)
        self._numbers = numbers
        self._names = {f: {v: k for k, v in known.items()} for f, known in numbers.items()}

    def key(self, gemm: Gemm) -> Key | None:
        """None where the Gemm is none of the interposer's: another API, or names without number."""
        values = gemm._asdict()
        try:
            values |= {name: self._numbers[name][values[name]] for name in _NAMED}
            values["api"] = LIBRARY_APIS.index(gemm.api)
        except (KeyError, ValueError):
            return None
        return Key(**values)

    def gemm(self, key: Key) -> Gemm | None:
        """None where a table has no name for one of the call's numbers."""
        values = {name: int(getattr(key, name)) for name in Gemm._fields}
        try:
            names = {name: self._names[name][values[name]] for name in _NAMED}
        except KeyError:
            return None
        return Gemm(**{**values, **names, "api": LIBRARY_APIS[key.api]})  # type: ignore[arg-type]


class Interposer:
    """The interposer in this process. Raises BackendError where it was not preloaded."""

    def __init__(self, backend: lt.Lt) -> None:
        loaded = ctypes.CDLL(None)
        try:
            self._mode = loaded.gemmtune_mode
            self._choose = loaded.gemmtune_choose
            self._drain = loaded.gemmtune_drain
            self._faults = loaded.gemmtune_faults
            self._trail = loaded.gemmtune_trail
        except AttributeError:
            raise BackendError(
                "the interposer is not in this process: something took it out of LD_PRELOAD"
            ) from None
        self._mode.argtypes, self._mode.restype = (c_uint32,), None
        self._choose.argtypes = (ctypes.c_void_p, c_size_t)
        self._drain.argtypes, self._drain.restype = (ctypes.c_void_p, c_size_t), c_size_t
        self._faults.argtypes, self._faults.restype = (ctypes.c_void_p, c_size_t), c_size_t
        self._trail.argtypes, self._trail.restype = (), ctypes.c_void_p
        self._threads = threading.local()
        self._backend, self._vendor = backend, backend.table()
        self._row = row_type(self._vendor)
        self._translation = Translation(self._vendor)
        self._launches = (launch_type(self._vendor.algo_words) * ROOM)()
        self._spelled: dict[bytes, Gemm | None] = {}
        self._unpacked: dict[bytes, Algo | None] = {}
        self._chosen: dict[tuple[Gemm, tuple[int, ...]], Algo] = {}
        self._plain: dict[Gemm, Algo] = {}
        self.unspelled = 0  # calls drained that a Gemm has no name for

    def mode(self, on: bool, timed: bool = False) -> None:
        self._mode((MODE_ON | (MODE_TIME if timed else 0)) if on else 0)

    def calls(self) -> int:
        """How many calls this thread has launched."""
        try:
            return self._threads.trail.calls  # type: ignore[no-any-return]
        except AttributeError:
            self._threads.trail = Trail.from_address(self._trail())
            return self._threads.trail.calls  # type: ignore[no-any-return]

    def launched(self, since: int) -> tuple[int, ...]:
        """Ids of what this thread has launched since `calls` said so, the latest if many."""
        now = self.calls()
        ring = self._threads.trail.launched
        return tuple(ring[i % len(ring)] for i in range(max(since, now - len(ring)), now))

    def choose(self, choices: Mapping[Gemm, Algo]) -> None:
        """These choices replace all earlier ones. Those for other APIs' calls are passed over."""
        rows = []
        self._plain = {gemm: algo for gemm, algo in choices.items() if algo == PLAIN}
        for gemm, algo in choices.items():
            key = self._translation.key(gemm)
            if key is None or algo == PLAIN:
                continue
            settings = self._settings(algo)
            self._chosen[gemm, settings] = algo
            rows.append(self._row(key, settings))
        if self._choose((self._row * len(rows))(*rows), len(rows)):
            raise BackendError("no memory for the table in the job")

    def _settings(self, algo: Algo) -> tuple[int, ...]:
        """An algorithm's settings by their attributes' numbers, or the halves of its words.

        Raises BackendError.
        """
        known, config = self._vendor.config, lt.parse(algo.config)
        if set(known) | set(self._vendor.words) != set(config):
            raise BackendError(f"not an algorithm of {self._vendor.title}: {algo.config}")
        if self._vendor.words:
            words = [config[name] for name in self._vendor.words]
            return tuple(half for word in words for half in (word & 0xFFFFFFFF, word >> 32))
        numbers = [0] * len(known)
        for name, attribute in known.items():
            numbers[attribute.number] = config[name]
        return tuple(numbers)

    def drain(self) -> list[Record]:
        """What was launched, and what was timed, since the last drain."""
        records = []
        while True:
            count = self._drain(self._launches, ROOM)
            records += [self._record(launch) for launch in self._launches[:count]]
            if count < ROOM:
                return [record for record in records if record is not None]

    def _record(self, launch: Any) -> Record | None:
        at = bytes(launch.key)
        if at not in self._spelled:
            self._spelled[at] = self._translation.gemm(launch.key)
        gemm = self._spelled[at]
        if gemm is None:
            self.unspelled += launch.calls
            return None
        words = bytes(launch.algo)
        if launch.applied:
            settings = tuple((c_uint32 * (self._row.settings.size // 4)).from_buffer_copy(words))
            algo: Algo | None = self._chosen[gemm, settings]
        else:
            if words not in self._unpacked:
                self._unpacked[words] = self._backend.unpack(words) if any(words) else None
            algo = self._plain.get(gemm) or self._unpacked[words]
        applied = bool(launch.applied) or algo == PLAIN
        times = launch.timed, launch.time_ns / 1e3
        return Record(launch.id, gemm, algo, applied, launch.calls, *times)

    def faults(self) -> list[int]:
        """Calls since the start by place in REASONS."""
        counts = (c_uint64 * len(REASONS))()
        if self._faults(counts, len(REASONS)) != len(REASONS):
            raise BackendError("the interposer in this process is of another version of gemmtune")
        return list(counts)


LIBRARIES: dict[str, type[lt.Lt]] = {"cublaslt": CublasLt, "hipblaslt": HipblasLt}


def present(backend: str) -> Interposer:
    """The interposer of a backend in this process. Raises BackendError where it is not there."""
    interposer = Interposer(LIBRARIES[backend]())
    interposer.faults()
    return interposer


class InterposerApplier:
    """The applier of backends whose library's calls are caught."""

    backend: ClassVar[str] = "cublaslt"

    def __init__(self, timed: bool = False) -> None:
        self._interposer = present(self.backend)
        self._interposer.mode(True, timed)

    def choose(self, choices: Mapping[Gemm, Algo]) -> None:
        self._interposer.choose(choices)

    def drain(self) -> dict[tuple[Gemm, Algo | None], Launches]:
        """Times are those of the calls that completed, scaled to all."""
        found: dict[tuple[Gemm, Algo | None], tuple[int, int, float]] = {}
        for r in self._interposer.drain():
            at = r.gemm, r.algo if r.applied else None
            calls, timed, time_us = found.get(at, (0, 0, 0.0))
            found[at] = calls + r.calls, timed + r.timed, time_us + r.time_us
        return {
            at: Launches(calls, time_us / timed * calls if timed else 0.0)
            for at, (calls, timed, time_us) in found.items()
            if calls
        }

    def fallbacks(self) -> dict[str, int]:
        counts = self._interposer.faults()
        return {REASONS[i]: counts[i] for i in FALLBACKS if counts[i]}

    def graphed(self) -> int:
        return self._interposer.faults()[GRAPHED]

    def close(self) -> None:
        self._interposer.mode(False)
        self._interposer.choose({})


class HipApplier(InterposerApplier):
    """The same over hipBLASLt. Not yet run on an AMD GPU."""

    backend: ClassVar[str] = "hipblaslt"
