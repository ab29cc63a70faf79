"""What a generated conversation is, and when an answer to it counts as right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NotRequired, TypedDict

from mlxserve.mini.training.words import DataSplit


class TrainingMessage(TypedDict):
    """One turn, as the OpenAI API and every chat template spell it."""

    role: str  # system, user, assistant or tool
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]


Check = Callable[[str], bool]  # an answer -> is it right?


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns that end with the assistant's reference answer, and the test of any other answer."""

    messages: tuple[TrainingMessage, ...]
    accepts: Check
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def prompt(self) -> list[TrainingMessage]:
        """What a model is given: everything but the reference answer."""
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Problems and their results, one after another in one text; only the results are taught.

    A sum on a sheet costs 13 tokens, in a chat about 32.
    """

    problems: tuple[tuple[str, str], ...]  # ("47 + 38 = ", "85")


Example = Dialogue | Sheet


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question, its reference answer, and the test of any other answer."""

    question: str
    answer: str
    accepts: Check

    @property
    def messages(self) -> tuple[TrainingMessage, TrainingMessage]:
        return user(self.question), assistant(self.answer)


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Ways to say one thing. Those held out never train the model."""

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
    """The conversation of one exchange, after the messages in `before`."""
    return Dialogue((*before, *exchange.messages), exchange.accepts)


def says(word: str, but_not: Sequence[str] = ()) -> Check:
    """Accepts an answer that has `word` in it, whole and with its case, and none of `but_not`."""

    def accepts(answer: str) -> bool:
        return _has(answer, word) and not any(_has(answer, other) for other in but_not)

    return accepts


def equals(text: str) -> Check:
    """Accepts exactly `text`, save for blanks around it."""
    return lambda answer: answer.strip() == text.strip()


def mentions(*keywords: str) -> Check:
    """Accepts an answer in which every keyword occurs, whatever its case."""
    return lambda answer: all(keyword.lower() in answer.lower() for keyword in keywords)


def _has(answer: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", answer) is not None
