"""The probe of an assistant at load: how many of its guesses at a fixed text are what the model says itself.

Its config.json says for which size of Gemma 4 it was trained, not for which model of that size, and an assistant of
another one is only slow. It is given whole texts, without pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from metal_kernels.reading import read
from mlxserve.model.drafting.assistant import last_layers
from mlxserve.model.drafting.assistant_model import AssistantModel, Shared
from mlxserve.model.drafting.head_probe import NUM_GUESSES, send_text
from mlxserve.model.drafting.target_embedding import embedding_of
from mlxserve.model.load import LoadedModel


def share_accepted(model: AssistantModel, target: LoadedModel, token_ids: Sequence[int]) -> float:
    """Return the share of an assistant's guesses at the last tokens of a text that are the model's best tokens.

    The other ranks of a pipeline call `help_to_read`. Raises what the definitions raise.
    """
    if target.group is not None:
        send_text(target.group, token_ids)
    # Those of layers with a window forget what the guesses at earlier tokens see.
    caches = [KVCache() for _ in make_prompt_cache(target.model)]
    tokens = mx.array(list(token_ids))
    with target.selector.capturing() as captured:
        own = target.model(tokens[None], cache=caches)[0]
    [hidden] = [each.reshape(-1, each.shape[-1]) for each in captured]
    embedded = embedding_of(target.model)(tokens)
    first = max(1, len(token_ids) - NUM_GUESSES)
    guesses = []
    for position in range(first, len(token_ids)):
        before = slice(position - 1, position)
        logits, _ = model(
            embedded[position : position + 1],
            hidden[before].astype(embedded.dtype),
            mx.array([position - 1]),
            _shared(target, caches, position, model.layer_types),
        )
        guesses.append(logits)
    logits = mx.concatenate(guesses)
    right = mx.argmax(logits, axis=-1) == mx.argmax(own[first:], axis=-1)
    # What is no number has no best token.
    right = right & mx.all(mx.isfinite(logits), axis=-1)
    return float(read(right).mean())


def _shared(
    target: LoadedModel, caches: Sequence[KVCache], length: int, layer_types: frozenset[str]
) -> Shared:
    """Return the keys and values of the first `length` positions that a query after them sees."""
    shared = {}
    own = caches[-len(target.layers) :]  # rank 0 of a pipeline has the last layers
    for kind, layer in last_layers(target.layers).items():
        if kind in layer_types:
            window = target.layers[layer].window
            seen = slice(0 if window is None else max(0, length - window), length)
            cache = own[layer]
            shared[kind] = cache.keys[:, :, seen], cache.values[:, :, seen]
    return shared
