"""Chooses the attention backend of each layer of a model and probes them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from metal_kernels import Backend, LayerShape, select_backends
from mlxserve.errors import InvalidConfig, UnsupportedModel
from mlxserve.model.load import LoadedModel
from mlxserve.model.probe import probe

log = logging.getLogger("mlxserve.attention")


def choose_attention(name: str, loaded: LoadedModel) -> tuple[tuple[Backend, ...], float]:
    """(the backend of each layer, the probe's largest difference) for a model.

    "auto" falls back to plain mlx in all layers, with a warning, for a model whose logits are wrong
    on the Metal kernels. Raises InvalidConfig, and UnsupportedModel for a model that cannot be paged.
    """
    shapes = [LayerShape(spec.key_dim, spec.value_dim, spec.dtype) for spec in loaded.layers]
    try:
        backends = select_backends(name, shapes)
    except ValueError as error:
        raise InvalidConfig(f"attention_backend: {error}", option="attention_backend") from error
    try:
        return backends, probe(loaded, backends)
    except UnsupportedModel as error:
        if name != "auto" or all(backend.name == "cpu" for backend in backends):
            raise
        reason = error
    plain = select_backends("cpu", shapes)
    difference = probe(loaded, plain)
    log.warning("Attention runs in plain mlx, which is slower: %s", reason)
    return plain, difference


def in_words(backends: Sequence[Backend]) -> str:
    """Which backends the layers have, and how many layers each where they differ."""
    counts = Counter(backend.name for backend in backends)
    if len(counts) == 1:
        return next(iter(counts))
    return " and ".join(f"{name} ({count} layers)" for name, count in counts.items())
