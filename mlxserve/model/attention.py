"""Which attention backend a model gets."""

from __future__ import annotations

import logging

from metal_kernels import Backend, select_backend
from mlxserve.errors import InvalidConfig, UnsupportedModel
from mlxserve.model.load import LoadedModel
from mlxserve.model.probe import probe

log = logging.getLogger("mlxserve.attention")


def choose_attention(name: str, loaded: LoadedModel) -> tuple[Backend, float]:
    """(backend, difference that the probe found) for a model.

    With "auto", a model whose answers are wrong on the Metal kernels gets plain mlx, and the log
    says so; one that is wrong there too cannot be paged. Raises InvalidConfig, UnsupportedModel.
    """
    shapes = [(spec.key_dim, spec.value_dim, spec.dtype) for spec in loaded.layers]
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
    log.warning("attention by plain mlx, which is slower: %s", reason)
    return plain, difference
