"""torch's GEMM kernels inside the job: intercepted, and translated to column-major BLAS terms.

The interception is an override at the dispatch key BackendSelect, which every call passes after
autograd and tensor subclasses (so DTensor and FSDP have been reduced to local tensors) and before
the device's kernel. Unlike a dispatch mode it costs other operators nothing, is seen from every
thread, and leaves torch.compile on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemmtune.gemm import Gemm

Native = Callable[..., Any]
Handle = Callable[[str, Native, tuple[Any, ...], dict[str, Any]], Any]

TYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8e4m3",
    torch.float8_e4m3fnuz: "float8e4m3",
    torch.float8_e5m2: "float8e5m2",
    torch.float8_e5m2fnuz: "float8e5m2",
}

# Overloads of aten operators that are GEMMs, by the operator whose arguments they take.
GEMM_OPS = {
    "mm": ("mm", "mm.out", "mm.dtype", "mm.dtype_out"),
    "addmm": ("addmm", "addmm.out", "addmm_", "addmm.dtype", "addmm.dtype_out"),
    "bmm": ("bmm", "bmm.out", "bmm.dtype", "bmm.dtype_out"),
    "baddbmm": ("baddbmm", "baddbmm.out", "baddbmm_", "baddbmm.dtype", "baddbmm.dtype_out"),
    "_scaled_mm": ("_scaled_mm", "_scaled_mm.out"),
    "_scaled_mm_v2": ("_scaled_mm_v2", "_scaled_mm_v2.out"),
    "_grouped_mm": ("_grouped_mm",),
}
# Matrix products that no Gemm can spell (vectors, integers, fused activations and attention,
# convolutions): counted and named, so that a report can say what it leaves out.
OTHER_OPS = {
    op: tuple(op + form for form in ("", ".out", "_"))
    for op in (
        *("addmv", "dot", "vdot", "addbmm", "_int_mm", "_addmm_activation", "_scaled_grouped_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_flash_attention_forward", "_efficient_attention_forward", "_trilinear"),
        *("convolution_overrideable", "mkldnn_convolution", "cudnn_convolution"),
        *("miopen_convolution", "slow_conv2d_forward", "_slow_conv2d_forward", "slow_conv3d"),
        *("_convert_weight_to_int4pack", "_weight_int4pack_mm", "_weight_int8pack_mm"),
    )
}
GROUPED = "_grouped_mm"


class _Thread(threading.local):
    inside = False


_thread = _Thread()


class Override:
    """Hands every GEMM call of this process to `handle`, until `remove()`.

    `handle(op, native, args, kwargs)` gets the operator's name, the job's own kernel, and the
    call's arguments; what it returns is what the caller gets. GEMMs called while `handle` runs are
    not handed to it again. One override at a time may be in place in a process.
    """

    def __init__(self, handle: Handle, others: bool = False) -> None:
        """`others` hands over OTHER_OPS too."""
        self._library = torch.library.Library("aten", "IMPL")
        families = {**GEMM_OPS, **(OTHER_OPS if others else {})}
        for op, overloads in families.items():
            for overload in overloads:
                if torch._C._dispatch_has_kernel(f"aten::{overload}"):
                    kernel = _kernel(op, overload, handle)
                    self._library.impl(overload, kernel, "BackendSelect", with_keyset=True)

    def remove(self) -> None:
        """Give torch its own kernels back."""
        self._library._destroy()


_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _kernel(op: str, overload: str, handle: Handle) -> Callable[..., Any]:
    name, _, form = overload.partition(".")
    redispatch = getattr(getattr(torch.ops.aten, name), form or "default")._handle.redispatch_boxed

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & _BELOW
        # Fake tensors (torch.compile traces with them) run no kernel of a device.
        if _thread.inside or args[0].is_meta:
            return redispatch(keys, *args, **kwargs)
        _thread.inside = True
        try:
            return handle(op, partial(redispatch, keys), args, kwargs)
        finally:
            _thread.inside = False

    return kernel


def signature(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What a translation depends on, cheap to build: calls with equal signatures are one Gemm.

    None for grouped products, whose group sizes are values and not shapes.
    """
    if len(args) == 2 and not kwargs:
        a, b = args
        return op, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype
    if op == GROUPED:
        return None
    return op, *map(_part, args), *map(_part, kwargs.items())


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_part(v) for v in value)
    return value  # type: ignore[no-any-return]


