"""The C API that cuBLASLt and hipBLASLt share, by ctypes: a library, the descriptors of one Gemm.

Calls the vendor's library; which names, numbers and sizes it uses is the vendor's table, a Vendor.
Every status is checked and named. What to try is decided in explore.py, when in lt.py.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from gemmtune.backends.base import Operands
from gemmtune.errors import BackendError
from gemmtune.gemm import UNBIASED, Gemm

Config = dict[str, int]  # an algorithm's settings by their names in Vendor.config, the id first


class Attribute(NamedTuple):
    """An attribute's number and its C type: the API refuses any other size."""

    number: int
    kind: type[Any]


class Vendor(NamedTuple):
    """What differs between the two vendors' libraries. Attributes go by the same names in both."""

    title: str
    prefix: str  # of the functions
    libraries: Sequence[str]  # sonames, the newest first
    missing: str  # what to do where none is loaded
    capability: str  # of its GPUs, as machine.Gpu spells it: a pattern of major and minor number
    algo_words: int  # 64-bit words in an algorithm's structure
    statuses: Mapping[int, str]
    ops: Mapping[str, int]  # N, T
    types: Mapping[str, int]
    compute: Mapping[str, int]
    epilogues: Mapping[str, int]
    layout: Mapping[str, Attribute]
    desc: Mapping[str, Attribute]
    preference: Mapping[str, Attribute]
    workspace_bytes: int  # a call's workspace where the Gemm does not know it
    heuristics: int  # results to ask for; the library returns what it has
    # An algorithm is its settings, or where the library has none its structure's words, id first.
    config: Mapping[str, Attribute] = MappingProxyType({})
    caps: Mapping[str, Attribute] = MappingProxyType({})
    clusters: Sequence[int] = ()  # cluster shapes worth a try; no capability tells them
    words: Sequence[str] = ()


_GEMM_TYPES = (c_int,) * 6  # compute, scale, A, B, C, D
_LAYOUTS = (c_void_p,) * 4  # A, B, C, D
_SET = (c_void_p, c_int, c_void_p, c_size_t)
_GET = (*_SET, c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "Create": (c_void_p,),
    "Destroy": (c_void_p,),
    "GetVersion": (c_void_p, c_void_p),
    "GetGitRevision": (c_void_p, c_void_p),
    "MatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutSetAttribute": _SET,
    "MatrixLayoutDestroy": (c_void_p,),
    "MatmulDescCreate": (c_void_p, c_int, c_int),
    "MatmulDescSetAttribute": _SET,
    "MatmulDescDestroy": (c_void_p,),
    "MatmulPreferenceCreate": (c_void_p,),
    "MatmulPreferenceSetAttribute": _SET,
    "MatmulPreferenceDestroy": (c_void_p,),
    "MatmulAlgoGetHeuristic": (*(c_void_p,) * 2, *_LAYOUTS, c_void_p, c_int, *(c_void_p,) * 2),
    "MatmulAlgoGetIds": (c_void_p, *_GEMM_TYPES, c_int, c_void_p, c_void_p),
    "MatmulAlgoInit": (c_void_p, *_GEMM_TYPES, c_int, c_void_p),
    "MatmulAlgoCheck": (*(c_void_p,) * 2, *_LAYOUTS, *(c_void_p,) * 2),
    "MatmulAlgoCapGetAttribute": _GET,
    "MatmulAlgoConfigSetAttribute": _SET,
    "MatmulAlgoConfigGetAttribute": _GET,
    "Matmul": (
        *(c_void_p,) * 4,  # handle, description, alpha, A
        *(c_void_p,) * 4,  # A's layout, B, B's layout, beta
        *(c_void_p,) * 4,  # C, C's layout, D, D's layout
        *(c_void_p, c_void_p, c_size_t, c_void_p),  # algorithm, workspace, its size, stream
    ),
}
MOST_IDS = 256


