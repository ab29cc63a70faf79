"""Values that a config.json leaves to the defaults of its class in transformers.

Published files leave some out: those of Gemma 3 4B to 27B name neither heads nor a context.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mlxserve.hub.context import CONTEXT_KEYS

log = logging.getLogger("mlxserve.hub")

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_NEEDED = (CONTEXT_KEYS, _HEADS)  # one key of each
_TAKEN = ("max_position_embeddings", "num_attention_heads", "num_key_value_heads", "head_dim")


def with_class_defaults(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config.json, completed with its class's context length and heads.

    Imports transformers only if a value is missing.
    """
    if all(any(text.get(key) for key in keys) for keys in _NEEDED):
        return text
    from transformers.models.auto.configuration_auto import AutoConfig

    try:
        defaults = AutoConfig.for_model(str(text.get("model_type")))
    except Exception as error:  # noqa: BLE001 - whatever a class raises: loading needs no defaults
        log.info("No defaults for %s: %s", text.get("model_type"), error)
        return text
    defaulted = {key: getattr(defaults, key, None) for key in _TAKEN}
    named = {key: value for key, value in text.items() if value is not None}
    return {**{key: value for key, value in defaulted.items() if value is not None}, **named}
