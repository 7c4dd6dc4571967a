"""Transformer Engine's GEMMs as the job issues them, each told with its pass and module.

Runs inside the job. The hook sits where TE's Python hands a GEMM to its C++: generic_gemm of the
extension module in TE 2.x, torch.ops.tex_ts.te_gemm_ts in TE 1.x (transformer_engine/pytorch/
cpp_extensions/gemm.py), for AMD and NVIDIA alike. Keys are those of the library call that the C++
makes of it (cublaslt_gemm.cu, rocm_gemm.cu). Grouped GEMMs are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from gemmtune.gemm import FP8_TYPES, LAYOUT_PASSES, Gemm, epilogue
from gemmtune.job.after import AfterImport
from gemmtune.job.files import complain
from gemmtune.job.names import clean_name

ENTRIES = "transformer_engine.pytorch.cpp_extensions.gemm"
TYPES = {
    "kFloat32": "float32",
    "kFloat16": "float16",
    "kBFloat16": "bfloat16",
    "kFloat8E4M3": "float8e4m3",
    "kFloat8E5M2": "float8e5m2",
}
MOST_NODES = 1 << 16  # forwards that are remembered for their backward
_CALL_IMPL = Module._call_impl.__code__


# What TE's Python decides of a key. Workspace and alignment are left to its C++.
TOLD = (
    *("m", "n", "k", "trans_a", "trans_b", "type_a", "type_b", "type_d", "lda", "ldb", "ldd"),
    *("epi", "beta", "fast_accum"),
)


class Call(NamedTuple):
    """One GEMM. `recompute` is 1 for a forward repeated by activation checkpointing."""

    gemm: Gemm
    pass_: str
    recompute: int
    site: str


class Hook:
    """Tells `note` of every GEMM that TE issues in this process, from now on or once it is loaded.

    `note` is called right after the GEMM was issued, in the same thread, with what `begin()` said
    before, so that whoever watches the library can join what it saw. Whatever fails here, the job's
    GEMM has been issued; it is counted in `failed`.
    """

    def __init__(
        self, note: Callable[[Call, Any], None], begin: Callable[[], Any] = lambda: None
    ) -> None:
        self.note, self._begin = note, begin
        self.failed = 0
        self._places = _Places()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._waiting = AfterImport(ENTRIES, self._install)

    def remove(self) -> None:
        self._waiting.remove()
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def _install(self, entries: ModuleType) -> None:
        tex: Any = getattr(entries, "tex", None)
        if hasattr(tex, "generic_gemm"):
            self._replace(tex, "generic_gemm", _general)
        else:
            self._replace(torch.ops.tex_ts, "te_gemm_ts", _first)

    def _replace(self, owner: Any, name: str, read: Callable[..., tuple[Gemm, str]]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))

        begin = self._begin

        def hooked(*args: Any, **kwargs: Any) -> Any:
            began = begin()
            answer = original(*args, **kwargs)
            try:
                gemm, name = read(*args)
                self.note(Call(gemm, name, *self._places.of(name)), began)
            except Exception as error:
                self.failed += 1
                if self.failed == 1:
                    complain("recording a GEMM of Transformer Engine", error)
            return answer

        setattr(owner, name, hooked)


def _general(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    d: Any,
    quantizer: Any,
    out_type: Any,
    bias: Any,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    ws_bytes: int,
    accumulate: bool,
    split: bool,
) -> tuple[Gemm, str]:
    types = _type(a), _type(b)
    fp8 = types[0] in FP8_TYPES or types[1] in FP8_TYPES
    if d is not None:
        type_d = _type(d)
    elif fp8 and type(quantizer).__name__ == "Float8Quantizer":  # the only one that is fused
        type_d = TYPES[quantizer.dtype.name]
    else:
        type_d = TYPES[out_type.name] if out_type is not None else types[0]
    side = "-"
    if bias is not None and bias.numel():
        side = type_d if grad else _type(bias)
    sizes = _sizes(_shape(a), transa, _shape(b), transb)
    mx = any("MXFP8" in type(t).__name__ for t in (a, b))
    gemm = _gemm(
        *(sizes, (transa, transb), (*types, type_d), side, gelu, grad, accumulate),
        *(split, ws_bytes, mx),
    )
    return gemm, _pass(transa, transb)


def _first(
    a: Any,
    a_scale: Any,
    a_index: int,
    a_type: Any,
    transa: bool,
    b: Any,
    b_scale: Any,
    b_index: int,
    b_type: Any,
    transb: bool,
    d: Any,
    d_scale: Any,
    d_type: Any,
    d_amax: Any,
    bias: Any,
    bias_type: Any,
    gelu: Any,
    grad: bool,
    workspace: Any,
    ws_bytes: int,
    accumulate: bool,
    split: bool,
) -> tuple[Gemm, str]:
    """TE 1.x: absent tensors are empty, FP8 comes transposed already."""
    types = TYPES[a_type.name], TYPES[b_type.name], TYPES[d_type.name]
    side = TYPES[bias_type.name] if bias.numel() else "-"
    sizes = _sizes(_shape(a), transa, _shape(b), transb)
    gemm = _gemm(
        *(sizes, (transa, transb), types, side, bool(gelu.numel()), grad, accumulate),
        *(split, ws_bytes, False),
    )
    name = _pass(transa, transb)
    if gemm.fp8 and _in_backward() and types[1] == "float8e5m2":
        # Of a GEMM's three FP8 tensors the inputs come first, then the weights (FP8FwdTensors).
        name = "dgrad" if int(a_index) % 3 == 1 else "wgrad"
    return gemm, name


def _gemm(
    sizes: tuple[int, int, int],
    trans: tuple[bool, bool],
    types: tuple[str, str, str],
    side: str,
    gelu: bool,
    grad: bool,
    accumulate: bool,
    split: bool,
    ws_bytes: int,
    mx: bool,
) -> Gemm:
    m, n, k = sizes
    fp8 = types[0] in FP8_TYPES or types[1] in FP8_TYPES
    if fp8 and not mx and not _any_layout():
        trans = True, False  # over transposed copies
    return Gemm(
        *(m, n, k, "NT"[trans[0]], "NT"[trans[1]], *types, side),
        *(k if trans[0] else m, n if trans[1] else k, m),
        epi=epilogue(side != "-", gelu, grad),
        beta=int(accumulate),
        # AMD's library has no such mode.
        fast_accum=int(fp8 and not split and torch.version.hip is None),
        scale_mode=2 if mx else 0,
        ws_bytes=int(ws_bytes),
        api="lt",
    )


def _any_layout() -> bool:
    """Whether the GPU takes FP8 in layouts other than T,N: NVIDIA's from Blackwell on."""
    utils = sys.modules.get("transformer_engine.pytorch.utils")
    asked = getattr(utils, "is_non_tn_fp8_gemm_supported", None)
    return torch.version.hip is None and asked is not None and bool(asked())


