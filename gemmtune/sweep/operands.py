"""Operands of a Gemm: values drawn like a job's, in the Gemm's own strides, enough sets to rotate.

Reads the size of the last-level cache; writes tensors on the backend's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from gemmtune import machine
from gemmtune.backends.base import Operands
from gemmtune.gemm import Gemm

if TYPE_CHECKING:
    import torch

MAX_BYTES = 512 << 20  # of all sets together: what a machine that runs a job can spare
MAX_SETS = 1024  # beyond, making the tensors of tiny Gemms costs more than timing them
UNKNOWN_CACHE_BYTES = 32 << 20
INFINITY_CACHE_BYTES = 256 << 20  # of gfx942 and gfx950, beyond the caches that torch tells of

# The powers of two by which verify scales x and w: results must neither overflow the type nor be
# lost below its smallest normal number.
TINY_LOG2 = {"float64": -100, "float32": -30, "bfloat16": -30, "float16": -5}
HUGE_LOG2 = {"float64": 100, "float32": 30, "bfloat16": 30, "float16": 4}


def draw(gemm: Gemm, seed: int, device: str = "cpu", scale_log2: int = 0) -> Operands:
    """One set: x normal, w normal/sqrt(k) as trained weights are, c and bias normal.

    x and w are multiplied by 2**scale_log2, c and bias by its square; FP8 operands are not (their
    scales carry the magnitude). Elements between rows (a leading dimension above the matrix) are
    drawn too.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    scale = 2.0**scale_log2

    def tensor(kind: str, shape: list[int], strides: list[int], std: float) -> torch.Tensor:
        drawn = torch.float64 if kind == "float64" else torch.float32
        values = torch.empty(_storage(shape, strides), dtype=drawn, device=device)
        values.normal_(0, std, generator=generator)
        return values.to(torch_type(kind, device)).as_strided(shape, strides)

    g = gemm
    magnitude = 1.0 if g.fp8 else scale
    w_std = magnitude if g.fp8 else magnitude / math.sqrt(max(g.k, 1))
    by_rows: dict[str, Callable[[int], list[int]]] = {
        "N": lambda ld: [ld, 1],
        "T": lambda ld: [1, ld],
    }
    lead = [g.batch] if g.batched else []
    x_strides = [*([g.stride_b] if lead else []), *by_rows[g.trans_b](g.ldb)]
    w_strides = [*([g.stride_a] if lead else []), *by_rows[g.trans_a](g.lda)]
    d_strides = [*([g.stride_d] if lead else []), g.ldd, 1]
    d_shape = [*lead, g.n, g.m]
    x = tensor(g.type_b, [*lead, g.n, g.k], x_strides, magnitude)
    w = tensor(g.type_a, [*lead, g.k, g.m], w_strides, w_std)
    c = tensor(g.type_d, d_shape, d_strides, scale * scale) if g.beta else None
    side = _side_outputs(g, device)
    biased = g.bias_type != "-" and "bgrad" not in side
    bias = tensor(g.bias_type, [g.m], [1], scale * scale) if biased else None
    if g.epi.startswith("dgelu"):
        side["gelu_in"] = tensor(g.type_d, [g.n, g.m], [_gelu_ld(g.m), 1], 1.0)
    d = torch.full(
        (_storage(d_shape, d_strides),), math.nan, dtype=torch_type(g.type_d, device), device=device
    ).as_strided(d_shape, d_strides)
    if not g.fp8:
        return Operands(x, w, d, c, bias, **side)
    one = torch.tensor(1.0, device=device)
    scale_w = torch.tensor(1 / math.sqrt(max(g.k, 1)), device=device)
    return Operands(x, w, d, c, bias, scale_x=one, scale_w=scale_w)


def _side_outputs(g: Gemm, device: str) -> dict[str, torch.Tensor]:
    """What the epilogue writes besides d, NaN so far."""
    import torch

    shapes: dict[str, list[int]] = {}
    if g.epi.startswith("gelu"):
        shapes["gelu_in"] = [g.n, g.m]
    if g.epi in ("dgelubgrad", "bgradb"):
        shapes["bgrad"] = [g.n if g.epi == "bgradb" else g.m]
    made = {}
    for name, shape in shapes.items():
        strides = [_gelu_ld(g.m), 1][-len(shape) :]
        kind = g.bias_type if name == "bgrad" and g.bias_type != "-" else g.type_d
        memory = torch.full((_storage(shape, strides),), math.nan, device=device)
        made[name] = memory.to(torch_type(kind, device)).as_strided(shape, strides)
    return made


def _gelu_ld(m: int) -> int:
    """The leading dimension of the GELU's input: cuBLASLt wants a multiple of 8."""
    return -(-m // 8) * 8


def copies(operands: Operands, sets: int) -> list[Operands]:
    """The set and copies of it elsewhere in memory, `sets` in all."""
    return [operands, *(_copy(operands) for _ in range(sets - 1))]


def rotation(gemm: Gemm, cache_bytes: int) -> int:
    """How many sets rotate past a cache of that size, within MAX_BYTES and MAX_SETS; at least 1."""
    wanted = math.ceil(2 * cache_bytes / max(gemm.bytes, 1))
    return max(1, min(wanted, MAX_BYTES // max(gemm.bytes, 1), MAX_SETS))


def cache_bytes(device: str) -> int:
    """The last-level cache of the device, in bytes; a guess where nothing tells."""
    import torch

    if device != "cpu":
        gpu = torch.cuda.get_device_properties(device)
        if getattr(gpu, "gcnArchName", "").startswith(("gfx94", "gfx95")):
            return INFINITY_CACHE_BYTES
        return int(gpu.L2_cache_size)
    for level in (3, 2):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size") as f:
                return int(f.read().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return UNKNOWN_CACHE_BYTES


def torch_type(name: str, device: str = "cpu") -> torch.dtype:
    """torch's type for a type name; FP8 names are FNUZ on gfx94x, OCP elsewhere."""
    import torch

    if not name.startswith("float8"):
        return getattr(torch, name)  # type: ignore[no-any-return]
    arch = ""
    if device != "cpu" and torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName
    fnuz = machine.fnuz(arch)
    if name == "float8e4m3":
        return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    return torch.float8_e5m2fnuz if fnuz else torch.float8_e5m2


def storage(t: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor's memory, those between its rows included."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def _storage(shape: list[int], strides: list[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _copy(operands: Operands) -> Operands:
    tensors = {k: v for k, v in operands._asdict().items() if v is not None}
    clones = {k: storage(v).clone().as_strided(v.shape, v.stride()) for k, v in tensors.items()}
    return Operands(**clones)
