"""Filler text for contexts, free of facts to recall.

Mostly plain sentences, and some of what else appears in prompts: rows of words or numbers, and
repetitions.
"""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from tests.training import words
from tests.training.words import DataSplit

_VERBS_PAST = """watched followed found carried passed painted repaired crossed noticed liked left
reached guarded cleaned moved sold bought described missed opened""".split()
_PLACES = """near the {noun}|behind the {noun}|under the {adjective} {noun}|beside the {noun}|
by the old {noun}|in the {noun}|on the {adjective} {noun}|not far from the {noun}""".replace(
    "\n", ""
).split("|")
_TIMES = """yesterday|last week|in the morning|after lunch|every day|before noon|in spring|
at night|for an hour|again""".replace("\n", "").split("|")
_TEMPLATES = (
    "The {adjective} {animal} {verb} the {noun} {time}.",
    "{name} {verb} the {adjective} {noun} {place}.",
    "A {animal} {verb} the {noun} {place}.",
    "There is a {adjective} {noun} {place}.",
    "{name} and {name} {verb} a {noun} {time}.",
    "It was a {adjective} day, and the {animal} {verb} the {noun}.",
    "We {verb} the {noun} {place} {time}.",
    "The {noun} is {adjective}, but the {noun} is {adjective}.",
    "Nobody {verb} the {noun} {time}.",
    "In {town}, the {animal} is {adjective} and the {noun} is {colour}.",
    "{name} said that the {noun} was {adjective}.",
    "The train to {town} {verb} the {noun} {time}.",
    "When the {noun} is {adjective}, the {animal} is {adjective}.",
    "I think {name} {verb} my {colour} {noun}.",
    "They have {count} {adjective} {noun}s in {town}.",
)
_PIECE = re.compile(r"[A-Za-z]+|[^A-Za-z]")
_ROW_WORDS = [
    *words.trained([*words.ENGLISH, *words.JOBS]),
    *"the a of to and in is it for on with as at by".split(),
]
_FIELDS = {
    "adjective": words.trained(words.ADJECTIVES),
    "animal": words.trained(words.ANIMALS),
    "noun": words.trained(words.OBJECTS),
    "name": words.trained(words.NAMES),
    "town": words.trained(words.PLACES),
    "colour": words.trained(words.COLOURS),
    "verb": _VERBS_PAST,
    "time": _TIMES,
    "count": "two three four five six seven eight nine ten twelve twenty".split(),
}


def sentence(rng: Random) -> str:
    """One sentence of five to fifteen words, none of them held out."""
    template = rng.choice(_TEMPLATES).replace("{place}", rng.choice(_PLACES))
    for field, choices in _FIELDS.items():
        while "{" + field + "}" in template:
            template = template.replace("{" + field + "}", rng.choice(choices), 1)
    return template


def salad(rng: Random) -> str:
    """A meaningless row of words or numbers."""
    length = rng.randint(3, 12)
    if rng.random() < 0.3:
        return " ".join(words.draw(rng, DataSplit.TRAIN, _any_number) for _ in range(length)) + "."
    row = " ".join(rng.choice(_ROW_WORDS) for _ in range(length))
    return row[0].upper() + row[1:] + rng.choice((".", ".", "!", "?", ";"))


def _any_number(rng: Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 4)))


def sentence_of(rng: Random, split: DataSplit) -> str:
    """A sentence that belongs to `split`."""
    return words.draw(rng, split, sentence)


def paragraph(rng: Random, split: DataSplit, num_words: int) -> list[str]:
    """Sentences of `split` with about `num_words` words in total; none for 0.

    Two digits or signs count as one word, because the number of tokens matters.
    """
    make = rng.choices((sentence, salad, _echo(sentence_of(rng, split))), (8, 1, 1))[0]
    sentences: list[str] = []
    num_pieces = 0
    while num_pieces < 2 * num_words:
        sentences.append(words.draw(rng, split, make))
        num_pieces += len(_PIECE.findall(sentences[-1]))
    return sentences


def _echo(text: str) -> Callable[[Random], str]:
    """A function that always returns the same sentence."""
    return lambda _rng: text
