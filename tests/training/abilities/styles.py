"""Ways to type a message: with an opening, in lower case, SHOUTED, without its mark, with a typo."""

from __future__ import annotations

import string
from random import Random

from tests.training.conversation import Phrasings
from tests.training.words import DataSplit, split_of

OPENINGS = Phrasings(
    train=(
        *("Hello, ", "Please: ", "Hi! ", "OK. ", "And: ", "So, ", "Hey, ", "Well, ", "Now, "),
        *("Tell me: ", "I have a question: ", "Good. ", "Sorry, ", "One more: ", "hey ", "ok "),
        *("Please tell me: ", "Quick question: ", "Hello! ", "Hi there, ", "ok now ", "Thanks. "),
        *("Good morning! ", "Next: ", "Great. ", "Cool. ", "please ", "I am new here. ", "hi, "),
        *("Next question: ", "Let us try this: ", "Hmm, ", "Yes. ", "No, ", "Right, ", "And now: "),
    ),
    held_out=("Hello again. ", "Alright, ", "Another one: ", "Good evening! ", "Hey there! "),
)
_ENDINGS = Phrasings(
    train=(" please", " pls", "!!", " thanks", " :)", " Thank you!", "...", " asap", " ok?", "??"),
    held_out=(", thanks a lot", " plz", " thx", "!!!"),
)
_TYPOS = 0.12  # of messages
_MARKS = string.punctuation


def styled(rng: Random, split: DataSplit, text: str) -> str:
    """A request as a person types it."""
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    if rng.random() < 0.1:
        text += _ENDINGS.pick(rng, split)
    return opened(rng, split, misspelt(rng, cased(rng, text)))


def casual(rng: Random, split: DataSplit, phrasings: Phrasings) -> str:
    """A phrasing with its fields; in training, sometimes in lower case. Fields keep their case."""
    text = phrasings.pick(rng, split)
    return text.lower() if split is DataSplit.TRAIN and rng.random() < 0.25 else text


def opened(rng: Random, split: DataSplit, text: str) -> str:
    """Sometimes with words before it."""
    return OPENINGS.pick(rng, split) + text if rng.random() < 0.2 else text


def cased(rng: Random, text: str) -> str:
    """Mostly as it is, sometimes in lower or upper case."""
    kind = rng.random()
    if kind < 0.2:
        return text.lower()
    if kind < 0.25:
        return text.upper()
    return text


def misspelt(rng: Random, text: str) -> str:
    """Sometimes with one letter missing, doubled or swapped with the next."""
    letters = [i for i in range(len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not letters or rng.random() >= _TYPOS:
        return text
    i = rng.choice(letters)
    middle = rng.choice((text[i + 1], text[i] + text[i : i + 2], text[i + 1] + text[i]))
    mistyped = text[:i] + middle + text[i + 2 :]
    known = set(text.split())
    is_new = any(
        split_of(w.strip(_MARKS)) is DataSplit.HELD_OUT for w in set(mistyped.split()) - known
    )
    return text if is_new else mistyped  # training must not meet a held-out word by a typo
