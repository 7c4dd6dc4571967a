"""The fake of Transformer Engine's extension module: GEMMs on a CPU, through the fake cache.

Calls are those of TE 2.11 (generic_gemm, as transformer_engine/pytorch/csrc/extensions/gemm.cpp
takes it) and of TE 1.x (torch.ops.tex_ts.te_gemm_ts); refusals are the real ones' too.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from fake_hipblaslt_model import Algo, Library, script, spin
from fake_te_cache import Cache, Key, Unsuitable

MADE = script()
LIBRARY = Library(MADE)
CACHE = Cache(LIBRARY, MADE)


class DType(enum.Enum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1


TORCH = {
    DType.kByte: torch.uint8,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
NAMES = {kind: str(t).split(".")[1] for kind, t in TORCH.items()}
NAMES |= {DType.kFloat8E4M3: "float8e4m3", DType.kFloat8E5M2: "float8e5m2"}
OF_TORCH = {t: kind for kind, t in TORCH.items()}


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Any,
    bias_type: DType,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, ...]:
    a, b = _operand(A), _operand(B)
    n = b[0].shape[1] if transb else b[0].shape[0]
    m = a[0].shape[0] if transa else a[0].shape[1]
    fp8 = any(kind.name.startswith("kFloat8") for _, kind, _ in (a, b))
    kind = output_dtype or (DType.kBFloat16 if fp8 else a[1])
    out = D if D is not None else torch.empty(n, m, dtype=TORCH[kind])
    if accumulate != (beta == 1.0):
        raise RuntimeError(f"beta {beta} where accumulate is {accumulate}")
    bias_grad = gelu_out = None
    if bias is not None and grad:
        bias_grad = torch.empty(b[0].shape[-1], dtype=out.dtype)
    if gelu:
        gelu_out = gelu_in if grad else torch.empty(n, m, dtype=out.dtype)
    side = bias_grad if grad else bias
    # A bias tensor that is not there has TE's default type.
    side_kind = OF_TORCH[side.dtype] if side is not None else DType.kFloat32
    _gemm(a, transa, b, transb, out, side, side_kind, gelu_out, grad, workspace_size, accumulate)
    return out, bias_grad, None if grad else gelu_out, None


def te_gemm_ts(
    A: Any,
    A_scale_inverse: Any,
    A_fp8_tensor: int,
    A_type: DType,
    transa: bool,
    B: Any,
    B_scale_inverse: Any,
    B_fp8_tensor: int,
    B_type: DType,
    transb: bool,
    D: Any,
    D_scale: Any,
    D_type: DType,
    D_amax: Any,
    bias: Any,
    bias_type: DType,
    pre_gelu_out: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
) -> Any:
    """TE 1.x: what is absent is an empty tensor, and the bias type is what the caller says."""
    a_scale = A_scale_inverse[A_fp8_tensor : A_fp8_tensor + 1] if A_fp8_tensor >= 0 else None
    b_scale = B_scale_inverse[B_fp8_tensor : B_fp8_tensor + 1] if B_fp8_tensor >= 0 else None
    side = bias if bias.numel() else None
    gelu = pre_gelu_out if pre_gelu_out.numel() else None
    a, b = (A, A_type, a_scale), (B, B_type, b_scale)
    _gemm(a, transa, b, transb, D, side, bias_type, gelu, grad, workspace_size, accumulate)
    return D


if MADE["te"] == 1:
    torch.ops.tex_ts.te_gemm_ts = te_gemm_ts
    del generic_gemm


def _operand(t: Any) -> tuple[torch.Tensor, DType, Any]:
    if hasattr(t, "_fp8_dtype"):
        data = t._data
        if data is None:  # (columns, *rows); the library takes it as it is
            data = t._transpose.flatten(1).t().contiguous()
        return data, t._fp8_dtype, t._scale_inv
    return t, OF_TORCH[t.dtype], None


def _gemm(
    a: tuple[torch.Tensor, DType, Any],
    transa: bool,
    b: tuple[torch.Tensor, DType, Any],
    transb: bool,
    d: torch.Tensor,
    bias: Any,
    bias_kind: DType,
    gelu: Any,
    grad: bool,
    ws: int,
    accumulate: bool,
) -> None:
    if transa and transb:
        raise RuntimeError("TT layout not allowed.")
    fp8 = any(kind.name.startswith("kFloat8") for _, kind, _ in (a, b))
    if fp8 and gelu is not None:
        raise RuntimeError("fp8 gemm + gelu fusion is unavailable right now!")
    left, right = _plain(a, transa), _plain(b, not transb)  # (m, k) and (n, k)
    (m, k), n = left.shape, right.shape[0]
    if right.shape[1] != k or d.shape != (n, m):
        raise RuntimeError(f"GEMM output has invalid dims ({tuple(d.shape)}, wanted {(n, m)})")
    if fp8 and (m % 16 or n % 16 or k % 16):
        raise RuntimeError("FP8 GEMM dimensions must be divisible by 16")
    if not (d.is_contiguous() and a[0].is_contiguous() and b[0].is_contiguous()):
        raise RuntimeError("tensors of a GEMM must be contiguous")
    t, u = (True, False) if fp8 else (transa, transb)  # over transposed copies
    epi = {
        (False, False): "-",
        (True, False): "bgradb" if grad else "bias",
        (False, True): "dgelu" if grad else "geluaux",
        (True, True): "dgelubgrad" if grad else "geluauxbias",
    }[bias is not None, gelu is not None]
    bf16_mode = MADE["stack"] if MADE["dialect"] == "te-v2" else 0
    key = Key(
        *(MADE["dev_caps"][0], m, n, k, "NT"[t], "NT"[u]),
        *(NAMES[a[1]], NAMES[b[1]], NAMES[OF_TORCH[d.dtype]]),
        *(NAMES[bias_kind] if fp8 else "-", "-"),
        *(k if t else m, n if u else k, m, 0 if fp8 else bf16_mode, epi),
    )

    def launch(algo: Algo) -> None:
        if algo.ws > ws:
            raise Unsuitable(f"HIPBLAS_STATUS_INVALID_VALUE: {algo.ws} bytes of workspace needed")
        # numpy's, since the job's own torch may be watched.
        product = torch.from_numpy(right.numpy() @ left.t().numpy())
        if bias is not None and not grad:
            product = product + bias.float()
        if gelu is not None and not grad:
            gelu.copy_(product)
            product = torch.nn.functional.gelu(product, approximate="tanh")
        if gelu is not None and grad:
            x = gelu.float().requires_grad_()
            with torch.enable_grad():
                y = torch.nn.functional.gelu(x, approximate="tanh")
                (slope,) = torch.autograd.grad(y.sum(), x)
            product = product * slope
        if bias is not None and grad:
            bias.copy_(right.sum(1) if gelu is None else product.sum(0))
        d.copy_(d.float() + product if accumulate else product)
        if algo.kind == "nan":
            d[0, 0] = math.nan
        if algo.kind == "wrong":
            d[-1].mul_(1.5)
        spin(algo.takes_us(float(accumulate), MADE["us"]))

    with torch.no_grad():
        CACHE.gemm(key, ws, float(accumulate), launch)


def _plain(operand: tuple[torch.Tensor, DType, Any], as_it_is: bool) -> torch.Tensor:
    data, kind, scale = operand
    values = data.view(TORCH[kind]).float()
    if scale is not None:
        values = values * scale
    elif kind.name.startswith("kFloat8"):
        raise RuntimeError("FP8 input to GEMM requires inverse of scale!")
    return values if as_it_is else values.t()
