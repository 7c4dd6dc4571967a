"""Linear and LayerNormMLP: the GEMMs that TE's modules launch, in forward and backward."""

import contextlib

import torch
import transformer_engine_torch as tex

from .. import cpp_extensions
from ..constants import TE_DType
from ..tensor.float8_tensor import Float8Tensor, Float8TensorStorage
from .base import get_workspace

STATE = {"fp8": False}


@contextlib.contextmanager
def autocast(enabled=True, recipe=None, amax_reduction_group=None):
    before, STATE["fp8"] = STATE["fp8"], enabled
    try:
        yield
    finally:
        STATE["fp8"] = before


def _gemm(
    a,
    b,
    layout,
    types,
    index,
    out=None,
    accumulate=False,
    grad=False,
    bias=None,
    dtype=None,
    rows=(),
):
    """One GEMM, by the entry point of the version; `types`: FP8 types of a and b, or None.

    `rows` are the dimensions that were flattened into a's rows.
    """
    dtype = dtype or torch.bfloat16
    if types is None:
        if tex.MADE["te"] == 1:
            more = {"bias": bias, "use_bias": bias is not None, "grad": grad, "layout": layout}
            more |= {"out": out, "accumulate": accumulate}
            return cpp_extensions.gemm(a, b, a.dtype, get_workspace(), **more)[0]
        more = {"out": out, "accumulate": accumulate, "grad": grad, "bias": bias}
        kind = out.dtype if out is not None else dtype
        return cpp_extensions.general_gemm(a, b, out_dtype=kind, layout=layout, **more)[0]
    (a, a_scale), (b, b_scale) = _quantize(a, types[0]), _quantize(b, types[1])
    kinds = [TE_DType[t] for t in types]
    if tex.MADE["te"] == 1:  # T,N over copies that TE has transposed
        a = a if layout[0] == "T" else a.t().contiguous()
        b = b if layout[1] == "N" else b.t().contiguous()
        scales = torch.ones(3), torch.ones(3)
        scales[0][index], scales[1][0] = a_scale, b_scale
        more = {"out": out, "accumulate": accumulate, "bias": bias, "use_bias": bias is not None}
        parts = (a, scales[0], index, kinds[0], b, scales[1], 0, kinds[1])
        return cpp_extensions.fp8_gemm(*parts, dtype, get_workspace(), **more)[0]
    operands = [
        Float8Tensor(shape=t.shape, dtype=dtype, data=t, fp8_scale_inv=s.view(1), fp8_dtype=kind)
        for t, s, kind in ((a, a_scale, kinds[0]), (b, b_scale, kinds[1]))
    ]
    if layout == "NT":  # an activation is kept transposed, by all its dimensions
        copy = a.t().contiguous().view(-1, *rows)
        operands[0] = Float8TensorStorage(
            data_transpose=copy, fp8_scale_inv=a_scale.view(1), fp8_dtype=kinds[0]
        )
    more = {"out": out, "accumulate": accumulate, "grad": grad, "bias": bias}
    kind = out.dtype if out is not None else dtype
    return cpp_extensions.general_gemm(*operands, out_dtype=kind, layout=layout, **more)[0]


def _quantize(t, kind):
    scale = 240.0 / t.abs().max().float().clamp_min(1e-6)
    return (t.float() * scale).to(kind).view(torch.uint8).contiguous(), 1 / scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, fuse):
        fp8 = STATE["fp8"]
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(flat, weight)
        ctx.fp8, ctx.fuse, ctx.shape, ctx.weight = fp8, fuse, x.shape, weight
        ctx.biased = bias is not None
        types = (torch.float8_e4m3fn,) * 2 if fp8 else None
        out = _gemm(weight, flat, "TN", types, 1, bias=bias, dtype=x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        flat, weight = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1]).contiguous()
        types = (torch.float8_e4m3fn, torch.float8_e5m2) if ctx.fp8 else None
        dx = _gemm(weight, dy, "NN", types, 1, grad=True, dtype=dy.dtype)
        more = {"rows": ctx.shape[:-1]}
        if ctx.fuse:
            more |= {"out": ctx.weight.main_grad, "accumulate": True}
        dw = _gemm(flat, dy, "NT", types, 0, grad=True, dtype=dy.dtype, **more)
        db = dy.sum(0) if ctx.biased else None
        return dx.view(ctx.shape), None if ctx.fuse else dw, db, None


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        params_dtype=None,
        device="cpu",
        fuse_wgrad_accumulation=False,
    ):
        super().__init__()
        dtype = params_dtype or torch.bfloat16
        weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None
        self.fuse = fuse_wgrad_accumulation

    def forward(self, x):
        return _Linear.apply(x, self.weight, self.bias, self.fuse)


class LayerNormMLP(torch.nn.Module):
    """Two GEMMs of one module. (The real one has weights of its own, and one autograd node.)"""

    def __init__(self, hidden_size, ffn_hidden_size, bias=False, params_dtype=None):
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden_size, dtype=params_dtype or torch.bfloat16)
        self.fc1 = Linear(hidden_size, ffn_hidden_size, bias, params_dtype)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, params_dtype)

    def forward(self, x):
        hidden = torch.nn.functional.silu(self.fc1(self.norm(x)))
        return self.fc2(hidden)