def _sizes(
    a: tuple[int, int], transa: bool, b: tuple[int, int], transb: bool
) -> tuple[int, int, int]:
    """m, n, k of row-major operands, A the library's first."""
    m, k = a if transa else a[::-1]
    return m, b[1] if transb else b[0], k


def _shape(t: Any) -> tuple[int, int]:
    """Rows and columns; all dimensions but the last are rows."""
    if hasattr(t, "_transpose") and t._data is None:
        # Float8TensorStorage.size() takes such a copy, (columns, *rows), for one of two dimensions.
        columns, *rows = t._transpose.shape
        return prod(rows), int(columns)
    shape = t.shape if hasattr(t, "shape") else t.size()
    return prod(shape[:-1]), int(shape[-1])


def _type(t: Any) -> str:
    if hasattr(t, "_fp8_dtype"):
        return TYPES[t._fp8_dtype.name]
    return str(t.dtype).removeprefix("torch.")


def _pass(transa: bool, transb: bool) -> str:
    return LAYOUT_PASSES.get("NT"[transa] + "NT"[transb], "other")


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class _Places:
    """In which module a GEMM runs: a forward by the Python stack, its backward by the node."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[Module] = []  # keeps them alive, so that their ids stay theirs
        self._forwards: dict[int, str] = {}  # by the node's sequence number

    def of(self, name: str) -> tuple[int, str]:
        """Whether it is a recomputation, and the site."""
        node = torch._C._current_autograd_node()
        if name != "fprop":
            number = node._sequence_nr() if node is not None else -1
            return 0, self._forwards.get(number, "")
        site = self._module()
        if len(self._forwards) >= MOST_NODES:
            self._forwards.clear()
        # The node was made just before the forward of TE's autograd.Function was called.
        self._forwards[torch._C._autograd._get_sequence_nr() - 1] = site
        return int(_in_backward()), site

    def _module(self) -> str:
        frame = sys._getframe(3)
        inner = outer = None
        while frame is not None:
            if frame.f_code is _CALL_IMPL:
                outer = frame.f_locals["self"]
                inner = inner or outer
                if id(inner) in self._names:
                    break
            frame = frame.f_back  # type: ignore[assignment]
        if inner is None or outer is None:
            return ""
        if id(inner) not in self._names:
            self._kept.append(outer)
            for path, module in outer.named_modules():
                self._names.setdefault(id(module), clean_name(path) or type(module).__name__)
        return self._names[id(inner)]
