"""Whether two models have the same tokens, so that one of them can draft for the other."""

from __future__ import annotations

from mlxserve.core.errors import InvalidConfig
from mlxserve.text.tokenizer import Tokenizer

# Of the model's tokens: releases of a family rename a few reserved ones.
_MIN_SHARE = 0.99


def refuse_other_vocabulary(own: Tokenizer, other: Tokenizer, name: str) -> None:
    """Raises InvalidConfig if the draft model `name`, with the tokenizer `other`, has other tokens."""
    expected, ids = own.vocabulary(), other.vocabulary()
    different = [token for token, id_ in expected.items() if ids.get(token) != id_]
    if len(expected) - len(different) >= _MIN_SHARE * len(expected):
        return
    example = different[0]
    has = f"the id {ids[example]}" if example in ids else "none"
    raise InvalidConfig(
        f"draft_model={name} has another vocabulary: {len(different)} of the model's {len(expected)} tokens "
        f"differ. For {example!r:.40} it has {has} instead of {expected[example]}. Choose a smaller model of "
        "the same family, with the same tokenizer.",
        option="draft_model",
    )