class Call(NamedTuple):
    """A GEMM call's tensors: d = alpha · x @ w + beta · c, or c as the bias of each row."""

    x: Tensor
    w: Tensor
    c: Tensor | None = None
    beta: float = 0.0
    alpha: float = 1.0
    out: Tensor | None = None
    out_type: torch.dtype | None = None
    scale_mode: int = 0
    fast_accum: int = 0

    @property
    def bias(self) -> bool:
        """Whether c is a bias vector that the library can add in its epilogue."""
        c = self.c
        return (
            c is not None
            and c.dim() == 1
            and self.x.dim() == 2
            and c.shape[0] == self.w.shape[-1]
            and c.is_contiguous()
            and self.beta == 1
            and self.alpha == 1
        )


def unpack(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The tensors of a call, by the schema of its operator."""
    out = kwargs.get("out")
    if op in ("mm", "bmm"):
        x, w = args[:2]
        return Call(x, w, out=out, out_type=_argument(args, kwargs, 2, "out_dtype"))
    if op in ("addmm", "baddbmm"):
        c, x, w = args[:3]
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        out_type = _argument(args, kwargs, 3, "out_dtype")
        return Call(x, w, c if beta else None, float(beta), float(alpha), out, out_type)
    if op == "_scaled_mm":
        scales = args[2], args[3]
        bias = _argument(args, kwargs, 4, "bias")
        fast = int(bool(_argument(args, kwargs, 7, "use_fast_accum")))
        out_type = _argument(args, kwargs, 6, "out_dtype") or args[0].dtype
    else:  # _scaled_mm_v2
        scales = args[2][0], args[5][0]
        bias = args[8]
        fast = int(bool(_argument(args, kwargs, 11, "use_fast_accum")))
        out_type = _argument(args, kwargs, 9, "out_dtype") or args[0].dtype
    x, w = args[:2]
    mode = _scale_mode(x, *scales)
    beta = 1.0 if bias is not None else 0.0
    return Call(x, w, bias, beta, 1.0, out, out_type, mode, fast)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _scale_mode(x: Tensor, scale_x: Tensor, scale_w: Tensor) -> int:
    """The Lt API's number for the scales' layout (cublasLtMatmulMatrixScale_t)."""
    if scale_x.numel() == 1 and scale_w.numel() == 1:
        return 0  # one float32 per tensor
    if scale_x.dtype == getattr(torch, "float8_e8m0fnu", None):
        return 2  # one e8m0 per 32 values
    if scale_x.dtype == torch.float8_e4m3fn:
        return 1  # one e4m3 per 16 values
    if scale_x.numel() == x.shape[0]:
        return 3  # one float32 per row
    return 4  # one float32 per 128 values


def translate(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Gemm, ...]:
    """The Gemms of a call: one, or one a group of a grouped product; none if it cannot be spelled.

    What cannot: complex and integer types, and grouped products whose group sizes lie on a GPU
    (reading them would stop the job's stream).
    """
    if op not in GEMM_OPS:
        return ()
    if op == GROUPED:
        return _grouped(*args[:3] if len(args) > 2 else (*args[:2], kwargs.get("offs")))
    call = unpack(op, args, kwargs)
    if any(t not in TYPES for t in (call.x.dtype, call.w.dtype, call.out_type or call.x.dtype)):
        return ()
    return (spell(op, call),)


def spell(op: str, call: Call) -> Gemm:
    """The Gemm of a call with its tensors' real strides, as torch's CUDA code calls the library.

    Row-major d = x @ w is column-major dᵀ = wᵀ · xᵀ, so w is the library's A. A column-major `out`
    turns the problem round. A matrix that is contiguous in neither direction is copied first, so
    its leading dimension is the copy's (aten/src/ATen/native/cuda/Blas.cpp).
    """
    x, w, out = call.x, call.w, call.out
    bias = call.bias
    if out is not None and _layout(out)[0] == "T":
        x, w, out, bias = w.mT, x.mT, out.mT, False
    n, k = x.shape[-2:]
    m = w.shape[-1]
    batch = x.shape[0] if x.dim() == 3 else 1
    trans_a, lda = _layout(w)
    trans_b, ldb = _layout(x)
    ldd = _layout(out)[1] if out is not None else m
    # Where a dimension is 1 the stride means nothing: torch passes the least that is allowed.
    if (m if trans_a == "T" else k) <= 1:
        lda = max(k if trans_a == "T" else m, 1)
    if (k if trans_b == "T" else n) <= 1:
        ldb = max(n if trans_b == "T" else k, 1)
    if n <= 1:
        ldd = m
    type_a, type_d = TYPES[w.dtype], TYPES[call.out_type or x.dtype]
    strided = batch > 1
    return Gemm(
        m=m,
        n=n,
        k=k,
        trans_a=trans_a,
        trans_b=trans_b,
        type_a=type_a,
        type_b=TYPES[x.dtype],
        type_d=type_d,
        bias_type=TYPES[call.c.dtype] if bias and call.c is not None else "-",
        lda=lda,
        ldb=ldb,
        ldd=max(ldd, 1),
        epi="bias" if bias else "-",
        comp="f64" if type_d == "float64" else "f32",
        beta=int(call.c is not None and not bias),
        batch=batch,
        stride_a=_batch_stride(w) if strided else 0,
        stride_b=_batch_stride(x) if strided else 0,
        stride_d=(out.stride(0) if out is not None else m * n) if strided else 0,
        fast_accum=call.fast_accum,
        scale_mode=call.scale_mode,
        api={"_scaled_mm_v2": "scaled_mm"}.get(op, op.lstrip("_")),
    )


def _layout(t: Tensor) -> tuple[str, int]:
    """Whether the library sees row-major `t` as it is (N) or transposed (T), and its ld."""
    rows, cols = t.shape[-2:]
    row_stride, col_stride = t.stride()[-2:]
    if t.dim() == 2:
        if t.is_contiguous():
            return "N", max(cols, 1)
        if t.t().is_contiguous():
            return "T", max(rows, 1)
    if col_stride == 1 and row_stride >= max(1, cols):
        return "N", row_stride
    if row_stride == 1 and col_stride >= max(1, rows):
        return "T", col_stride
    return "N", max(cols, 1)  # copied


def _batch_stride(t: Tensor) -> int:
    rows, cols = t.shape[-2:]
    row_stride, col_stride = t.stride()[-2:]
    kept = (col_stride == 1 and row_stride >= max(1, cols)) or (
        row_stride == 1 and col_stride >= max(1, rows)
    )
    return t.stride(0) if kept else rows * cols


def _grouped(x: Tensor, w: Tensor, offsets: Tensor | None) -> tuple[Gemm, ...]:
    """The groups of a grouped product: a 2-D operand is cut along the dimension of `offsets`."""
    if x.dtype not in TYPES or (offsets is not None and not offsets.is_cpu):
        return ()
    ends = offsets.tolist() if offsets is not None else []
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if x.dim() == 3 and w.dim() == 3:
        pairs = [(x[i], w[i]) for i in range(x.shape[0])]
    elif x.dim() == 2 and w.dim() == 3:
        pairs = [(x[a:b], w[i]) for i, (a, b) in enumerate(spans)]
    elif x.dim() == 3:
        pairs = [(x[i], w[:, a:b]) for i, (a, b) in enumerate(spans)]
    else:
        pairs = [(x[:, a:b], w[a:b]) for a, b in spans]
    return tuple(spell(GROUPED, Call(a, b)) for a, b in pairs)
