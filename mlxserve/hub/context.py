"""The context length that a model's config.json declares. Never imports mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "model_max_length",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
# Scalings whose config names the length before them; their product is what the model was extended to.
_EXTENDED = frozenset({"yarn", "deepseek_yarn", "telechat3-yarn"})
# Scalings that a config's length may count or not: it is the default, and the product can be asked for.
_EXTENDABLE = frozenset({"linear", "dynamic"})


@dataclass(frozen=True, slots=True)
class Context:
    """Context lengths in tokens: the default, and the maximum that the rotary scaling covers."""

    length: int
    longest: int


def context_of(text: Mapping[str, Any]) -> Context | None:
    """Return the context for the text part of a config.json; None if it names no length.

    A length next to YaRN may be the one before the scaling (Qwen 2.5) or after it (DeepSeek,
    gpt-oss).
    """
    length = next((int(text[key]) for key in CONTEXT_KEYS if _is_length(text.get(key))), None)
    if length is None:
        return None
    scaling = rope_scaling(text)
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in (*_EXTENDED, *_EXTENDABLE) or not _is_number(factor, 1, 1e6):
        return Context(length, length)
    before = scaling.get("original_max_position_embeddings")
    covered = max(length, int(factor * (before if _is_length(before) else length)))
    return Context(covered if kind in _EXTENDED else length, covered)


def rope_scaling(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary scaling of the full-attention layers; empty if there is none."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = text.get(key)
        if isinstance(scaling, Mapping):
            inner = scaling.get("full_attention")
            return inner if isinstance(inner, Mapping) else scaling
    return {}


def _is_length(value: object) -> TypeGuard[float]:
    return _is_number(value, 2, 2**31 - 1)


def _is_number(value: object, minimum: float, maximum: float) -> TypeGuard[float]:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and minimum <= value <= maximum
    )
