"""Parts of documents are compared with a question by vectors, which are kept for each API key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from mlxserve.chat import part_scores
from mlxserve.chat.part_scores import PartScores
from mlxserve.core.errors import EngineStopped, InvalidParameter
from mlxserve.helpers.work import Work

T = TypeVar("T")
LETTERS = "abc"


class LetterModel:
    """Embeds a text as the numbers of its letters a, b and c, and knows the prompt of queries only."""

    model_name = "letters"

    def __init__(self) -> None:
        self.codec = SimpleNamespace(encode=lambda text: list(map(ord, text)), max_characters=50)
        self.embedded: list[str] = []
        self.error: Exception | None = None

    def require_vectors(self) -> Any:
        return self

    def prompt_for(self, kind: str) -> str:
        if kind != "query":
            raise InvalidParameter("input_type", "must be one of: query")
        return "? "

    def cut(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    async def embed(self, texts: Sequence[Sequence[int]], *, client: str) -> list[list[float]]:
        if self.error is not None:
            raise self.error
        said = ["".join(map(chr, ids)) for ids in texts]
        self.embedded += said
        return [[float(text.count(letter)) for letter in LETTERS] for text in said]


async def at_once(work: Work[T]) -> T:
    result: T = work.run()
    return result


@pytest.fixture
def model() -> LetterModel:
    return LetterModel()


def compared(
    scores: PartScores, model: Any, parts: Sequence[str], question: str = "aab", owner: str = ""
) -> list[float] | None:
    return asyncio.run(scores.compare(model, parts, question, at_once, owner=owner))


def test_a_part_is_compared_by_its_meaning_whatever_its_length(model: LetterModel) -> None:
    scores = compared(PartScores(), model, ["aabaab" * 3, "cc", "b"])
    assert scores == pytest.approx([1.0, 0.0, 0.2**0.5])
    assert model.embedded[0] == "? aab"


def test_parts_are_embedded_once_for_each_key(model: LetterModel) -> None:
    scores = PartScores()
    for owner, question in [("good", "a"), ("good", "b"), ("evil", "a")]:
        compared(scores, model, ["ab", "c", "ab"], question, owner)
    assert model.embedded == ["? a", "ab", "c", "? b", "? a", "ab", "c"]


def test_without_a_question_or_with_too_many_parts_nothing_is_embedded(
    model: LetterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_scores, "MAX_PARTS", 2)
    assert compared(PartScores(), model, ["a"], " ") is None
    assert compared(PartScores(), model, ["a", "b", "c"]) is None
    assert model.embedded == []


def test_a_model_that_was_unloaded_meanwhile_leaves_the_choice_to_words(
    model: LetterModel, caplog: pytest.LogCaptureFixture
) -> None:
    model.error = EngineStopped("it was unloaded")
    with caplog.at_level("INFO", "mlxserve.documents"):
        assert compared(PartScores(), model, ["a"]) is None
    assert "chosen by their words: it was unloaded" in caplog.text
