"""Generated conversations, and the checks that decide whether an answer is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NotRequired, TypedDict

from tests.training.words import DataSplit


class TrainingMessage(TypedDict):
    """One message in the format of the OpenAI API and of chat templates."""

    role: str  # system, user, assistant or tool
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]


Check = Callable[[str], bool]  # answer -> whether it is right


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages that end with the reference answer, and the check for any other answer."""

    messages: tuple[TrainingMessage, ...]
    accepts: Check
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def prompt(self) -> list[TrainingMessage]:
        """The model's input: all messages but the reference answer."""
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Problems and results in one text; only the results count in the loss.

    A sum takes 13 tokens on a sheet, and about 32 in a conversation.
    """

    problems: tuple[tuple[str, str], ...]  # ("47 + 38 = ", "85")


Example = Dialogue | Sheet


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question, its reference answer, and the check for any other answer."""

    question: str
    answer: str
    accepts: Check

    @property
    def messages(self) -> tuple[TrainingMessage, TrainingMessage]:
        return user(self.question), assistant(self.answer)


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Ways to say one thing. The held-out ones are never trained on."""

    train: Sequence[str]
    held_out: Sequence[str]

    def __post_init__(self) -> None:
        assert set(self.train).isdisjoint(self.held_out), self
        assert self.train, self
        assert self.held_out, self

    def pick(self, rng: Random, split: DataSplit) -> str:
        return rng.choice(self.train if split is DataSplit.TRAIN else self.held_out)


def user(content: str) -> TrainingMessage:
    return {"role": "user", "content": content}


def assistant(content: str) -> TrainingMessage:
    return {"role": "assistant", "content": content}


def system(content: str) -> TrainingMessage:
    return {"role": "system", "content": content}


def single(exchange: Exchange, *before: TrainingMessage) -> Dialogue:
    """A conversation of one exchange after the messages in `before`."""
    return Dialogue((*before, *exchange.messages), exchange.accepts)


def says(word: str, but_not: Sequence[str] = ()) -> Check:
    """Accept an answer that contains `word` as a whole word in this case, and none of `but_not`."""

    def accepts(answer: str) -> bool:
        return _has(answer, word) and not any(_has(answer, other) for other in but_not)

    return accepts


def equals(text: str) -> Check:
    """Accept exactly `text`, ignoring surrounding whitespace."""
    return lambda answer: answer.strip() == text.strip()


def mentions(*keywords: str) -> Check:
    """Accept an answer that contains every keyword in any case."""
    return lambda answer: all(keyword.lower() in answer.lower() for keyword in keywords)


def _has(answer: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", answer) is not None
