"""The GEMM entry points: general_gemm of TE 2.11, or gemm and fp8_gemm of TE 1.x."""

import torch
import transformer_engine_torch as tex

from ..constants import TE_DType

WORKSPACE_BYTES = 64 << 10  # in place of TE's 32 MiB or more
__all__ = ["fp8_gemm", "gemm"] if tex.MADE["te"] == 1 else ["general_gemm"]  # noqa: PLE0605


def get_cublas_workspace(device, ub, grouped_gemm):
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)


def general_gemm(
    A,
    B,
    out_dtype=None,
    quantization_params=None,
    gelu=False,
    gelu_in=None,
    alpha=1.0,
    beta=None,
    accumulate=False,
    layout="TN",
    out=None,
    bias=None,
    use_split_accumulator=False,
    grad=False,
    ub=None,
    ub_type=None,
    extra_output=None,
    bulk_overlap=False,
):
    assert layout in ("TN", "NN", "NT"), f"GEMM layout {layout} not supported."
    if out is not None and not out.is_contiguous():
        raise ValueError("Output tensor is not contiguous.")
    workspace = get_cublas_workspace(None, False, False)
    args = (
        *(A, layout[0] == "T", B, layout[1] == "T", out, quantization_params),
        TE_DType[out_dtype] if out_dtype is not None else None,
        *(bias, TE_DType[torch.bfloat16 if bias is None else bias.dtype], gelu, gelu_in, grad),
        *(workspace, workspace.shape[0], accumulate, use_split_accumulator),
    )
    kwargs = {"comm_overlap": ub, "comm_type": ub_type, "extra_output": extra_output}
    kwargs |= {"bulk_overlap": bulk_overlap, "alpha": alpha}
    kwargs["beta"] = 1.0 if accumulate else 0.0
    return tuple(tex.generic_gemm(*args, **kwargs))


def gemm(
    A,
    B,
    dtype,
    workspace,
    gelu=False,
    gelu_input=None,
    grad=False,
    accumulate=False,
    layout="TN",
    out=None,
    bias=None,
    use_bias=False,
):
    transa, transb, empty = layout[0] == "T", layout[1] == "T", torch.Tensor()
    if out is None:
        rows, columns = B.shape[1 if transb else 0], A.shape[0 if transa else 1]
        out = torch.empty(rows, columns, dtype=dtype)
    if gelu and not grad:
        gelu_input = torch.empty_like(out, dtype=dtype)
    elif not gelu:
        gelu_input = empty
    grad_bias = torch.empty(B.shape[1], dtype=out.dtype) if grad and use_bias else empty
    bias = bias if use_bias else empty
    assert A.dtype == dtype and B.dtype == dtype
    kind, out_kind = TE_DType[dtype], TE_DType[out.dtype]
    bias_kind = TE_DType[(grad_bias if grad else bias).dtype] if use_bias else out_kind
    torch.ops.tex_ts.te_gemm_ts(
        *(A, empty, -1, kind, transa, B, empty, -1, kind, transb, out, empty, out_kind, empty),
        *(grad_bias if grad else bias, bias_kind, gelu_input, grad, workspace, workspace.shape[0]),
        *(accumulate, False),
    )
    return out, grad_bias, gelu_input


def fp8_gemm(
    A,
    A_scale_inv,
    A_fp8_tensor,
    A_dtype,
    B,
    B_scale_inv,
    B_fp8_tensor,
    B_dtype,
    out_dtype,
    workspace,
    gelu=False,
    accumulate=False,
    out=None,
    out_index=None,
    fp8_meta_tensor=None,
    bias=None,
    use_bias=False,
    use_split_accumulator=False,
    D_dtype=None,
):
    assert A.dtype == torch.uint8 and B.dtype == torch.uint8
    empty = torch.Tensor()
    if out is None:
        out = torch.empty(B.shape[0], A.shape[0], dtype=out_dtype)
    bias_kind = TE_DType[torch.bfloat16 if bias is None else bias.dtype]
    torch.ops.tex_ts.te_gemm_ts(
        *(A, A_scale_inv, A_fp8_tensor, A_dtype, True),
        *(B, B_scale_inv, B_fp8_tensor, B_dtype, False),
        *(out, empty, TE_DType[out.dtype], empty, bias if use_bias else empty, bias_kind, empty),
        *(False, workspace, workspace.shape[0], accumulate, use_split_accumulator),
    )
    return out, empty
