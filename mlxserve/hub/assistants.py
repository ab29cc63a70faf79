"""Gemma 4's assistants: small models that guess the next tokens of one other model, whose keys and values they read.

Each is published for one size of Gemma 4 (`google/gemma-4-E4B-it-assistant`) and fits no other: it reads hidden states,
keys and values of that size. Its config.json says whose. Imports no mlx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
# Hidden sizes of the models that assistants are published for.
_MODELS = {1536: "E2B", 2560: "E4B", 3840: "12B", 2816: "26B-A4B", 5376: "31B"}


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return True if this config.json is an assistant's."""
    return config.get("model_type") in _KINDS


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def why_not_for(
    assistant: Mapping[str, Any], name: str, target: Mapping[str, Any], target_name: str
) -> str | None:
    """Return why an assistant does not fit a model, and which one would; None if it does.

    assistant, target: both config.json; name, target_name: what they are called
    """
    text = _text(target)
    kind, size = str(text.get("model_type")), text.get("hidden_size")
    if not kind.startswith("gemma4"):
        return (
            f"draft_model={name} is an assistant of Gemma 4 and reads its keys and values, and {target_name} is a "
            f"{kind} model. Choose a small model of the same family, or leave draft_model out."
        )
    made_for = assistant.get("backbone_hidden_size")
    if made_for != size:
        return (
            f"draft_model={name} is the assistant of {_described(made_for)}, and {target_name} is "
            f"{_described(size)}. Choose {_fitting(size)}, or leave draft_model out."
        )
    vocabularies = [_text(config).get("vocab_size") for config in (assistant, target)]
    if vocabularies[0] != vocabularies[1]:
        return (
            f"draft_model={name} has a vocabulary of {vocabularies[0]} tokens, and {target_name} one of "
            f"{vocabularies[1]}. Choose {_fitting(size)}, or leave draft_model out."
        )
    return None


def _described(size: object) -> str:
    model = _MODELS.get(size) if isinstance(size, int) else None
    sized = f"a model with hidden states of {size} numbers"
    return sized if model is None else f"Gemma 4 {model} ({sized})"


def _fitting(size: object) -> str:
    model = _MODELS.get(size) if isinstance(size, int) else None
    return "its own assistant" if model is None else f"google/gemma-4-{model}-it-assistant"
