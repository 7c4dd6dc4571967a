"""Transformer Engine's algorithm cache for ROCm, modelled: how it loads, matches, tunes and saves.

From what rocm_gemm.cu of ROCm/TransformerEngine does (October 2024: te-v1; September 2025: te-v2;
PR 310: ids taken directly), observed by running its cache class on a CPU. It shares nothing with
gemmtune; its streams are those of te_oracle. te-v3's loader is not public: taken to be te-v2's.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from fake_hipblaslt_model import Algo, Library
from te_oracle import EPILOGUES, HEADERS, INT, LONG, SIZE, SPACE, TYPES, Stream

MOST_WS = 2**64 - 1
_TYPE_CODES = {"float32": 0, "float16": 2, "bfloat16": 14, "float8e4m3": 28, "float8e5m2": 29}
_TYPE_CODES["-"] = 0xFFFFFFFF
_EPILOGUE_CODES = dict(zip(("-", "bias", "geluaux", "geluauxbias"), (1, 4, 160, 164), strict=True))
_EPILOGUE_CODES |= {"dgelu": 192, "dgelubgrad": 208, "bgradb": 512}


class Key(NamedTuple):
    """What TE looks an algorithm up by: neither beta nor the batch."""

    dev_cap: int
    m: int
    n: int
    k: int
    trans_a: str
    trans_b: str
    type_a: str
    type_b: str
    type_d: str
    bias_type: str
    aux_type: str
    lda: int
    ldb: int
    ldd: int
    mode: int
    epi: str

    def packed(self) -> bytes:
        """The bytes by which a saved file is ordered: those of the struct, least ones first."""
        types = (_TYPE_CODES[t] for t in (self.type_a, self.type_b, self.type_d, self.bias_type))
        sizes = (self.m, self.n, self.k, self.lda, self.ldb, self.ldd)
        ops = (111 + (t == "T") for t in (self.trans_a, self.trans_b))
        numbers = (self.dev_cap, *types, *sizes, *ops, self.mode, _EPILOGUE_CODES[self.epi])
        return struct.pack(f"<{len(numbers)}I", *(n & 0xFFFFFFFF for n in numbers))


class Entry:
    """A row in memory; `algo` is None until a launch has found what its id stands for."""

    def __init__(self, number: int, index: int, low: int, high: int, algo: Algo | None = None):
        self.id, self.index, self.low, self.high, self.algo = number, index, low, high, algo

    def copy(self) -> Entry:
        return Entry(self.id, self.index, self.low, self.high, self.algo)


class Unsuitable(RuntimeError):
    """What TE throws out of a GEMM."""


def _env(name: str, default: int, least: int) -> int:
    """atoi, as TE reads its numbers: leading digits, else 0."""
    text = os.environ.get(name, "")
    if not text:
        return default
    digits = text.strip()
    count = 0
    while count < len(digits) and (digits[count].isdigit() or (count == 0 and digits[0] in "+-")):
        count += 1
    try:
        value = int(digits[:count])
    except ValueError:
        value = 0
    return max(value, least)


class Cache:
    def __init__(self, library: Library, made: dict[str, Any]) -> None:
        self.library, self.made, self.dialect = library, made, made["dialect"]
        self.rows: list[tuple[Key, Entry]] = []
        self.counts: dict[str, Counter[str]] = {
            "calls": Counter(),
            "queries": Counter(),
            "stores": Counter(),
            "launches": Counter(),
            "timed": Counter(),
        }
        self._save: Any = None
        self._started = False
        atexit.register(self._report)

    def start(self) -> None:
        """At the first GEMM: load, then truncate and rewrite SAVE with all that was loaded."""
        if not self._started:
            self._started = True
            self._load()
            self._rewrite()

    # ------------------------------------------------------------------------------------ a GEMM

    def gemm(self, key: Key, ws: int, beta: float, launch: Callable[[Algo], None]) -> None:
        """Choose an algorithm, and launch it once for the caller."""
        self.start()
        name, problem = spell(key), key[1:]
        self.counts["calls"][name] += 1
        found = self._find(key, ws, ws)
        entry = found.copy() if found else None
        if entry is None or entry.algo is None:
            entry = self._choose(key, ws, problem, entry, name, launch)
        assert entry.algo is not None
        self.counts["launches"][f"{name} id={entry.algo.id}"] += 1
        launch(entry.algo)

    def _choose(
        self,
        key: Key,
        ws: int,
        problem: tuple[Any, ...],
        entry: Entry | None,
        name: str,
        launch: Callable[[Algo], None],
    ) -> Entry:
        first = _env("TE_HIPBLASLT_ALGO_SELECTION", 0, 0)
        loops = _env("TE_HIPBLASLT_TUNING_RUN_COUNT", 0, 0)
        end = first + (_env("TE_HIPBLASLT_TUNING_ALGO_COUNT", 16, 1) if loops else 1)
        log = self.dialect == "te-v1" or _env("TE_HIPBLASLT_LOG_TUNING", 0, 0)
        has_id = entry is not None and entry.index >= 0
        if has_id and self.made["direct"]:
            assert entry is not None
            algo = self.library.by_id(problem, entry.id)
            if algo is not None and algo.ws <= ws:
                entry.algo = algo
                if entry.low != algo.ws:
                    entry.low = algo.ws
                    self._store(key, entry, name)
                return entry
        index = entry.index if has_id and entry is not None else -1
        listed = self.library.heuristic(problem, ws, max(end, index + 1))
        self.counts["queries"][name] += 1
        if has_id and not self.made["direct"]:
            assert entry is not None
            at = index if index < len(listed) else 0
            for _ in listed:
                if listed[at].id == entry.id:
                    entry.algo = listed[at]
                    if (entry.low, entry.index) != (listed[at].ws, at):
                        entry.low, entry.index = listed[at].ws, at
                        self._store(key, entry, name)
                    return entry
                at = (at + 1) % len(listed)
        if has_id and log:
            assert entry is not None
            print(f"[WARNING] Cannot find cached algoId {entry.id} in hipBLASLt results")
        if self.dialect == "te-v1" and end > len(listed) and loops:
            # It does not clamp: what lies there is no algorithm, and its launch fails.
            raise Unsuitable("hipBLASLt error: te-v1 launched beyond the list that was returned")
        end = min(end, len(listed))
        best = first
        if loops and first < end:
            best = self._tune(listed[first:end], first, loops, bool(log), name, launch)
        if not first <= best < end:
            raise Unsuitable("Unable to find any suitable algorithms")
        algo = listed[best]
        made = Entry(algo.id, best, algo.ws, ws, algo)
        self._store(key, made, name)
        return made

    def _tune(
        self,
        listed: list[Algo],
        first: int,
        loops: int,
        log: bool,
        name: str,
        launch: Callable[[Algo], None],
    ) -> int:
        """One launch to warm up, then `loops`; with beta each adds into the job's own result."""
        if log:
            print(f"[INFO] Perform hipBLASLt algo selection on GPU0 with {loops} loops")
        best, best_ns = first, None
        for rank, algo in enumerate(listed, first):
            self.counts["timed"][f"{name} id={algo.id}"] += loops + 1
            launch(algo)
            start = time.perf_counter_ns()
            for _ in range(loops):
                launch(algo)
            took = time.perf_counter_ns() - start
            if best_ns is None or took < best_ns:
                best, best_ns = rank, took
        if log:
            print(f"[INFO] Select hipBLASLt algo {best} with time {(best_ns or 0) // loops} ns")
        return best

    # ------------------------------------------------------------------------------------- memory

    def _find(self, key: Key, low: int, high: int) -> Entry | None:
        return next((e for k, e in self.rows if k == key and low <= e.high and high >= e.low), None)

    def _store(self, key: Key, made: Entry, name: str) -> None:
        self.counts["stores"][name] += 1
        low, high = made.low, made.high
        if low > high:
            raise Unsuitable("Invalid WS size")
        while (old := self._find(key, low, high)) is not None:
            if old.low <= low and old.high >= high:
                old.id, old.index, old.algo = made.id, made.index, made.algo
                old.low, old.high = made.low, made.high
                self._rewrite()
                return
            if high > old.high:
                low = old.high + 1
            elif low < old.low:
                high = old.low - 1
        before = self._find(key, (low - 1) & MOST_WS, low)
        if before is not None and before.id == made.id:
            before.algo, before.high = made.algo, high
            self._rewrite()
            return
        entry = Entry(made.id, made.index, low, high, made.algo)
        self.rows.append((key, entry))
        if self._save is not None:
            self._save.write(self._line(key, entry))

    # -------------------------------------------------------------------------------------- files

    def _load(self) -> None:
        path = os.environ.get("TE_HIPBLASLT_ALGO_LOAD", "")
        if not path:
            return
        try:
            with open(path, "rb") as f:
                data = f.read()
        except OSError:
            print(f"Could not load autotune results storage {path}", file=sys.stderr)
            return
        print(f"Loading autotune results from {path}")
        header, *lines = data.split(b"\n")
        if header != HEADERS[self.dialect]:
            wanted = HEADERS[self.dialect].decode()
            print(f"Incorrect algo storage legend. Expected {wanted}", file=sys.stderr)
            return
        self._left = {"ints": [None] * 4, "lds": [None] * 3, "mode": None, "tail": [0, 0, 0, 0]}
        for line in lines:
            line = line.strip(SPACE)
            if line and not line.startswith(b"#"):
                self._take(line)

    def _take(self, line: bytes) -> None:
        """One row. What a cell does not set keeps the value of the row before."""
        stream, left = Stream(line), self._left

        def numbers(kept: list[Any], limits: list[tuple[int, int]], last: bool = False) -> None:
            for i, limit in enumerate(limits):
                kept[i] = stream.number(kept[i], *limit)
                if not (last and i == len(limits) - 1):
                    stream.char()

        numbers(left["ints"], [INT] * 4)
        if left["ints"][0] not in self.made["dev_caps"]:
            return
        words = [stream.word() for _ in range(7 if self.dialect == "te-v3" else 6)]
        trans, types = words[:2], words[2:6]
        aux = words[6] if self.dialect == "te-v3" else b"-"
        numbers(left["lds"], [INT] * 3)
        if self.dialect != "te-v1":
            mode = [left["mode"]]
            numbers(mode, [INT])
            left["mode"] = mode[0]
        epi, comp, scale = (stream.word() for _ in range(3))
        numbers(left["tail"], [SIZE, SIZE, LONG, INT], last=True)
        ws_min, ws_max, number, index = left["tail"]
        if ws_min > ws_max:
            print(f"[WARNING] Invalid WS size at {line.decode(errors='replace')}")
            return

        def known(what: str, name: bytes, names: set[bytes]) -> str:
            if name not in names:
                raise Unsuitable(f"Invalid {what} name: {name.decode(errors='replace')}")
            return name.decode()

        mode_value = 0 if self.dialect == "te-v1" else left["mode"]
        if self.dialect != "te-v1":
            known("comp", comp, {b"f32"})
            if known("scale", scale, TYPES) != "float32" or mode_value not in range(6):
                return
        type_a, type_b, type_d = (known("type", t, TYPES) for t in types[:3])
        bias = known("bias_type", types[3], TYPES | {b"-"})
        aux_type = known("aux_type", aux, TYPES | {b"-"})
        trans_a, trans_b = (known("trans", t, {b"N", b"T"}) for t in trans)
        epilogue = known("epi", epi, EPILOGUES)
        if self.dialect == "te-v1":
            known("comp", comp, {b"f32"})
            if known("scale", scale, TYPES) != "float32":
                return
        key = Key(
            *left["ints"],
            *(trans_a, trans_b, type_a, type_b, type_d, bias, aux_type),
            *left["lds"],
            mode_value,
            epilogue,
        )
        if self._find(key, ws_min, ws_max):
            print("[WARNING] Duplicated/overlapped entry in algo cache")
            return
        self.rows.append((key, Entry(number, index, ws_min, ws_max)))

    def _rewrite(self) -> None:
        path = os.environ.get("TE_HIPBLASLT_ALGO_SAVE", "")
        if not path:
            return
        if self._save is not None:
            self._save.close()
        elif self.dialect != "te-v1":
            path = path.replace("%i", str(os.getpid()))
        else:
            print(f"Saving autotune results to {path}")
        self._path = path if self._save is None else self._path
        try:
            self._save = open(self._path, "wb")  # noqa: SIM115  (open as long as the process lives)
        except OSError:
            print(f"Could not open autotune results storage {self._path}", file=sys.stderr)
            return
        self._save.write(HEADERS[self.dialect] + b"\n")
        for key, entry in sorted(self.rows, key=lambda row: row[0].packed()):
            self._save.write(self._line(key, entry))

    def _line(self, key: Key, entry: Entry) -> bytes:
        types = (key.type_a, key.type_b, key.type_d, key.bias_type)
        cells: list[Any] = [*key[:4], key.trans_a, key.trans_b, *types]
        cells += [key.aux_type] * (self.dialect == "te-v3") + [key.lda, key.ldb, key.ldd]
        cells += [key.mode] * (self.dialect != "te-v1") + [key.epi, "f32", "float32"]
        cells += [entry.low, entry.high, entry.id, entry.index]
        return (",".join(map(str, cells)) + "\n").encode()

    def _report(self) -> None:
        """As static objects are destroyed when a process ends in order, and else not."""
        if self._save is not None:
            self._save.close()
        folder = os.environ.get("FAKE_TE_COUNTS")
        if folder and self._started:
            with open(os.path.join(folder, f"counts-{os.getpid()}.json"), "w") as f:
                json.dump(self.counts, f)


def spell(key: Key) -> str:
    types = f"{key.type_a}/{key.type_b}/{key.type_d}"
    return f"{key.m}x{key.n}x{key.k} {key.trans_a}{key.trans_b} {types} {key.bias_type} {key.epi}"
