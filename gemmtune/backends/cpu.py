"""The CPU backend: ATen's own call, and the other ways in which a CPU can compute the same GEMM.

Reads and writes tensors only. It also runs inside a job, so it needs the standard library, torch
and numpy, nothing else. Every configuration computes d = alpha·(x·w) + beta·c + bias.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gemmtune.backends import openblas
from gemmtune.backends.base import Launch, Operands
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "aten"
NATIVE_FLOPS = 2e8  # without oneDNN ATen's 16-bit GEMM runs at 1 to 20 GFLOP/s: only where small
MIN_BLOCK = 16  # rows, columns or depth below which splitting only adds launches

_FULL = ("float32", "float64")
_HALF = ("bfloat16", "float16")


class Cpu:
    """The algorithms of this machine's torch and numpy.

    `numerics`: "type" offers what stays within the rounding of the GEMM's own type; "any" also
    what computes in a wider type, which changes the numbers.
    """

    name = "cpu"
    device = "cpu"

    def __init__(self, numerics: str = "type") -> None:
        self.numerics = numerics

    def dev_cap(self) -> int:
        return 0

    def library(self) -> str:
        """torch, its oneDNN and BLAS, and numpy's BLAS, each with its version."""
        import numpy
        import torch

        show = torch.__config__.show()
        found = (
            re.search(r"(Math Kernel Library Version \S+)", show),
            re.search(r"MKL-DNN (v\S+)", show),
            re.search(r"CPU capability usage: (\S+)", show),
            re.search(r"BLAS_INFO=(\w+)", show),
        )
        mkl, onednn, isa, blas = (m.group(1) if m else "" for m in found)
        parts = [
            f"torch {torch.__version__}",
            f"oneDNN {onednn}" if onednn else "no oneDNN",
            mkl.replace("Math Kernel Library Version", "MKL") or blas,
            isa,
            f"numpy {numpy.__version__}",
            library.config if (library := openblas.find()) else "",
        ]
        return "; ".join(p for p in parts if p)

    def unsupported(self, gemm: Gemm) -> str | None:
        """Why the Gemm cannot run here; None where it can."""
        if gemm.api == "grouped_mm":
            return "grouped_mm: the groups' sizes are not in its key"
        if gemm.epi not in ("-", "bias"):
            return f"epilogue {gemm.epi}: fused on a GPU only"
        if gemm.fp8:
            if gemm.scale_mode or gemm.beta or gemm.batch != 1:
                return "FP8 on a CPU: one scale per tensor, one GEMM, no accumulation"
            return None if _has_scaled_mm() else f"this torch ({_torch()}) has no FP8 GEMM on a CPU"
        if not gemm.type_a == gemm.type_b == gemm.type_d:
            return f"mixed types {gemm.type_a}/{gemm.type_b}/{gemm.type_d}: a CPU's ATen has none"
        if gemm.bias_type not in ("-", gemm.type_d):
            return f"a {gemm.bias_type} bias on a {gemm.type_d} GEMM: a CPU's ATen has none"
        if gemm.batch > 1 and gemm.stride_d == 0 and gemm.m * gemm.n:
            return "batched without stride_d: the results would overlap"
        if gemm.n > 1 and gemm.ldd < gemm.m:
            return f"ldd {gemm.ldd} is below m {gemm.m}: the results would overlap"
        return None

    def algos(self, gemm: Gemm) -> Sequence[Algo]:
        """ATen as it is, then the alternatives that this type and size have."""
        names = [n for n in _RUN if n == DEFAULT or _offered(n, gemm, self.numerics)]
        return [Algo(IDS[name], rank, name) for rank, name in enumerate(names)]

    def workspace_bytes(self, gemm: Gemm, algo: Algo) -> int:
        return 0

    def launcher(self, gemm: Gemm, algo: Algo) -> Launch:
        """A launch that writes operands.d. Raises BackendError for an unknown configuration."""
        if gemm.fp8:
            return _scaled_mm
        if algo.config == DEFAULT and gemm.bias_type != "-" and not gemm.beta:
            return _addmm
        known, beta = _known(algo.config), gemm.beta
        return lambda o: known(o.x, o.w, o.d, _addend(o.d, o.c, 1, beta, o.bias))

    def time_us(self, launch: Launch, operands: Sequence[Operands], launches: int) -> float:
        """Mean microseconds per launch over back-to-back launches, operands in rotation."""
        sets = len(operands)
        order = [operands[i % sets] for i in range(launches)]
        start = time.perf_counter_ns()
        for operand in order:
            launch(operand)
        return (time.perf_counter_ns() - start) / launches / 1e3


