"""The embedded model as a PyTorch module, for training only.

It is mlx-lm's qwen3 architecture: `state_dict()` has the same parameter names, so exporting means
writing it to a file. It knows nothing of text, data or optimisers.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The sizes of a qwen3 network. `config()` has them in the format of mlx-lm and transformers."""

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64  # the smallest that the Metal kernels support
    mlp_size: int = 512
    max_positions: int = 4096
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-6

    def config(self) -> dict[str, object]:
        """The content of config.json without the token ids."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_size,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
        }


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, causal."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_rows, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, tokens, hidden); cos, sin: (tokens, head_dim)."""
        batch, tokens, _ = x.shape
        q, k, v = (
            proj(x).view(batch, tokens, -1, self.shape.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers, final norm: mlx-lm's `model.*`."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, tokens) -> hidden states (batch, tokens, hidden)."""
        x = self.embed_tokens(tokens)
        cos, sin = rope_table(self.shape, tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Network(nn.Module):
    """The language model. The head is the embedding, transposed."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.apply(_initialise)
        for layer in self.model.layers:
            # Residual branches start at zero, so every layer starts as the identity.
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, tokens) -> logits (batch, tokens, vocabulary)."""
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, taught: Tensor) -> Tensor:
        """Mean cross-entropy of the tokens marked in `taught`, each predicted from its prefix.

        tokens: (batch, tokens) ids; taught: (batch, tokens) booleans, the first column unused.
        Only the taught rows go through the head: with a vocabulary of 2k, the head is a quarter of
        a step's arithmetic.
        """
        wanted = taught[:, 1:]
        hidden = self.model(tokens)[:, :-1][wanted]
        logits = F.linear(hidden, self.model.embed_tokens.weight)
        return F.cross_entropy(logits, tokens[:, 1:][wanted])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.04)


def rope_table(shape: NetworkShape, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotations, each (tokens, head_dim) with two equal halves."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(
        torch.arange(num_tokens, dtype=torch.float32), shape.rope_theta**-exponents
    )
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al. 2021) in the half-split layout. x: (..., tokens, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
