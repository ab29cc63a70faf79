"""Requests that the model refuses, composed from phrasings and words: write, explain, multiply, count."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from tests.training import prose, words
from tests.training.abilities import request_phrasings as phrasings
from tests.training.abilities import request_words as vocabulary
from tests.training.conversation import Phrasings
from tests.training.words import DataSplit

KINDS = (
    phrasings.WRITE,
    phrasings.CODE,
    phrasings.CODE,
    phrasings.KNOWLEDGE,
    phrasings.KNOWLEDGE,
    phrasings.TRANSLATE,
    phrasings.REWRITE,
    phrasings.CALCULATE,
    phrasings.COUNT,
    phrasings.OTHER,
)

_WORDS = {
    "text": vocabulary.TEXT_KIND,
    "topic": vocabulary.TOPIC,
    "lang": vocabulary.PROGRAMMING,
    "program": vocabulary.PROGRAM,
    "noun": vocabulary.PROGRAM_NOUN,
    "concept": vocabulary.CONCEPT,
    "person": vocabulary.PERSON,
    "country": vocabulary.COUNTRY,
    "fact": vocabulary.FACT,
    "why": vocabulary.WHY,
    "how": vocabulary.HOW_TO,
    "quantity": vocabulary.QUANTITY,
    "wanted": vocabulary.WANTED,
    "human": vocabulary.HUMAN_LANGUAGE,
    "phrase": vocabulary.PHRASE,
    "pasted": vocabulary.PASTED,
    "matter": vocabulary.MATTER,
    "shell": vocabulary.SHELL,
    "can": vocabulary.CAN,
}


def _snippet(rng: Random, split: DataSplit) -> str:
    return vocabulary.SNIPPET.pick(rng, split).replace("\\n", "\n    ")


def _number(rng: Random, split: DataSplit) -> str:
    """A small number, which may be in both splits."""
    del split
    return str(rng.randrange(2, rng.choice((10, 13, 100))))


def _large_number(rng: Random, split: DataSplit) -> str:
    return words.draw(rng, split, lambda r: str(r.randrange(100, 10 ** r.choice((3, 3, 4, 5)))))


def _word(rng: Random, split: DataSplit) -> str:
    return words.draw(rng, split, rng.choice((words.english, words.english, words.syllables)))


def _paragraph(rng: Random, split: DataSplit) -> str:
    return " ".join(prose.sentence_of(rng, split) for _ in range(rng.randint(2, 5)))


_MADE: dict[str, Callable[[Random, DataSplit], str]] = {
    "snippet": _snippet,
    "a": _number,
    "b": _number,
    "c": _number,
    "big": _large_number,
    "word": _word,
    "name": words.first_name,
    "sentence": prose.sentence_of,
    "paragraph": _paragraph,
    "animal": lambda rng, split: words.pick(rng, split, words.ANIMALS),
    "thing": lambda rng, split: words.pick(rng, split, words.OBJECTS),
    "adjective": lambda rng, split: words.pick(rng, split, words.ADJECTIVES),
}
_FIELD = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]\w\w)")


def request(rng: Random, split: DataSplit) -> str:
    """Any request that the model refuses, without noise."""
    return composed(rng, split, rng.choice(KINDS))


def composed(rng: Random, split: DataSplit, kind: Phrasings) -> str:
    """A phrasing of one kind with its fields filled in."""

    def fill(match: re.Match[str]) -> str:
        field = match[1]
        if field in _WORDS:
            return _WORDS[field].pick(rng, split)
        return _MADE[field](rng, split)

    text = _ARTICLE.sub(r"\1n ", _FIELD.sub(fill, kind.pick(rng, split)))
    return text[:1].upper() + text[1:] if rng.random() < 0.5 else text
