"""A small byte-level GPT: everything that makes real checkpoints hard to move, in a few hundred thousand parameters.

Embedding and output head share one weight; the MLP is gated and has biases; the prior over tokens is frozen;
the rotary table is a persistent buffer; 259 tokens and an MLP width of 214 do not divide by 3 or by 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TOKENS = 259  # 256 bytes, then begin-of-file, end-of-file and padding
BEGIN, END, PADDING = 256, 257, 258


@dataclass(frozen=True)
class GPTConfig:
    """What the shapes of the weights do not show is here too (heads, rotary base, epsilon): it is saved with them."""

    layers: int = 4
    dim: int = 80
    heads: int = 4
    hidden: int = 214  # width of the gated MLP: tensor parallelism cuts it, so it must divide by tp
    block: int = 64  # tokens per sample
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tied: bool = True


SIZES = {
    "small": GPTConfig(),
    "tiny": GPTConfig(layers=2, dim=40, hidden=106, block=32),
    "slim": GPTConfig(layers=5, dim=24, heads=2, hidden=70, block=24, rope_base=500.0, norm_eps=1e-6, tied=False),
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Under tensor parallelism each rank holds some of the heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1: this rank's heads, all of them without tensor parallelism.
        query, key, value = (
            project(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, rope[:length]), rotate(key, rope[:length])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class GatedMLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden)
        self.up = nn.Linear(config.dim, config.hidden)
        self.down = nn.Linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = GatedMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Maps token ids `(batch, length)` to logits `(batch * length, NUM_TOKENS)` in float32 at least."""

    rope: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(NUM_TOKENS, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, NUM_TOKENS, bias=False)
        self.prior = nn.Parameter(torch.zeros(NUM_TOKENS), requires_grad=False)  # the tokens' log frequencies
        self.register_buffer("rope", rotary_table(config), persistent=True)
        if config.tied:
            self.tie()

    def tie(self) -> None:
        """Makes the head use the embedding's weight. Call it again after anything that replaces parameters."""
        self.head.weight = self.embedding.weight

    @property
    def is_tied(self) -> bool:
        return self.head.weight is self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rope)
        return widen(self.head(self.norm(x)).flatten(0, 1)) + self.prior


def initialize(model: GPT, log_frequencies: Tensor, seed: int) -> None:
    """Fills every parameter from `seed` alone. Called on the whole model, before it is cut up.

    So the start does not depend on how many ranks there are.
    """
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * model.config.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 0.06 * (residual if name.endswith(("out.weight", "down.weight")) else 1.0)
                parameter.normal_(std=scale, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.zero_()
        model.prior.copy_(log_frequencies)


def widen(x: Tensor) -> Tensor:
    """Returns `x` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary_table(config: GPTConfig) -> Tensor:
    """Returns cosines and sines `(block, head_dim / 2, 2)` of the rotary position angles, in float32."""
    half = config.dim // config.heads // 2
    rates = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.block, dtype=torch.float32), rates)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates pairs (i, i + half) of the last dimension of `x` `(batch, heads, length, head_dim)`."""
    cosine, sine = rope.unbind(-1)
    left, right = widen(x).chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1).type_as(x)
