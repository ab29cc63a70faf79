"""AssistantModel: the definition of Gemma 4's assistants, which mlx-lm does not have.

    token (embedded by the target), hidden state ──> pre_projection ──> layers ──> norm ──> head ──> logits
                                                        │                           └─> post_projection ──> hidden state
                                     queries alone: keys and values are those of
                                     the target's last layer of the same type

The layers are mlx-lm's of Gemma 4, all of which share the keys and values of others. The head of the smallest
assistants computes the logits of the tokens of a few clusters only. After `transformers`, `gemma4_assistant`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

# By a layer's type: keys and values as the target's layer wrote them.
Shared = Mapping[str, tuple[mx.array, mx.array]]
# What the target's parts of a checkpoint are called; an assistant computes none of them.
_UNUSED = (".k_proj.", ".v_proj.", ".k_norm.", "rotary_emb", "input_max", "input_min", "output_m")


@dataclass(frozen=True, slots=True)
class AssistantArgs:
    """The numbers of config.json that the definition needs.

    text            of the layers
    target_size     numbers of the target's hidden states
    num_clusters    of tokens; 0 for a head that computes all logits
    num_chosen      clusters whose logits are computed
    """

    text: Any
    target_size: int
    num_clusters: int
    num_chosen: int
    is_tied: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> AssistantArgs:
        """Read config.json. Raises KeyError, TypeError, and ValueError for sizes that no assistant has."""
        text = dict(config["text_config"])
        text.setdefault("hidden_size_per_layer_input", 0)
        text.setdefault("use_double_wide_mlp", False)
        text["num_kv_shared_layers"] = text["num_hidden_layers"]
        is_ordered = config.get("use_ordered_embeddings", False)
        args = cls(
            ModelArgs.from_dict(text),
            config["backbone_hidden_size"],
            config.get("num_centroids", 2048) if is_ordered else 0,
            config.get("centroid_intermediate_top_k", 32),
            config.get("tie_word_embeddings", True),
        )
        if is_ordered:
            args.check_clusters()
        return args

    def check_clusters(self) -> None:
        """Raises ValueError."""
        if self.num_clusters < 1 or self.text.vocab_size % self.num_clusters:
            raise ValueError(
                f"{self.text.vocab_size} tokens are not divided among {self.num_clusters} clusters"
            )
        if not 0 < self.num_chosen <= self.num_clusters:
            raise ValueError(f"{self.num_chosen} clusters of {self.num_clusters} are chosen")


class _Layers(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class ClusteredHead(nn.Module):  # type: ignore[misc]
    """Chooses clusters of tokens by their centroids, and computes the logits of their tokens alone.

    The other tokens get one less than the row's lowest logit. (In `transformers` it is the lowest of all rows; a guess
    must not depend on the requests beside it.)
    """

    def __init__(self, args: AssistantArgs) -> None:
        super().__init__()
        self.centroids = nn.Linear(args.text.hidden_size, args.num_clusters, bias=False)
        # (vocabulary,) ids, one cluster after the other.
        self.token_ordering = mx.zeros((args.text.vocab_size,), mx.int32)
        self._num_chosen = args.num_chosen
        self._shape = args.num_clusters, args.text.vocab_size // args.num_clusters

    def __call__(self, hidden: mx.array, embed: Callable[[mx.array], mx.array]) -> mx.array:
        """Map (T, hidden size) to (T, vocabulary); `embed` returns the rows of token ids."""
        num_rows = hidden.shape[0]
        scores = self.centroids(hidden)
        chosen = mx.argpartition(-scores, kth=self._num_chosen - 1, axis=-1)[:, : self._num_chosen]
        ids = self.token_ordering.reshape(self._shape)[chosen].reshape(num_rows, -1)
        logits = (embed(ids) @ hidden[..., None]).squeeze(-1)
        others = logits.min(axis=-1, keepdims=True) - 1
        every = mx.broadcast_to(others, (num_rows, self.token_ordering.size))
        return mx.put_along_axis(every, ids, logits, axis=-1)


class AssistantModel(nn.Module):  # type: ignore[misc]
    """Guesses the token after one that the target has not computed yet."""

    def __init__(self, args: AssistantArgs) -> None:
        super().__init__()
        size = args.text.hidden_size
        self.args = args
        self.model = _Layers(args.text)
        self.pre_projection = nn.Linear(2 * args.target_size, size, bias=False)
        self.post_projection = nn.Linear(size, args.target_size, bias=False)
        if args.num_clusters:
            self.masked_embedding = ClusteredHead(args)
        if not args.is_tied:
            self.lm_head = nn.Linear(size, args.text.vocab_size, bias=False)

    @property
    def layer_types(self) -> frozenset[str]:
        """Types of its layers: `full_attention`, `sliding_attention`."""
        return frozenset(layer.layer_type for layer in self.model.layers)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, positions: mx.array, shared: Shared
    ) -> tuple[mx.array, mx.array]:
        """Return (logits, hidden states for the next token).

        embedded: (T, target size), the tokens as the target embeds them, scaled
        hidden: (T, target size), of the positions before these tokens; of the target, or what the last call returned
        positions: (T,) int32, by which queries are rotated
        """
        rows = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[:, None]
        for layer in self.model.layers:
            rows, _, _ = layer(rows, shared_kv=shared[layer.layer_type], offset=positions)
        rows = self.model.norm(rows).squeeze(1)
        return self._head(rows), self.post_projection(rows)

    def _head(self, rows: mx.array) -> mx.array:
        if self.args.num_clusters:
            return self.masked_embedding(rows, self.model.embed_tokens)
        if not self.args.is_tied:
            logits: mx.array = self.lm_head(rows)
            return logits
        tied: mx.array = self.model.embed_tokens.as_linear(rows)
        return tied

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights that the definition has."""
        found = {}
        for name, array in weights.items():
            if any(part in name for part in _UNUSED):
                continue
            if self.args.is_tied and name.startswith("lm_head."):
                continue
            is_ordering = name.endswith("token_ordering")
            found[name] = array.astype(mx.int32) if is_ordering else array
        return found
