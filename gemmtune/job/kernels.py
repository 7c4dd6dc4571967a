"""torch's GEMM kernels inside the job: intercepted, and translated to column-major BLAS terms.

The interception overrides the kernels of CPU and GPU themselves, where torch can hand out the one
that was there (torch.library.get_kernel), else it stands at the dispatch key BackendSelect above
them. Either way a call comes there after autograd and tensor subclasses (so DTensor and FSDP have
been reduced to local tensors). Unlike a dispatch mode it costs other operators nothing, is seen
from every thread, and leaves torch.compile on.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemmtune.gemm import Gemm
from gemmtune.job.files import complain

Native = Callable[..., Any]
Handle = Callable[[str, Native, tuple[Any, ...], dict[str, Any]], Any]
Note = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]

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
# Matrix products that no Gemm can spell (vectors, integers, quantised or packed weights, sparse
# ones, fused activations, attention, recurrence, convolutions): counted and named, so that a report
# can say what it leaves out. Operators that call one of GEMM_OPS inside are not among them: their
# GEMMs are seen (addbmm, mv of a batch, bilinear, cdist, einsum, attention by plain mathematics).
OTHER_OPS = (
    *("addmv", "addmv_", "dot", "vdot", "_int_mm", "_addmm_activation"),
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    *("_mixed_dtypes_linear", "_weight_int4pack_mm", "_weight_int8pack_mm"),
    *("_dyn_quant_matmul_4bit", "_cslt_sparse_mm", "_sparse_semi_structured_linear"),
    *("_sparse_semi_structured_mm", "_sparse_semi_structured_addmm"),
    *("mkldnn_linear", "mkldnn_linear_backward_input", "mkldnn_linear_backward_weights"),
    *("mkldnn::_linear_pointwise", "mkl::_mkl_linear", "mkldnn::_convolution_pointwise"),
    *("quantized::linear", "quantized::linear_dynamic", "onednn::qlinear_pointwise"),
    *("convolution", "convolution_backward"),
    *(
        f"{layer}{direction}"
        for layer in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
        for direction in ("", "_backward")
    ),
    *(
        f"_scaled_dot_product_{kind}_attention{direction}"
        for kind in ("flash", "efficient", "cudnn", "fused")
        for direction in ("", "_for_cpu")  # their backward is one operator a call too: not counted
    ),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
    "_efficient_attention_forward",
)
GROUPED = "_grouped_mm"


inside: set[int] = set()  # threads that are handling a GEMM
# Keys of a device's own kernels. An override there is handed the arguments alone, where one at
# BackendSelect needs the call's keys to find the kernel below, and fake tensors never come there.
_KEYS = (
    *("CPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU"),
    *("CUDA", "SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA"),
)
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class Override:
    """Hands every GEMM call of this process to `handle`, until `remove()`.

    `handle(op, native, args, kwargs)` gets the operator's name, the job's own kernel, and the
    call's arguments; what it returns is what the caller gets. An in-place form comes as its out
    form: `kwargs["out"]` is where the result must be written, and `handle` must return it. GEMMs
    called while `handle` runs are not handed to it again. Where `handle` raises, the call goes
    through as the job made it: `faults` counts that, and the first is told on stderr. One
    override at a time may be in place in a process.
    """

    def __init__(
        self,
        handle: Handle | Note,
        others: bool = False,
        watch: bool = False,
        but: Collection[tuple[str, str]] = (),
        begin: Callable[[], Any] = perf_counter,
        since: Callable[[Any], Any] | None = None,
    ) -> None:
        """`others` hands over OTHER_OPS too.

        With `watch` the calls go through as they are, and handle(op, args, kwargs, spent) is
        told of each when its kernel has returned; GEMMs inside other GEMMs are not told, and of
        OTHER_OPS only how often they ran is kept, in `counts`.
        `spent` is since(begin()), asked before and after the kernel: its seconds by default.
        `but` names kernels that stay as they are, by overload and dispatch key.
        """
        self.faults = 0
        self.counts: Counter[str] = Counter()
        self._watch = watch
        self._but = but
        self._begin, self._since = begin, since or (lambda began: perf_counter() - began)
        self._handle = handle
        self._libraries: dict[str, torch.library.Library] = {}
        try:
            for op, overloads in GEMM_OPS.items():
                for overload in overloads:
                    self._add(op, f"aten::{overload}")
            for name in OTHER_OPS if others else ():
                space, _, op = name.rpartition("::")
                packet = getattr(getattr(torch.ops, space or "aten"), op, None)
                for form in packet.overloads() if packet is not None else ():
                    overload = op if form == "default" else f"{op}.{form}"
                    self._add(name.rstrip("_"), f"{space or 'aten'}::{overload}")
        except Exception:
            self.remove()
            raise

    def _add(self, op: str, overload: str) -> None:
        if not torch._C._dispatch_has_kernel(overload):  # a torch without it
            return
        space, _, name = overload.partition("::")
        if space not in self._libraries:
            self._libraries[space] = torch.library.Library(space, "IMPL")
        library = self._libraries[space]
        if not self._watch:
            kernel = self._handled(op)
        elif op not in GEMM_OPS:
            kernel = self._counted(op)
        else:
            kernel = self._watched(op)
        inplace = op in GEMM_OPS and name.endswith("_")
        out = f"{overload[:-1]}.out" if inplace else overload
        keys = _own_kernels(overload)
        for key in keys:
            if (name, key) in self._but:
                continue
            natives = native(overload, key), native(out, key)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells whoever overrides its kernel
                library.impl(name, partial(kernel, inplace, *natives), key)
        if not keys:
            chosen, outs = Natives(overload), Natives(out)

            def select(keyset: Any, *args: Any, **kwargs: Any) -> Any:
                call = chosen[keyset.raw_repr()]
                if keyset.has(torch._C.DispatchKey.Meta):
                    return call(*args, **kwargs)
                return kernel(inplace, call, outs[keyset.raw_repr()], *args, **kwargs)

            library.impl(name, select, "BackendSelect", with_keyset=True)

    # The kernels that calls come to: `call` is the job's own, `out` the one that writes
    # kwargs["out"] for it. Between a job's kernels this code is cold in the caches: so it is short.

    def _handled(self, op: str) -> Callable[..., Any]:
        handle: Any = self._handle

        def kernel(inplace: bool, call: Native, out: Native, /, *args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread in inside:
                return call(*args, **kwargs)
            if inplace:
                kwargs["out"] = args[0]
            inside.add(thread)
            try:
                return handle(op, out, args, kwargs)
            except Exception as error:
                if "out" in kwargs:  # it may have been written to, so there is no second try
                    raise
                result = call(*args, **kwargs)  # a fault of the call itself comes from here
                self._fault(op, error)
                return result
            finally:
                inside.discard(thread)

        return kernel

    def _watched(self, op: str) -> Callable[..., Any]:
        note: Any = self._handle
        begin, since = self._begin, self._since

        def kernel(inplace: bool, call: Native, out: Native, /, *args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread in inside:
                return call(*args, **kwargs)
            inside.add(thread)
            try:
                began = begin()
                result = call(*args, **kwargs)
                spent = since(began)
            finally:
                inside.discard(thread)
            try:
                if inplace:
                    kwargs["out"] = args[0]
                note(op, args, kwargs, spent)
            except Exception as error:
                self._fault(op, error)
            return result

        return kernel

    def _counted(self, op: str) -> Callable[..., Any]:
        counts = self.counts

        def kernel(inplace: bool, call: Native, out: Native, /, *args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread in inside:
                return call(*args, **kwargs)
            counts[op] += 1
            inside.add(thread)
            try:
                return call(*args, **kwargs)
            finally:
                inside.discard(thread)

        return kernel

    def _fault(self, op: str, error: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            complain(f"handling {op}", error)

    def remove(self) -> None:
        """Give torch its own kernels back."""
        while self._libraries:
            self._libraries.popitem()[1]._destroy()


def _own_kernels(overload: str) -> list[str]:
    """The keys of devices at which the overload has kernels that can be overridden one by one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    # torch.library knows no way to override a kernel for oneDNN's packed tensors.
    if not hasattr(torch.library, "get_kernel") or has(overload, "MkldnnCPU"):
        return []
    return [key for key in _KEYS if has(overload, key)]


