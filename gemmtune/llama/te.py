"""Transformer Engine's part of the reference job: its layers, FP8, and fused weight gradients.

transformer_engine is imported only where --te asks for it. Names are those of TE 2.x (NVIDIA, and
AMD's fork of it): te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.autocast (te.fp8_autocast
before 2.9), te.checkpoint, transformer_engine.common.recipe.DelayedScaling, and
transformer_engine.pytorch.distributed.prepare_te_modules_for_fsdp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gemmtune.errors import UsageError

AMAX_HISTORY = 16


def load(fp8: bool = False) -> Any:
    """The module transformer_engine.pytorch; UsageError where it, or `fp8`, is not to be had."""
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UsageError(
            f"--te needs Transformer Engine, which cannot be imported here ({reason}): install it "
            "for this GPU (pip install 'gemmtune[te]'), or leave --te out"
        ) from e
    if not torch.cuda.is_available():
        raise UsageError("--te needs a GPU, and torch sees none here: leave --te out")
    available = getattr(te, "is_fp8_available", None)
    if fp8 and available:
        here, reason = available(return_reason=True)
        if not here:
            raise UsageError(f"--te needs a GPU with FP8, or --no-fp8 beside it: {reason}")
    return te


class TeLayers:
    """model.Layers made of Transformer Engine's, RMSNorm and SwiGLU fused into them."""

    def __init__(
        self, eps: float, fuse_wgrad: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.te = load()
        self.plain = {
            "bias": False,
            "params_dtype": dtype,
            "device": str(device),
            "fuse_wgrad_accumulation": fuse_wgrad,
        }
        self.norm = {"normalization": "RMSNorm", "eps": eps}

    def norm_linear(self, n_in: int, n_out: int) -> nn.Module:
        return self.te.LayerNormLinear(n_in, n_out, **self.norm, **self.plain)  # type: ignore[no-any-return]

    def linear(self, n_in: int, n_out: int) -> nn.Module:
        return self.te.Linear(n_in, n_out, **self.plain)  # type: ignore[no-any-return]

    def norm_mlp(self, hidden: int, ffn: int) -> nn.Module:
        return self.te.LayerNormMLP(  # type: ignore[no-any-return]
            hidden, ffn, activation="swiglu", **self.norm, **self.plain
        )


def checkpoint(reentrant: bool) -> Callable[..., Any]:
    """TE's activation checkpointing, which restores the FP8 scales for the recomputation."""
    return partial(load().checkpoint, use_reentrant=reentrant)


def fp8(group: Any) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context of a forward pass in FP8: HYBRID (E4M3 forward, E5M2 backward), delayed
    scaling over the largest of AMAX_HISTORY amaxes, which are reduced over the process `group`
    (None: the default group, if there is one)."""
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(
        fp8_format=Format.HYBRID, amax_history_len=AMAX_HISTORY, amax_compute_algo="max"
    )
    te = load()
    if hasattr(te, "autocast"):
        return partial(te.autocast, enabled=True, recipe=recipe, amax_reduction_group=group)
    return partial(te.fp8_autocast, enabled=True, fp8_recipe=recipe, fp8_group=group)


def prepare_for_fsdp(model: nn.Module) -> None:
    """Tells the TE modules of an FSDP1 model about its process group.

    TE tells only those that are FSDP units themselves; those then also scatter the activations
    that they save over the ranks. Here a unit is a whole block, so none does.
    """
    from transformer_engine.pytorch.distributed import prepare_te_modules_for_fsdp

    prepare_te_modules_for_fsdp(model)


class MainGrads:
    """A float32 `main_grad` on every parameter, and float32 copies for the optimizer to update.

    TE's weight GEMMs add into main_grad (beta 1) and leave .grad empty; what other layers leave
    in .grad is added to it as it appears. `masters` share their gradients with the main_grads.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params: list[Tensor] = list(params)
        self.masters: list[Tensor] = []
        self.grads: list[Tensor] = []
        for p in self.params:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(self._collect)
            master = nn.Parameter(p.detach().float())
            master.grad = p.main_grad  # type: ignore[attr-defined]
            self.masters.append(master)
            self.grads.append(master.grad)

    @staticmethod
    def _collect(p: Tensor) -> None:
        if p.grad is not None:
            p.main_grad.add_(p.grad)  # type: ignore[attr-defined]
            p.grad = None

    def zero(self) -> None:
        """Empties the gradients; before the first backward pass of a step."""
        torch._foreach_zero_(self.grads)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the updated masters into the parameters; after the optimizer's step."""
        torch._foreach_copy_(self.params, self.masters)
