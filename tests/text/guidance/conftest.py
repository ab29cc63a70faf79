"""The embedded tokenizer, and a compiler of grammars for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.embedded import model_path
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.tokenizer import Tokenizer

VOCAB_SIZE = 2100  # of the model; larger than the tokenizer's


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_path())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = Grammars(tokenizer, VOCAB_SIZE, FairExecutor())
    yield found
    found.close()
