"""Chooses a model's attention backend and probes it."""

from __future__ import annotations

import logging

from metal_kernels import Backend, LayerShape, select_backend
from mlxserve.errors import InvalidConfig, UnsupportedModel
from mlxserve.model.load import LoadedModel
from mlxserve.model.probe import probe

log = logging.getLogger("mlxserve.attention")


def choose_attention(name: str, loaded: LoadedModel) -> tuple[Backend, float]:
    """(backend, the probe's largest difference) for a model.

    "auto" falls back to plain mlx, with a warning, for a model whose logits are wrong on the Metal
    kernels. Raises InvalidConfig, and UnsupportedModel for a model that cannot be paged.
    """
    shapes = [LayerShape(spec.key_dim, spec.value_dim, spec.dtype) for spec in loaded.layers]
    try:
        backend = select_backend(name, shapes)
    except ValueError as error:
        raise InvalidConfig(f"attention_backend: {error}", option="attention_backend") from error
    try:
        return backend, probe(loaded, backend)
    except UnsupportedModel as error:
        if name != "auto" or backend.name == "cpu":
            raise
        reason = error
    plain = select_backend("cpu")
    difference = probe(loaded, plain)
    log.warning("Attention runs in plain mlx, which is slower: %s", reason)
    return plain, difference