def native(overload: str, key: str) -> Native:
    """The overload's kernel at a dispatch key: a direct call costs half of a second dispatch."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return partial(torch.library.get_kernel(overload, key).call_boxed, keys)


class Natives(dict[int, Native]):
    """The job's own kernels of an overload below BackendSelect, by a key set's raw bits."""

    def __init__(self, overload: str) -> None:
        super().__init__()
        space, _, name = overload.partition("::")
        name, _, form = name.partition(".")
        packet = getattr(getattr(torch.ops, space), name)
        self._redispatch = getattr(packet, form or "default")._handle.redispatch_boxed

    def __missing__(self, raw: int) -> Native:
        below = torch._C.DispatchKeySet.from_raw_repr(raw) & _BELOW
        self[raw] = call = partial(self._redispatch, below)
        return call


def signature(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What a translation depends on, cheap to build: calls with equal signatures are one Gemm.

    None for grouped products whose group sizes are values and not shapes, and for tensors without
    meaningful strides (sparse ones).
    """
    try:
        if len(args) == 2 and not kwargs:
            a, b = args
            if a.layout is not torch.strided or b.layout is not torch.strided:
                return None
            return op, (a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype)
        if op == GROUPED:
            return None
        return op, *map(_part, args), *map(_part, kwargs.items())
    except RuntimeError:
        return None


