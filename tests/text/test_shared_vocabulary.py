"""Two models share a vocabulary if nearly all tokens have the same ids."""

from __future__ import annotations

from typing import cast

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.hub.embedded import model_path
from mlxserve.text.shared_vocabulary import refuse_other_vocabulary
from mlxserve.text.tokenizer import Tokenizer


class Ids:
    """A tokenizer that is nothing but its vocabulary."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def vocabulary(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._names)}


def refuse(own: list[str], other: list[str]) -> None:
    refuse_other_vocabulary(cast(Tokenizer, Ids(own)), cast(Tokenizer, Ids(other)), "org/small")


NAMES = [f"token {number}" for number in range(1000)]


def test_a_vocabulary_is_shared_though_a_few_reserved_tokens_have_other_names() -> None:
    refuse(NAMES, NAMES)
    refuse(NAMES, [*NAMES, *"abc"])
    refuse([*NAMES, *"abc"], NAMES)
    refuse(NAMES, [*NAMES[:-10], *(f"reserved {number}" for number in range(10))])


def test_another_vocabulary_is_refused_with_a_token_that_differs() -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"draft_model=org/small has another vocabulary: 11 of the model's 1000 tokens differ. "
        "For 'token 989' it has none instead of 989",
    ):
        refuse(NAMES, NAMES[:-11])
    with pytest.raises(InvalidConfig, match="For 'token 0' it has the id 1 instead of 0"):
        refuse(NAMES, ["new", *NAMES])


def test_a_tokenizer_knows_all_its_tokens() -> None:
    tokenizer = Tokenizer(model_path())
    vocabulary = tokenizer.vocabulary()
    assert len(vocabulary) == tokenizer.vocab_size
    assert all(tokenizer.token_id(name) == id_ for name, id_ in list(vocabulary.items())[:50])
