"""Llama in torch, its projections fused as Transformer Engine fuses them.

One block has four linear layers: qkv and fc1 (gate and up), each with the RMSNorm before it, o and
fc2. `Layers` makes them, so the same model is built of torch's layers or of Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemmtune.llama.config import Config

# checkpoint(function, *args): runs the function, now or again in the backward pass.
Checkpoint = Callable[..., Any]


class Layers(Protocol):
    """Makes the layers of one block; widths in elements, no layer has a bias."""

    def norm_linear(self, n_in: int, n_out: int) -> nn.Module:
        """RMSNorm, then a linear layer."""

    def linear(self, n_in: int, n_out: int) -> nn.Module: ...

    def norm_mlp(self, hidden: int, ffn: int) -> nn.Module:
        """RMSNorm, fc1 (hidden → 2·ffn: gate, up), silu(gate)·up, fc2 (ffn → hidden)."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in x's type."""

    def __init__(self, width: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **where))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class NormLinear(nn.Linear):
    """RMSNorm and the linear layer after it, as one module like te.LayerNormLinear."""

    def __init__(self, n_in: int, n_out: int, eps: float, **where: Any) -> None:
        super().__init__(n_in, n_out, bias=False, **where)
        self.norm = RMSNorm(n_in, eps, **where)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Mlp(nn.Module):
    """SwiGLU with gate and up in one GEMM."""

    def __init__(self, hidden: int, ffn: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.fc1 = NormLinear(hidden, 2 * ffn, eps, **where)
        self.fc2 = nn.Linear(ffn, hidden, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)  # type: ignore[no-any-return]


class TorchLayers:
    """Layers made of torch's own."""

    def __init__(self, eps: float, **where: Any) -> None:
        self.eps = eps
        self.where = where

    def norm_linear(self, n_in: int, n_out: int) -> nn.Module:
        return NormLinear(n_in, n_out, self.eps, **self.where)

    def linear(self, n_in: int, n_out: int) -> nn.Module:
        return nn.Linear(n_in, n_out, bias=False, **self.where)

    def norm_mlp(self, hidden: int, ffn: int) -> nn.Module:
        return Mlp(hidden, ffn, self.eps, **self.where)


def rope_table(config: Config, seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosine and sine of the rotary angles: (2, seq, 1, head_dim / 2)."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    angle = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()))[:, :, None].to(dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of x (batch, seq, heads, head_dim), its halves paired; in x's type."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, heads, seq, head_dim); k and v may have fewer heads."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    try:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    except TypeError:  # torch 2.4 has no enable_gqa
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Grouped-query attention on a fused projection; the norm before it is qkv's."""

    def __init__(self, config: Config, layers: Layers) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv = layers.norm_linear(config.hidden, config.qkv_width)
        self.o = layers.linear(config.attn_width, config.hidden)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = torch.split(qkv, [self.heads + self.kv_heads, self.kv_heads], 2)
        q, k = torch.split(rotate(qk, rope), [self.heads, self.kv_heads], 2)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer of the model, and the unit of sharding.

    `checkpoint` is applied inside the block, so that FSDP gathers the weights before the
    recomputation and not within it.
    """

    def __init__(self, config: Config, layers: Layers, checkpoint: Checkpoint | None) -> None:
        super().__init__()
        self.attention = Attention(config, layers)
        self.mlp = layers.norm_mlp(config.hidden, config.ffn)
        self.checkpoint = checkpoint

    def run(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(x, rope)
        return x + self.mlp(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        if self.checkpoint is None:
            return self.run(x, rope)
        return self.checkpoint(self.run, x, rope)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """forward(tokens, targets), both (batch, seq) of int64, gives the mean cross entropy.

    `compute` is the type of the activations; the loss is computed in float32. The `rope` buffer
    is left for the caller to set once the model is on its device, in the type it wants it in.
    """

    rope: Tensor | None

    def __init__(
        self,
        config: Config,
        layers: Layers,
        compute: torch.dtype,
        checkpoint: Checkpoint | None = None,
        **where: Any,
    ) -> None:
        super().__init__()
        self.compute = compute
        self.embed = nn.Embedding(config.vocab, config.hidden, **where)
        self.layers = nn.ModuleList(Block(config, layers, checkpoint) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps, **where)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False, **where)
        self.register_buffer("rope", None, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).to(self.compute)
        for block in self.layers:
            x = block(x, self.rope)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
