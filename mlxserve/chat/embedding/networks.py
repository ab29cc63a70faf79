"""The networks of text encoders: token ids to the last hidden states, by definitions of mlx-vlm and mlx-lm.

BERT, RoBERTa, XLM-RoBERTa, ModernBERT   mlx-vlm's, an extra, without its pooling
decoders (Qwen3-Embedding ...)           mlx-lm's: rows are padded at their end, which no row before sees
decoders that see both ways              mlx-lm's layers with masks of our own (EmbeddingGemma)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import ModelFiles
from mlxserve.hub.headers import read_shapes
from mlxserve.hub.text_encoders import TextEncoder
from mlxserve.model.definitions import (
    PACKAGE,
    Weights,
    defer_mlx_vlm,
    definition_of,
    is_installed,
)
from mlxserve.model.load import READ_ERRORS, refuse_packed
from mlxserve.model.refusals import why_not_loaded
from mlxserve.system.extras import package_command

_ACTIVATIONS = ("gelu", None)  # the only one that the definitions compute


class EncoderNetwork(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """An encoder with mlx-vlm's definition."""

    def __init__(self, definition: type, config: Any) -> None:
        super().__init__()
        self.encoder = definition(config)

    def __call__(self, ids: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
        """Return hidden states (rows, tokens, hidden), or logits (rows, 1) of a model with a head.

        ids: (rows, tokens)
        mask: (rows, tokens), False for padding
        types: (rows, tokens), the text of a pair that a token belongs to; None without pairs
        """
        output = self.encoder(ids, attention_mask=mask.astype(mx.float32), token_type_ids=types)
        result: mx.array = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return result

    def sanitize(self, weights: Weights) -> Weights:
        return _under("encoder", self.encoder.sanitize(weights))


class DecoderNetwork(nn.Module):  # type: ignore[misc]
    """The layers of one of mlx-lm's language models, without its head.

    dense: layers after the pooling, which conversions to MLX put into the model's own file
    """

    def __init__(self, definition: Any, dense: Sequence[tuple[int, int]], config: Any) -> None:
        """dense: (in, out) of each dense layer."""
        super().__init__()
        whole = definition(config)
        self.model = whole.model
        self.dense = [nn.Linear(*sizes, bias=False) for sizes in dense]
        # A partial: as an attribute, the whole model would count as a part of this one.
        self._sanitized = partial(_sanitized, [whole])

    def logits(self, hidden: mx.array) -> mx.array:
        """Map (rows, hidden) to (rows, vocabulary), for a model whose head is its embedding."""
        logits: mx.array = self.model.embed_tokens.as_linear(hidden)
        return logits

    def __call__(self, ids: mx.array, _mask: mx.array, _types: mx.array | None) -> mx.array:
        """Return hidden states (rows, tokens, hidden). Padding at the end changes none before it."""
        hidden: mx.array = self.model(ids)
        return hidden

    def sanitize(self, weights: Weights) -> Weights:
        return self._sanitized(weights)


class JudgeNetwork(DecoderNetwork):
    """A decoder with a head of its own."""

    def __init__(self, definition: Any, dense: Sequence[tuple[int, int]], config: Any) -> None:
        super().__init__(definition, dense, config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.lm_head(hidden)
        return logits

    def sanitize(self, weights: Weights) -> Weights:
        head = {name: array for name, array in weights.items() if name.startswith("lm_head.")}
        return super().sanitize(weights) | head


class BidirectionalNetwork(DecoderNetwork):
    """Gemma 3's layers with bidirectional attention, over all tokens or those in a window."""

    def __init__(self, definition: Any, dense: Sequence[tuple[int, int]], config: Any) -> None:
        super().__init__(definition, dense, config)
        # config.json counts both sides: 512 tokens are 256 before and 256 after.
        self._reach = int(config.sliding_window) // 2

    def __call__(self, ids: mx.array, mask: mx.array, _types: mx.array | None) -> mx.array:
        model = self.model
        hidden = model.embed_tokens(ids)
        hidden = hidden * mx.array(model.args.hidden_size**0.5, mx.bfloat16).astype(hidden.dtype)
        positions = mx.arange(ids.shape[1])
        seen = mx.broadcast_to(
            mask[:, None, None, :], (len(ids), 1, len(positions), len(positions))
        )
        distances = mx.abs(positions[:, None] - positions)
        # Padding sees itself: a row that sees nothing is NaN, and NaN spreads by products with 0.
        near = (seen & (distances <= self._reach)) | (distances == 0)
        for layer in model.layers:
            allowed = near if layer.self_attn.is_sliding else seen
            hidden = layer(hidden, allowed, None)
        normed: mx.array = model.norm(hidden)
        return normed


def _under(part: str, weights: Weights) -> Weights:
    return {f"{part}.{name}": array for name, array in weights.items()}


def _sanitized(whole: list[nn.Module], weights: Weights) -> Weights:
    """Rename weights for a definition with a head.

    Embedding models are published without the head, and then without the prefix `model.`.
    """
    weights = {
        name if name.startswith(("model.", "lm_head.", "dense.")) else f"model.{name}": array
        for name, array in weights.items()
    }
    dense = {name: array for name, array in weights.items() if name.startswith("dense.")}
    own = {name: array for name, array in weights.items() if name not in dense}
    if hasattr(whole[0], "sanitize"):
        own = whole[0].sanitize(own)
    return {name: array for name, array in own.items() if name.startswith("model.")} | dense


def read_network(files: ModelFiles, encoder: TextEncoder) -> nn.Module:
    """Load a network with its weights, which are not evaluated. Raises UnsupportedModel."""
    try:
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files.weights:
            shapes |= read_shapes(file, files.name)
        make, arguments = _classes(files, encoder, _dense_sizes(files, shapes))
        model, _ = load_model(
            files.path,
            lazy=True,
            model_config={"model_file": None},
            get_model_classes=lambda **_: (make, arguments),
        )
    except UnsupportedModel:
        raise
    except READ_ERRORS as error:
        raise UnsupportedModel(why_not_loaded(files, error)) from error
    refuse_packed(model, files)
    return model


def _dense_sizes(files: ModelFiles, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return (in, out) of the layers after the pooling in the model's own file."""
    sizes: list[tuple[int, int]] = []
    while (shape := shapes.get(f"dense.{len(sizes)}.weight")) is not None and len(shape) == 2:
        num_in = shape[1]
        if (scales := shapes.get(f"dense.{len(sizes)}.scales")) is not None:
            num_in = scales[1] * int(files.config["quantization"]["group_size"])
        sizes.append((num_in, shape[0]))
    return sizes


def _classes(
    files: ModelFiles, encoder: TextEncoder, dense: Sequence[tuple[int, int]]
) -> tuple[Any, Any]:
    """The classes of network and arguments that `load_model` instantiates."""
    if encoder.kind is not None:
        module = _module(files, encoder.kind)
        name = "SequenceClassificationModel" if encoder.is_reranker else "Model"
        return partial(EncoderNetwork, getattr(module, name)), module.ModelConfig
    definition = definition_of(files.config)
    if encoder.judges and files.config.get("tie_word_embeddings") is not True:
        return partial(JudgeNetwork, definition.model, dense), definition.arguments
    if files.config.get("use_bidirectional_attention") is True:
        kind = files.config["model_type"]
        if kind != "gemma3_text":
            raise UnsupportedModel(
                f"{files.name} is a {kind} model that sees both ways. Of such models, Gemma 3's are served."
            )
        return partial(BidirectionalNetwork, definition.model, dense), definition.arguments
    if files.config.get("is_causal") is False:
        raise UnsupportedModel(
            f"{files.name} sees both ways by code of its own (is_causal), which is not run."
        )
    if not isinstance(definition.model, type) or not definition.model.__module__.startswith(
        "mlx_lm."
    ):
        raise UnsupportedModel(
            f"{files.name}: mlx-lm has no definition of {files.config['model_type']} to embed texts with."
        )
    return partial(DecoderNetwork, definition.model, dense), definition.arguments


def _module(files: ModelFiles, kind: str) -> ModuleType:
    """Import mlx-vlm's definition. Raises UnsupportedModel if it is missing or differs."""
    config: Mapping[str, Any] = files.config
    if not is_installed():
        vlm = package_command("mlx-vlm>=0.7.10,<0.8", flags="--no-deps")
        raise UnsupportedModel(
            f"{files.name} is a {config['model_type']} model, whose definition is mlx-vlm's, which is not "
            f"installed: `{vlm} && {package_command('pillow')}`."
        )
    if config.get("hidden_act") not in _ACTIVATIONS or config.get(
        "position_embedding_type"
    ) not in (
        "absolute",
        None,
    ):
        raise UnsupportedModel(
            f"{files.name} has another activation or other positions than BERT's "
            f"({config.get('hidden_act')}, {config.get('position_embedding_type')}), which mlx-vlm's "
            "definition does not compute."
        )
    defer_mlx_vlm()
    return importlib.import_module(f"{PACKAGE}.models.{kind}")
