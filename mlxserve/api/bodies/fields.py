"""Fields that clients may write in several ways, normalised to one.

Every function takes the value sent and returns the value for the body's model, or raises ValueError
with a message that continues the field's name.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Prompt: TypeAlias = str | tuple[int, ...]
TemplateKwargs: TypeAlias = dict[str, Any]

MAX_NAME_LENGTH = 256
MAX_PROMPTS = 1_024
MAX_DIMENSIONS = 65_536  # of a vector
MAX_LOGIT_BIASES = 1_024


def stop_strings(value: object) -> object:
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def token_biases(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} tokens are allowed, got {len(value)}")
    return {_token_id(key): bias for key, bias in value.items()}


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ValueError(f"{text[:40]!r} is not a token id")
    return int(text)


def prompts(value: object) -> tuple[Prompt, ...]:
    """Read a string, a list of token ids, or a list of either kind of prompt."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if _is_token_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed, got {len(value)}")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and _is_token_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise ValueError("mixes kinds, or contains something that is neither text nor a token id")


def _is_token_ids(value: list[object]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in value)


def template_kwargs(value: object) -> TemplateKwargs:
    """Template variables; null is none. Which ones a template reads is known when it is rendered."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return {name: setting for name, setting in value.items() if setting is not None}