def arguments(signature: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Operator and arguments of a call of this signature, its tensors without data (meta)."""
    op, *parts = signature
    values = [_rebuild(part) for part in parts]
    named = [v for v in values if isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str)]
    return op, tuple(values[: len(values) - len(named)]), dict(named)


def _rebuild(part: Any) -> Any:
    if isinstance(part, tuple) and part and isinstance(part[0], torch.Size):
        shape, stride, dtype = part
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return tuple(_rebuild(v) for v in part) if isinstance(part, tuple) else part


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:  # sparse COO ones have strides all the same
            raise RuntimeError("no strides")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_part(v) for v in value)
    return value  # type: ignore[no-any-return]


class Call(NamedTuple):
    """A GEMM call's tensors: d = alpha · x @ w + beta · c, or c as the bias of each row."""

    x: Tensor
    w: Tensor
    c: Tensor | None = None
    beta: float = 0
    alpha: float = 1
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
    """The tensors of a call of mm, addmm, bmm, baddbmm or a scaled mm, by its operator's schema."""
    out = kwargs.get("out")
    if op in ("mm", "bmm"):
        x, w = args[:2]
        return Call(x, w, out=out, out_type=_argument(args, kwargs, 2, "out_dtype"))
    if op in ("addmm", "baddbmm"):
        c, x, w = args[:3]
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        out_type = _argument(args, kwargs, 3, "out_dtype")
        return Call(x, w, c if beta else None, beta, alpha, out, out_type)
    x, w = args[:2]
    if op == "_scaled_mm":  # torch 2.4 has everything after mat2 by keyword
        scales = _argument(args, kwargs, 2, "scale_a"), _argument(args, kwargs, 3, "scale_b")
        bias = _argument(args, kwargs, 4, "bias")
        out_type = _argument(args, kwargs, 6, "out_dtype")
        fast = _argument(args, kwargs, 7, "use_fast_accum")
    else:  # _scaled_mm_v2
        scales = args[2][0], args[5][0]
        bias = _argument(args, kwargs, 8, "bias")
        out_type = _argument(args, kwargs, 9, "out_dtype")
        fast = _argument(args, kwargs, 11, "use_fast_accum")
    mode = _scale_mode(x, *scales)
    beta = 0 if bias is None else 1
    return Call(x, w, bias, beta, 1, out, out_type or x.dtype, mode, int(bool(fast)))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _scale_mode(x: Tensor, scale_x: Tensor | None, scale_w: Tensor | None) -> int:
    """The Lt API's number for the scales' layout (cublasLtMatmulMatrixScale_t)."""
    if scale_x is None or scale_w is None or scale_x.numel() == scale_w.numel() == 1:
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

    What cannot: complex and integer types, sparse tensors, grouped products whose group sizes lie
    on a GPU (reading them would stop the job's stream), and calls that torch will refuse.
    """
    if op not in GEMM_OPS:
        return ()
    if op == GROUPED:
        return _grouped(args, kwargs)
    call = unpack(op, args, kwargs)
    return (spell(op, call),) if _spellable(call) else ()


def _spellable(call: Call) -> bool:
    x, w, c = call.x, call.w, call.c
    return (
        all(t.layout is torch.strided for t in (x, w, c) if t is not None)
        and all(t in TYPES for t in (x.dtype, w.dtype, call.out_type or x.dtype))
        and x.dim() == w.dim()
        and x.dim() in (2, 3)
        and x.shape[-1] == w.shape[-2]
        and x.shape[:-2] == w.shape[:-2]
    )


def spell(op: str, call: Call) -> Gemm:
    """The Gemm of a call with its tensors' real strides, as torch's CUDA code calls the library.

    Row-major d = x @ w is column-major dᵀ = wᵀ · xᵀ, so w is the library's A. A column-major `out`
    turns the problem round. A matrix that is contiguous in neither direction is copied first, so
    its leading dimension is the copy's (aten/src/ATen/native/cuda/Blas.cpp).
    """
    x, w, out = call.x, call.w, call.out
    bias = call.bias
    if out is not None and out.shape != (*x.shape[:-1], w.shape[-1]):
        out = None  # torch will resize it
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
        stride_d=(_batch_stride(out) if out is not None else m * n) if strided else 0,
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


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Gemm, ...]:
    """The groups of a grouped product: a 2-D operand is cut along the dimension of `offs`."""
    x, w = args[:2]
    offsets = _argument(args, kwargs, 2, "offs")
    out_type = _argument(args, kwargs, 4, "out_dtype")
    if offsets is not None and not offsets.is_cpu:
        return ()
    ends = offsets.tolist() if offsets is not None else []
    spans = list(zip([0, *ends], ends, strict=False))
    if x.dim() == 3 and w.dim() == 3:
        pairs = list(zip(x, w, strict=False))
    elif x.dim() == 2 and w.dim() == 3:
        pairs = [(x[a:b], each) for (a, b), each in zip(spans, w, strict=False)]
    elif x.dim() == 3:
        pairs = [(each, w[:, a:b]) for (a, b), each in zip(spans, x, strict=False)]
    else:
        pairs = [(x[:, a:b], w[a:b]) for a, b in spans]
    calls = [Call(a, b, out_type=out_type) for a, b in pairs]
    return tuple(spell(GROUPED, c) for c in calls) if all(map(_spellable, calls)) else ()
