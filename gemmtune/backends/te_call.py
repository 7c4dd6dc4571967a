"""One GEMM issued through Transformer Engine's own Python entry point.

general_gemm of TE 2.x, gemm and fp8_gemm of TE 1.x (transformer_engine/pytorch/cpp_extensions/
gemm.py). Reads and writes tensors. transformer_engine is imported where a Call is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmtune.backends.base import Operands
from gemmtune.errors import BackendError
from gemmtune.gemm import Gemm

if TYPE_CHECKING:
    import torch

GRADIENTS = ("dgelu", "bgradb")  # epilogues of backward passes
KINDS = {"float8e4m3": "kFloat8E4M3", "float8e5m2": "kFloat8E5M2"}


def unsupported(g: Gemm) -> str | None:
    """Why TE's entry points cannot issue a Gemm; None where they can."""
    if g.api != "lt":
        return f"api {g.api}: Transformer Engine launches through the Lt API (lt)"
    if g.batched or g.scale_mode:
        return "batched, or scaled by blocks: only single GEMMs with a scale per tensor"
    if (g.trans_a, g.trans_b) == ("T", "T"):
        return "layout TT: Transformer Engine has none"
    if min(g.m, g.n, g.k) == 0:
        return "a size of 0: never launched"
    packed = (g.k if g.trans_a == "T" else g.m, g.n if g.trans_b == "T" else g.k, g.m)
    if (g.lda, g.ldb, g.ldd) != packed:
        return "leading dimensions beyond the matrix: Transformer Engine's operands are contiguous"
    if g.epi not in ("-", "bias", "geluaux", "geluauxbias", *GRADIENTS):
        return f"epilogue {g.epi}: its operands are not made here yet"
    if g.epi in ("bias", "geluauxbias") and g.bias_type == "-":
        return f"the {g.epi} epilogue without a bias type"
    if g.fp8:
        if not (g.type_a in KINDS and g.type_b in KINDS) or g.type_d in KINDS:
            return f"mixed types {g.type_a}/{g.type_b}/{g.type_d}"
        if g.epi not in ("-", "bias") or (g.trans_a, g.trans_b) != ("T", "N"):
            return f"FP8 {g.trans_a}{g.trans_b} with epilogue {g.epi}"
        return "sizes of FP8 GEMMs are multiples of 16" if (g.m | g.n | g.k) % 16 else None
    if g.epi == "-" and g.bias_type != "-":
        return "a bias without the bias epilogue: the call adds it by another kernel"
    if g.type_a != g.type_b or g.type_d not in (g.type_a, "float32"):
        return f"mixed types {g.type_a}/{g.type_b}/{g.type_d}"
    return None


def _packed(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


class Call:
    """How the installed TE issues a Gemm. Raises BackendError where TE cannot be imported."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        try:
            import transformer_engine.pytorch  # noqa: F401
            import transformer_engine_torch
            from transformer_engine.pytorch import cpp_extensions
        except (ImportError, OSError, RuntimeError) as e:
            said = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise BackendError(f"Transformer Engine cannot be imported here ({said})") from e
        self.tex, self.entries = transformer_engine_torch, cpp_extensions
        self.general: Any = getattr(cpp_extensions, "general_gemm", None)

    def workspace(self) -> torch.Tensor:
        """What TE's modules hand to every GEMM, before TE 2.9 took it upon itself."""
        from transformer_engine.pytorch.module import base

        space: torch.Tensor = base.get_workspace()
        return space

    def prepare(self, o: Operands) -> Callable[[], tuple[Any, ...]]:
        """A launch into o.d; it returns TE's own answer. With beta it adds to what o.d holds."""
        return self._prepare_2(o) if self.general is not None else self._prepare_1(o)

    def run(self, launch: Callable[[], tuple[Any, ...]], o: Operands) -> None:
        """Launch once, from o.c, with the side outputs brought to o."""
        if o.c is not None:
            o.d.copy_(o.c)
        answer = launch()
        grad_bias, gelu_in = answer[1:3] if len(answer) > 2 else (None, answer[1])
        if o.bgrad is not None:
            o.bgrad.copy_(grad_bias)
        if self.gemm.epi.startswith("gelu") and o.gelu_in is not None:
            o.gelu_in.copy_(gelu_in)

    def _operands(self, o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B as TE sees them: row-major matrices, transposed by the layout."""
        a = o.w.t() if self.gemm.trans_a == "T" else o.w
        return a, (o.x.t() if self.gemm.trans_b == "T" else o.x)

    def _prepare_2(self, o: Operands) -> Callable[[], tuple[Any, ...]]:
        g = self.gemm
        a: Any
        b: Any
        a, b = self._operands(o)
        if g.fp8:
            a, b = self._float8(a, g.type_a, o.scale_w), self._float8(b, g.type_b, o.scale_x)
        kwargs: dict[str, Any] = {
            "out_dtype": o.d.dtype,
            "layout": g.trans_a + g.trans_b,
            "out": o.d,
            "accumulate": bool(g.beta),
            "use_split_accumulator": not g.fast_accum,
            "grad": g.epi in GRADIENTS,
            "bias": o.bgrad if g.epi == "bgradb" else o.bias,
            "gelu": "gelu" in g.epi,
            "gelu_in": _packed(o.gelu_in) if g.epi == "dgelu" else None,
        }
        if "workspace" in inspect.signature(self.general).parameters:
            kwargs["workspace"] = self.workspace()
        return lambda: tuple(self.general(a, b, **kwargs))

    def _float8(self, t: torch.Tensor, kind: str, scale: Any) -> Any:
        import torch
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

        return Float8Tensor(
            shape=t.shape,
            dtype=torch.bfloat16,
            data=t.view(torch.uint8),
            fp8_scale_inv=scale.view(1),
            fp8_dtype=getattr(self.tex.DType, KINDS[kind]),
        )

    def _prepare_1(self, o: Operands) -> Callable[[], tuple[Any, ...]]:
        import torch

        g, space = self.gemm, self.workspace()
        a, b = self._operands(o)
        kwargs: dict[str, Any] = {"accumulate": bool(g.beta), "out": o.d}
        if g.fp8:
            assert o.scale_w is not None and o.scale_x is not None
            kinds = [getattr(self.tex.DType, KINDS[kind]) for kind in (g.type_a, g.type_b)]
            args = (
                *(a.view(torch.uint8), o.scale_w.view(1), 0, kinds[0]),
                *(b.view(torch.uint8), o.scale_x.view(1), 0, kinds[1], o.d.dtype, space),
            )
            kwargs |= {"bias": o.bias, "use_bias": g.epi == "bias"}
            kwargs["use_split_accumulator"] = not g.fast_accum
            return lambda: tuple(self.entries.fp8_gemm(*args, **kwargs))
        kwargs |= {
            "layout": g.trans_a + g.trans_b,
            "grad": g.epi in GRADIENTS,
            "bias": o.bias,
            "use_bias": g.epi in ("bias", "geluauxbias", "bgradb"),
            "gelu": "gelu" in g.epi,
            "gelu_input": _packed(o.gelu_in) if g.epi == "dgelu" else None,
        }
        return lambda: tuple(self.entries.gemm(a, b, a.dtype, space, **kwargs))
