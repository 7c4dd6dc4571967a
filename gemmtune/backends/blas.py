"""cuBLAS's own GEMM call, for Gemms that came through it: the default that a job's call had.

Which algorithm it takes cannot be asked, so it is launched and timed as it is. Numbers and
signatures are those of cublas_api.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_longlong, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any

from gemmtune.backends import lt_api
from gemmtune.backends.base import Operands
from gemmtune.backends.lt import Prepared
from gemmtune.backends.lt_api import Library, Vendor
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm

if TYPE_CHECKING:
    import torch

PLAIN = Algo(0, 0, "plain")  # whatever such a call takes
LIBRARIES = ("libcublas.so.13", "libcublas.so.12")
DEFAULT_TENSOR_OP = 99  # CUBLAS_GEMM_DEFAULT_TENSOR_OP, which torch passes

_OPERAND = (c_void_p, c_int, c_int)  # address, type, leading dimension
_HEAD = (c_void_p, *(c_int,) * 5, c_void_p)  # handle, ops, m, n, k, alpha
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "Create_v2": (c_void_p,),
    "SetStream_v2": (c_void_p, c_void_p),
    "SetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    "GemmEx": (*_HEAD, *_OPERAND, *_OPERAND, c_void_p, *_OPERAND, c_int, c_int),
    "GemmStridedBatchedEx": (
        *_HEAD,
        *(*_OPERAND, c_longlong) * 2,
        c_void_p,
        *(*_OPERAND, c_longlong),
        *(c_int,) * 3,
    ),
}


def default_of(gemm: Gemm) -> bool:
    """Whether such a call is the Gemm's default, and can be timed.

    One that accumulates does so in place, so that a second launch has other operands.
    """
    return gemm.seen and gemm.api != "lt" and not gemm.beta


class Blas:
    """The library with a handle of its own, on a stream, with a workspace. Raises BackendError."""

    def __init__(self, vendor: Vendor, loaded: ctypes.CDLL, stream: int) -> None:
        self._loaded, self._stream = loaded, stream
        self._handle = c_void_p()
        self._names = Library(vendor, loaded)
        self.call("Create_v2", byref(self._handle))

    def function(self, name: str) -> Any:
        """The C function. Raises BackendError where this build has none of that name."""
        function = getattr(self._loaded, f"cublas{name}", None)
        if function is None:
            raise BackendError(f"this build of cuBLAS has no cublas{name}")
        function.argtypes, function.restype = _SIGNATURES[name], c_int
        return function

    def call(self, name: str, *args: Any) -> None:
        self._names.judge(name, self.function(name)(*args))

    def prepare(self, gemm: Gemm, space: torch.Tensor) -> Prepared:
        """A launch of the Gemm with this workspace."""
        name = "GemmStridedBatchedEx" if gemm.batched else "GemmEx"
        return Prepared(
            self.function(name),
            lambda status: self._names.judge(name, status),
            lambda o: self._bind(gemm, o, space.data_ptr()),
        )

    def _bind(self, gemm: Gemm, o: Operands, workspace: int) -> tuple[Any, ...]:
        """The arguments of a call over these operands (A is their w, B their x)."""
        g, vendor = gemm, self._names.vendor
        # A new stream takes the workspace away, so it is set after it, as torch does.
        self.call("SetStream_v2", self._handle, self._stream)
        if g.ws_bytes:
            self.call("SetWorkspace_v2", self._handle, workspace, g.ws_bytes)
        alpha, beta = c_float(1.0), c_float(0.0)
        sides = [(o.w, g.type_a, g.lda, g.stride_a), (o.x, g.type_b, g.ldb, g.stride_b)]
        a, b, c = (
            (t.data_ptr(), vendor.types[kind], ld, *[stride] * g.batched)
            for t, kind, ld, stride in (*sides, (o.d, g.type_d, g.ldd, g.stride_d))
        )
        ops = vendor.ops[g.trans_a], vendor.ops[g.trans_b]
        head = (self._handle, *ops, g.m, g.n, g.k, byref(alpha), *a, *b, byref(beta), *c)
        more = (g.batch,) if g.batched else ()
        return (*head, *more, vendor.compute[g.comp], DEFAULT_TENSOR_OP), (alpha, beta)


def find() -> ctypes.CDLL:
    """The library that torch has loaded. Raises BackendError where it has loaded none."""
    return lt_api.find(LIBRARIES, "cuBLAS", "install a torch for CUDA 12 or later")
