"""The Llama models of the reference job: their dimensions, and the arithmetic that follows. Pure.

Dimensions are those of the published checkpoints (config.json of meta-llama/Llama-2-7b-hf,
Llama-2-70b-hf, Meta-Llama-3-8B and Meta-Llama-3-70B); input and output embeddings are not tied.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One Llama: widths in elements, `seq` the tokens of a training sequence.

    `head_dim` is hidden / heads in every published model; `tiny` departs from it so that no two
    of its GEMM dimensions are equal.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    norm_eps: float
    seq: int

    @property
    def attn_width(self) -> int:
        """Width of all query heads: what the output projection reads."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Output width of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def fc1_width(self) -> int:
        """Output width of the fused gate and up projection."""
        return 2 * self.ffn

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every linear layer: four per block, and the output layer."""
        return {
            "qkv": (self.hidden, self.qkv_width),
            "o": (self.attn_width, self.hidden),
            "fc1": (self.hidden, self.fc1_width),
            "fc2": (self.ffn, self.hidden),
            "lm_head": (self.hidden, self.vocab),
        }

    @property
    def params(self) -> int:
        """All parameters, input and output embeddings included."""
        sizes = {name: rows * columns for name, (rows, columns) in self.linears.items()}
        head = sizes.pop("lm_head")
        block = sum(sizes.values()) + 2 * self.hidden
        return self.layers * block + self.hidden + head + self.vocab * self.hidden

    def flops_per_token(self, seq: int) -> int:
        """FLOPs of one training step per token: 6·N + 12·L·H·Q·T.

        L layers, H query heads, Q head dimension, T = `seq`. N counts every parameter but the
        input embedding, a lookup that multiplies nothing; the output layer counts (torchtitan's
        get_nparams_and_flops, which takes the formula from appendix B of the PaLM paper,
        arXiv 2204.02311). The attention term counts the full score matrix although it is causal,
        and recomputation under activation checkpointing is not counted: MFU, not HFU.
        """
        multiplied = self.params - self.vocab * self.hidden
        return 6 * multiplied + 12 * self.layers * self.heads * self.head_dim * seq


MODELS = {
    "tiny": Config(192, 448, 2, 4, 2, 64, 1024, 10_000.0, 1e-5, 160),
    "llama2-7b": Config(4096, 11_008, 32, 32, 32, 128, 32_000, 10_000.0, 1e-5, 4096),
    "llama2-70b": Config(8192, 28_672, 80, 64, 8, 128, 32_000, 10_000.0, 1e-5, 4096),
    "llama3-8b": Config(4096, 14_336, 32, 32, 8, 128, 128_256, 500_000.0, 1e-5, 8192),
    "llama3-70b": Config(8192, 28_672, 80, 64, 8, 128, 128_256, 500_000.0, 1e-5, 8192),
}