class Add(NamedTuple):
    """What a product is scaled with and added to: alpha·product + beta·c.

    c has the result's shape (expanded where it is a row or a column), or is None.
    """

    c: Tensor | None = None
    beta: float = 0
    alpha: float = 1

    def of(self, part: Callable[[Tensor], Tensor]) -> Add:
        """The same for a part or another view of the result."""
        return self if self.c is None else self._replace(c=part(self.c))


def run(
    config: str,
    x: Tensor,
    w: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
    bias: Tensor | None = None,
) -> None:
    """Write d = alpha·(x·w) + beta·c + bias by the configuration named.

    x: (n, k), w: (k, m), d: (n, m), with one leading batch dimension or none; c broadcasts to d;
    bias: (m,). Any strides; c may be d. Raises BackendError where the configuration is unknown or
    does not fit.
    """
    known = _known(config)
    try:
        known(x, w, d, _addend(d, c, alpha, beta, bias))
    except (RuntimeError, ValueError, IndexError) as e:
        raise BackendError(f"{config} does not fit {tuple(x.shape)} x {tuple(w.shape)}: {e}") from e


def _known(config: str) -> Callable[[Tensor, Tensor, Tensor, Add], None]:
    try:
        return _RUN[config]
    except KeyError:
        raise BackendError(f"the CPU has no configuration {config!r}: sweep again") from None


def _addend(d: Tensor, c: Tensor | None, alpha: float, beta: float, bias: Tensor | None) -> Add:
    if not beta:
        c = None
    if bias is not None:
        c, beta = (bias if c is None else c * beta + bias), 1
    return Add(alpha=alpha) if c is None else Add(c.expand(d.shape), beta, alpha)


# ---------------------------------------------------------------------------------- configurations