def find(names: Sequence[str], title: str, missing: str) -> ctypes.CDLL:
    """The library that torch has loaded: algorithm numbers hold for that build alone.

    Raises BackendError where torch has loaded none of those names.
    """
    import torch  # noqa: F401  (loads it)

    for name in names:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
        except OSError:
            continue
    raise BackendError(f"this torch has not loaded {title} ({', '.join(names)}): {missing}")


class Library:
    """A loaded library: its functions, by their names without the prefix, and its structures."""

    def __init__(self, vendor: Vendor, loaded: ctypes.CDLL) -> None:
        self.vendor, self.loaded = vendor, loaded
        self._functions: dict[str, Any] = {}
        self.algo_type: Any = type(
            "Algo", (ctypes.Structure,), {"_fields_": [("data", c_uint64 * vendor.algo_words)]}
        )
        fields = [
            ("algo", self.algo_type),
            ("workspace", c_size_t),
            ("state", c_int),
            ("waves", c_float),
            ("reserved", c_int * 4),
        ]
        self.result_type: Any = type("Result", (ctypes.Structure,), {"_fields_": fields})

    def function(self, name: str) -> Any:
        """The C function. Raises BackendError where this build has none of that name."""
        if name not in self._functions:
            symbol = self.vendor.prefix + name
            try:
                function = getattr(self.loaded, symbol)
            except AttributeError:
                raise BackendError(f"this build of {self.vendor.title} has no {symbol}") from None
            function.argtypes, function.restype = _SIGNATURES[name], c_int
            self._functions[name] = function
        return self._functions[name]

    def call(self, name: str, *args: Any) -> None:
        """Raises BackendError with the function's and the status's names."""
        self.judge(name, self.function(name)(*args))

    def judge(self, name: str, status: int) -> None:
        if status:
            known = self.vendor.statuses.get(status, f"unknown status {status}")
            raise BackendError(f"{self.vendor.prefix}{name}: {known}")

    def set(self, of: str, target: Any, attribute: Attribute, value: int) -> None:
        """Set an attribute: `of` is MatmulDesc, MatrixLayout, MatmulPreference, …"""
        buffer = attribute.kind(value)
        self.call(f"{of}SetAttribute", target, attribute.number, byref(buffer), _size(buffer))

    def get(self, of: str, target: Any, attribute: Attribute) -> int:
        buffer, written = attribute.kind(), c_size_t()
        args = (target, attribute.number, byref(buffer), _size(buffer), byref(written))
        self.call(f"{of}GetAttribute", *args)
        return int(buffer.value or 0)

    def get_all(self, of: str, target: Any, attribute: Attribute) -> list[int]:
        """All values of an attribute that is an array."""
        written = c_size_t()
        self.call(f"{of}GetAttribute", target, attribute.number, None, 0, byref(written))
        count = written.value // ctypes.sizeof(attribute.kind)
        if not count:
            return []
        buffer = (attribute.kind * count)()
        args = (target, attribute.number, byref(buffer), _size(buffer), byref(written))
        self.call(f"{of}GetAttribute", *args)
        return list(buffer)

    def settings(self, algo: Any) -> Config:
        """An algorithm's settings, read from its structure. Needs no device."""
        if self.vendor.words:
            return dict(zip(self.vendor.words, algo.data, strict=True))
        of = "MatmulAlgoConfig"
        return {name: self.get(of, byref(algo), at) for name, at in self.vendor.config.items()}

    def create(self, of: str, *args: Any) -> Owned:
        """A handle, a description, a layout or a preference."""
        made = c_void_p()
        self.call(f"{of}Create", byref(made), *args)
        return Owned(made, self.function(f"{of}Destroy"))


class Owned:
    """An object of the library's, destroyed with this one; pass `value` to functions."""

    def __init__(self, value: c_void_p, destroy: Any) -> None:
        self.value = value
        # At the end of the process the library may be gone already: then nothing is destroyed.
        weakref.finalize(self, destroy, value).atexit = False


class Pointers(NamedTuple):
    """Addresses that a description carries, 0 where there is none."""

    bias: int = 0  # or where the bias gradient goes
    gelu_in: int = 0
    a_scale: int = 0
    b_scale: int = 0


class Problem:
    """One Gemm in the library's terms: its layouts, its description, its preference.

    `somewhere` is an aligned address on the device: a heuristic looks at addresses' alignment and
    reads nothing.
    """

    def __init__(self, library: Library, handle: Owned, gemm: Gemm, somewhere: int) -> None:
        self.library, self.handle, self.gemm = library, handle, gemm
        vendor, g = library.vendor, gemm
        # A key of torch's operators does not say what workspace the library's call has.
        self.workspace_bytes = g.ws_bytes or (0 if g.seen else vendor.workspace_bytes)
        self._compute, self._scale = vendor.compute[g.comp], vendor.types[g.scale]
        a, b, d = (vendor.types[name] for name in (g.type_a, g.type_b, g.type_d))
        self.types = (self._compute, self._scale, a, b, d, d)
        self._a = self._layout(a, g.m, g.k, g.trans_a, g.lda, g.stride_a)
        self._b = self._layout(b, g.k, g.n, g.trans_b, g.ldb, g.stride_b)
        self._d = self._layout(d, g.m, g.n, "N", g.ldd, g.stride_d)
        self.layouts = tuple(x.value for x in (self._a, self._b, self._d, self._d))
        placed = Pointers(
            bias=somewhere * (g.epi not in UNBIASED),
            gelu_in=somewhere * ("gelu" in g.epi),
            a_scale=somewhere * g.fp8,
            b_scale=somewhere * g.fp8,
        )
        self.desc = self.description(placed)
        self._alpha, self._beta = c_float(1.0), c_float(1.0 if g.beta else 0.0)

    def _layout(self, kind: int, rows: int, columns: int, op: str, ld: int, stride: int) -> Owned:
        stored = (rows, columns) if op == "N" else (columns, rows)
        made = self.library.create("MatrixLayout", kind, *stored, ld)
        if self.gemm.batched:
            for name, value in (("batch", self.gemm.batch), ("stride", stride)):
                attribute = self.library.vendor.layout[name]
                self.library.set("MatrixLayout", made.value, attribute, value)
        return made

    def description(self, pointers: Pointers) -> Owned:
        """A description of the operation with these addresses."""
        g, vendor = self.gemm, self.library.vendor
        made = self.library.create("MatmulDesc", self._compute, self._scale)
        values = {
            "trans_a": vendor.ops[g.trans_a],
            "trans_b": vendor.ops[g.trans_b],
            "epilogue": vendor.epilogues[g.epi],
        }
        if g.bias_type != "-":
            values["bias_type"] = vendor.types[g.bias_type]
        if g.fp8 and "fast_accum" in vendor.desc:
            values["fast_accum"] = g.fast_accum
        if pointers.gelu_in:
            values["gelu_ld"] = -(-g.m // 8) * 8
        values |= {name: address for name, address in pointers._asdict().items() if address}
        for name, value in values.items():
            self.library.set("MatmulDesc", made.value, vendor.desc[name], value)
        return made

    def heuristic(self, wanted_count: int = 0) -> list[tuple[Any, int]]:
        """The library's own choices, its first one first: algorithm, and workspace it needs.

        As many as it has, or as are wanted. Raises BackendError where it has none.
        """
        library, vendor = self.library, self.library.vendor
        count = wanted_count or vendor.heuristics
        preference = library.create("MatmulPreference")
        wanted = {"workspace": self.workspace_bytes}
        if self.gemm.align:
            wanted |= {f"align_{x}": self.gemm.align for x in "abcd"}
        for name, value in wanted.items():
            if attribute := vendor.preference.get(name):  # not all vendors look at alignment
                library.set("MatmulPreference", preference.value, attribute, value)
        results, found = (library.result_type * count)(), c_int()
        args = (self.handle.value, self.desc.value, *self.layouts, preference.value)
        library.call("MatmulAlgoGetHeuristic", *args, count, results, byref(found))
        good = [r for r in results[: found.value] if r.state == 0]
        if not good:
            raise BackendError(f"{vendor.title} has no algorithm for {self.gemm}")
        return [(r.algo, r.workspace) for r in good]

    @cached_property
    def listed(self) -> list[tuple[Any, int]]:
        """All that the library lists: see `heuristic`. A list of thousands is asked for once."""
        return self.heuristic()

    @cached_property
    def needs(self) -> dict[bytes, int]:
        """The workspace of each algorithm that the library lists, by its structure."""
        return {bytes(algo): need for algo, need in reversed(self.listed)}

    def settings(self, algo: Any) -> Config:
        """An algorithm's settings, read from its structure."""
        return self.library.settings(algo)

    def ids(self) -> list[int]:
        """The algorithm numbers that the library has for these types."""
        count = c_int()
        found: Any = (c_int * MOST_IDS)()
        args = (self.handle.value, *self.types, MOST_IDS, found, byref(count))
        self.library.call("MatmulAlgoGetIds", *args)
        return sorted(found[: count.value])

    def blank(self, algo_id: int) -> Any:
        """An algorithm's structure with all settings at their defaults. Raises BackendError."""
        algo = self.library.algo_type()
        args = (self.handle.value, *self.types, algo_id, byref(algo))
        self.library.call("MatmulAlgoInit", *args)
        return algo

    def algo(self, config: Config) -> Any:
        """An algorithm's structure with these settings, which must be all. Raises BackendError."""
        vendor = self.library.vendor
        known = vendor.words or tuple(vendor.config)
        if set(config) != set(known):
            names = " ".join(f"{name}=…" for name in known)
            raise BackendError(f"not an algorithm of {vendor.title}, {names}: {config}")
        if vendor.words:
            words = (c_uint64 * vendor.algo_words)(*(config[name] for name in known))
            return self.library.algo_type(words)
        algo = self.blank(config["id"])
        for name, attribute in vendor.config.items():
            if name != "id":
                self.library.set("MatmulAlgoConfig", byref(algo), attribute, config[name])
        return algo

    def check(self, algo: Any) -> tuple[int, float]:
        """The workspace that it needs, and how many waves of the GPU it takes.

        Raises BackendError where it cannot run this problem.
        """
        result = self.library.result_type()
        args = (self.handle.value, self.desc.value, *self.layouts, byref(algo), byref(result))
        self.library.call("MatmulAlgoCheck", *args)
        self.library.judge("MatmulAlgoCheck", result.state)
        return int(result.workspace), float(result.waves)

    def bind(self, algo: Any, o: Operands, workspace: int, stream: int) -> tuple[Any, ...]:
        """The arguments of a launch over these operands (A is their w, B their x), and its
        description, which has to live as long."""
        g = self.gemm
        places = (o.bgrad if o.bias is None else o.bias, o.gelu_in, o.scale_w, o.scale_x)
        pointers = Pointers(*(0 if t is None else t.data_ptr() for t in places))
        desc = self.description(pointers) if any(pointers) else self.desc
        d = o.d.data_ptr()
        c = o.c.data_ptr() if g.beta and o.c is not None else d
        a, b, cl, dl = self.layouts
        args = (
            *(self.handle.value, desc.value, byref(self._alpha), o.w.data_ptr(), a),
            *(o.x.data_ptr(), b, byref(self._beta), c, cl, d, dl),
            *(byref(algo), workspace, self.workspace_bytes, stream),
        )
        return args, desc


def _size(buffer: Any) -> int:
    return ctypes.sizeof(buffer)