def _aten(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """ATen's own call: mm or addmm, bmm or baddbmm."""
    import torch

    c, beta, alpha = add
    if c is None and alpha == 1:
        (torch.mm if d.dim() == 2 else torch.bmm)(x, w, out=d)
        return
    if c is None:
        c = d  # not read: beta is 0
    (torch.addmm if d.dim() == 2 else torch.baddbmm)(c, x, w, beta=beta, alpha=alpha, out=d)


def _finish(d: Tensor, p: Tensor, add: Add) -> None:
    """d = alpha·p + beta·c, where a kernel has no addend of its own. p may be d without c."""
    import torch

    if add.alpha != 1:
        p.mul_(add.alpha)
    if add.c is not None:
        torch.add(p, add.c, alpha=add.beta, out=d)
    elif p is not d:
        d.copy_(p)


def _onednn(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """oneDNN's inner product, which ATen's mm does not use for float32 on x86."""
    import torch

    _finish(d, torch.ops.mkldnn._linear_pointwise(x, w.t(), None, "none", [], ""), add)


_switch = threading.Lock()


def _native(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """ATen without oneDNN.

    The switch is the whole process's: a GEMM of another thread may meanwhile go without oneDNN
    too, which leaves it right but slower. Its setter takes 1 us, torch's context manager 18 us.
    """
    import torch

    with _switch:
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            _aten(x, w, d, add)
        finally:
            torch._C._set_mkldnn_enabled(before)


def _transposed(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """The transposed problem (wᵀ·xᵀ)ᵀ, in a row-major result of its own: ATen would turn a
    transposed `out` back into the problem as it was."""
    p = d.new_empty((*d.shape[:-2], d.shape[-1], d.shape[-2]))
    _aten(w.mT, x.mT, p, add.of(lambda c: c.mT))
    d.copy_(p.mT)


def _relaid(t: Tensor) -> Tensor:
    """A copy in the other memory order: by columns where rows were contiguous, else by rows."""
    return t.mT.contiguous().mT if t.stride(-1) == 1 else t.contiguous()


def _copy_x(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    _aten(_relaid(x), w, d, add)


def _copy_w(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    _aten(x, _relaid(w), d, add)


def _numpy(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """numpy's OpenBLAS on views of the same memory, with as many threads as torch has."""
    import numpy
    import torch

    library = openblas.find()
    if library is None:
        raise BackendError("numpy does not use OpenBLAS here: sweep again")
    if not all(t.dtype in (torch.float32, torch.float64) for t in (x, w, d)):
        raise BackendError(f"OpenBLAS has no {str(d.dtype).removeprefix('torch.')}: sweep again")
    p = d if add.c is None else torch.empty_like(d)
    with library.threads(torch.get_num_threads()):
        numpy.matmul(openblas.array(x), openblas.array(w), out=openblas.array(p))
    _finish(d, p, add)


def _split_k(parts: int, x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """k in equal parts as one batched GEMM, then the sum of the parts."""
    import torch

    if x.element_size() < 4:  # each part would be rounded before the sum
        raise BackendError(f"split-k is not for {str(x.dtype).removeprefix('torch.')}: sweep again")
    xs = x.unflatten(1, (parts, -1)).transpose(0, 1)
    products = torch.bmm(xs, w.unflatten(0, (parts, -1)))
    p = d if add.c is None else torch.empty_like(d)
    torch.sum(products, 0, out=p)
    _finish(d, p, add)


def _split_n(parts: int, x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """Blocks of rows, one call each."""
    for i, (xs, ds) in enumerate(zip(x.chunk(parts), d.chunk(parts), strict=True)):
        _aten(xs, w, ds, add.of(lambda c, i=i: c.chunk(parts)[i]))  # type: ignore[misc]


def _split_m(parts: int, x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """Blocks of columns, one call each."""
    for i, (ws, ds) in enumerate(zip(w.chunk(parts, 1), d.chunk(parts, 1), strict=True)):
        _aten(x, ws, ds, add.of(lambda c, i=i: c.chunk(parts, 1)[i]))  # type: ignore[misc]


def _mv(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """One row or one column: a matrix-vector product."""
    import torch

    if d.dim() != 2 or 1 not in d.shape:
        raise BackendError(f"a result of {tuple(d.shape)} is no vector")
    if d.shape[0] == 1:
        matrix, vector, out, add = w.t(), x[0], d[0], add.of(lambda c: c[0])
    else:
        matrix, vector, out, add = x, w[:, 0], d[:, 0], add.of(lambda c: c[:, 0])
    c = out if add.c is None else add.c
    torch.addmv(c, matrix, vector, beta=add.beta, alpha=add.alpha, out=out)


def _bmm(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """A batch of one, through the batched call."""
    _aten(x[None], w[None], d[None], add.of(lambda c: c[None]))


def _loop(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """The batch one GEMM at a time."""
    for i in range(d.shape[0]):
        _aten(x[i], w[i], d[i], add.of(lambda c, i=i: c[i]))  # type: ignore[misc]


def _fold(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """A batch that shares one w: one GEMM over all its rows."""
    if w.stride(0) and w.shape[0] != 1:
        raise BackendError("the batch does not share one w")
    _aten(x.flatten(0, 1), w[0], d.view(-1, d.shape[-1]), add.of(lambda c: c.flatten(0, 1)))


def _upcast(x: Tensor, w: Tensor, d: Tensor, add: Add) -> None:
    """In float32, rounded once at the end."""
    p = d.new_empty(d.shape, dtype=x.float().dtype)
    _aten(x.float(), w.float(), p, add.of(lambda c: c.float()))
    d.copy_(p)


_RUN: dict[str, Callable[[Tensor, Tensor, Tensor, Add], None]] = {
    DEFAULT: _aten,
    "onednn": _onednn,
    "native": _native,
    "transposed": _transposed,
    "copy-x": _copy_x,
    "copy-w": _copy_w,
    "openblas": _numpy,
    "split-k2": functools.partial(_split_k, 2),
    "split-k4": functools.partial(_split_k, 4),
    "split-k8": functools.partial(_split_k, 8),
    "split-n2": functools.partial(_split_n, 2),
    "split-n4": functools.partial(_split_n, 4),
    "split-m2": functools.partial(_split_m, 2),
    "split-m4": functools.partial(_split_m, 4),
    "mv": _mv,
    "bmm": _bmm,
    "loop": _loop,
    "fold": _fold,
    "upcast": _upcast,
}
# Numbers in tables: a name keeps its number for ever, so new ones go at the end of _RUN.
IDS = {name: number for number, name in enumerate(_RUN)}


def _offered(name: str, gemm: Gemm, numerics: str) -> bool:
    """Whether the type, size and layout have this configuration."""
    if gemm.fp8 or not gemm.flops:
        return False
    batched, full = gemm.batched, gemm.type_d in _FULL
    adds = bool(gemm.beta) or gemm.bias_type != "-"
    kind, _, parts = name.partition("-")
    if kind == "split":
        size = getattr(gemm, parts[0]) / int(parts[1:])
        if batched or size < MIN_BLOCK or size != int(size):
            return False
        return full or parts[0] != "k"  # 16-bit parts of k would be rounded before they are added
    fused = full or not adds  # a separate addition rounds 16-bit results twice
    rules: dict[str, Callable[[], bool]] = {
        "onednn": lambda: (
            not batched and gemm.type_d != "float64" and fused and _has_onednn(gemm.type_a)
        ),
        "native": lambda: not full and gemm.flops <= NATIVE_FLOPS and _has_onednn(gemm.type_a),
        "transposed": lambda: True,
        "copy": lambda: min(gemm.m, gemm.n, gemm.k) > 1,
        "openblas": lambda: full and openblas.find() is not None,
        "mv": lambda: not batched and 1 in (gemm.m, gemm.n),
        "bmm": lambda: not batched,
        "loop": lambda: batched,
        "fold": lambda: (
            batched
            and (gemm.batch == 1 or gemm.stride_a == 0)
            and gemm.trans_b == "N"
            and gemm.stride_b == gemm.n * gemm.ldb
            and gemm.stride_d == gemm.n * gemm.ldd
        ),
        "upcast": lambda: numerics == "any" and gemm.type_d in _HALF,
    }
    return rules[kind]()


# ------------------------------------------------------------------------------- what is built here


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _addmm(o: Operands) -> None:
    """addmm with the bias as a vector, as a linear layer calls it."""
    import torch

    assert o.bias is not None
    torch.addmm(o.bias, o.x, o.w, out=o.d)


def _scaled_mm(o: Operands) -> None:
    import torch

    assert o.scale_x is not None and o.scale_w is not None
    torch._scaled_mm(
        o.x, o.w, scale_a=o.scale_x, scale_b=o.scale_w, bias=o.bias, out_dtype=o.d.dtype, out=o.d
    )


@functools.lru_cache(maxsize=1)
def _has_scaled_mm() -> bool:
    import torch

    try:
        a = torch.zeros(16, 16).to(torch.float8_e4m3fn)
        one, d = torch.ones(()), torch.empty(16, 16, dtype=torch.bfloat16)
        _scaled_mm(Operands(a, a.t(), d, scale_x=one, scale_w=one))
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False
    return True


@functools.lru_cache
def _has_onednn(kind: str) -> bool:
    """Whether oneDNN is here and has products of this type: 16-bit ones not on every CPU."""
    import torch

    one = torch.ones(1, 1, dtype=getattr(torch, kind))
    try:
        _onednn(one, one, torch.empty_like(one), Add())
    except (RuntimeError, AttributeError):
        return False
    return True
