"""Small sums, comparisons, days and months."""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

from random import Random

from tests.training.abilities.styles import casual
from tests.training.conversation import (
    Dialogue,
    Exchange,
    Phrasings,
    Sheet,
    says,
    single,
)
from tests.training.words import DataSplit, split_of

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()

_SUM = Phrasings(
    train=(
        "What is {a} + {b}?",
        "What is {a}+{b}?",
        "{a} + {b}",
        "{a} + {b} = ?",
        "{a}+{b}",
        "Add {a} and {b}.",
        "How much is {a} plus {b}?",
        "What do {a} and {b} make?",
        "Compute {a} + {b}.",
        "What's {a} + {b}?",
        "whats {a}+{b}",
        "{a} plus {b}",
        "{a} plus {b}?",
        "Add {a} to {b}.",
        "Sum of {a} and {b}",
        "Can you add {a} and {b}?",
        "Calculate {a} + {b}",
        "What's the sum of {a} and {b}?",
        "How much do {a} and {b} make?",
    ),
    held_out=("How much is {a} + {b}?", "What is {a} plus {b}?"),
)
_DIFFERENCE = Phrasings(
    train=(
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a}-{b}",
        "Take {b} from {a}.",
        "How much is {a} minus {b}?",
        "Compute {a} - {b}.",
        "What's {a} - {b}?",
        "whats {a}-{b}",
        "{a} minus {b}",
        "What's {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}",
        "{a} take away {b}",
    ),
    held_out=("How much is {a} - {b}?", "What is {a} minus {b}?"),
)
_LARGER = Phrasings(
    train=(
        "Which is larger, {a} or {b}?",
        "Which number is bigger: {a} or {b}?",
        "What is larger: {a} or {b}?",
        "Is {a} or {b} larger?",
        "Which is greater, {a} or {b}?",
        "What is more, {a} or {b}?",
        "{a} or {b}, which is larger?",
        "larger: {a} or {b}",
    ),
    held_out=("Which number is larger, {a} or {b}?", "Which is bigger, {a} or {b}?"),
)
_CALENDAR = Phrasings(
    train=(
        "Which {u} comes {s} {n}?",
        "What {u} is {s} {n}?",
        "Which {u} follows if I look {s} {n}?",
        "Tell me the {u} {s} {n}.",
        "The {u} {s} {n}?",
        "What is the {u} {s} {n}?",
        "what comes {s} {n}",
        "Name the {u} {s} {n}.",
    ),
    held_out=("Which {u} is {s} {n}?", "What {u} comes {s} {n}?"),
)

# The last digit is hard: after 37,000 pairs of any size it was still at chance. Sums of
# single digits isolate it.
_LIMITS = ((10, 10), (100, 10), (10, 100), (100, 100))
_LIMIT_WEIGHTS = (20, 12, 12, 56)


def addition(rng: Random, split: DataSplit) -> Exchange:
    """a + b of up to two digits each; pairs of numbers are split."""
    a, b = _pair(rng, split, "+")
    return _answered(casual(rng, split, _SUM).format(a=a, b=b), f"{a} + {b} = {a + b}", str(a + b))


def subtraction(rng: Random, split: DataSplit) -> Exchange:
    """a - b, never below 0."""
    a, b = sorted(_pair(rng, split, "-"), reverse=True)
    question = casual(rng, split, _DIFFERENCE).format(a=a, b=b)
    return _answered(question, f"{a} - {b} = {a - b}", str(a - b))


def comparison(rng: Random, split: DataSplit) -> Exchange:
    a, b = _pair(rng, split, "?")
    b += a == b
    answer = f"{max(a, b)} is larger than {min(a, b)}."
    question = casual(rng, split, _LARGER).format(a=a, b=b)
    return Exchange(question, answer, lambda text: text.strip().startswith(f"{max(a, b)} "))


def calendar(rng: Random, split: DataSplit) -> Exchange:
    """The day or month after or before another. There are too few to hold any out."""
    names = rng.choice((DAYS, MONTHS))
    unit = "day" if names is DAYS else "month"
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    named, wanted = names[index], names[(index + step) % len(names)]
    side = "after" if step == 1 else "before"
    question = casual(rng, split, _CALENDAR).format(u=unit, s=side, n=named)
    return _answered(question, f"{wanted} comes {side} {named}.", wanted)


def sheet(rng: Random, split: DataSplit, num_words: int) -> Sheet:
    """Only sums and differences, to learn arithmetic."""
    del num_words
    return Sheet(tuple(_problem(rng, split) for _ in range(rng.randint(6, 20))))


def exchange(rng: Random, split: DataSplit) -> Exchange:
    """Any of the above, sums most often."""
    make = rng.choice((addition, addition, addition, subtraction, comparison, calendar))
    return make(rng, split)


def add(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one addition of two-digit numbers."""
    del num_words
    return single(addition(rng, split))


def subtract(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one subtraction."""
    del num_words
    return single(subtraction(rng, split))


def compare(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one comparison."""
    del num_words
    return single(comparison(rng, split))


def dates(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one question on days or months."""
    del num_words
    return single(calendar(rng, split))


def _pair(
    rng: Random, split: DataSplit, sign: str, limits: tuple[int, int] = (100, 100)
) -> tuple[int, int]:
    """Two numbers, each below its limit. Both orders of a pair are in the same split."""
    while True:
        a, b = map(rng.randrange, limits)
        if split_of(f"{min(a, b)}{sign}{max(a, b)}") is split:
            return a, b


def _problem(rng: Random, split: DataSplit) -> tuple[str, str]:
    limits = rng.choices(_LIMITS, _LIMIT_WEIGHTS)[0]
    if rng.random() < 0.4:
        a, b = sorted(_pair(rng, split, "-", limits), reverse=True)
        return f"{a} - {b} = ", str(a - b)
    a, b = _pair(rng, split, "+", limits)
    return f"{a} + {b} = ", str(a + b)


def _answered(question: str, answer: str, value: str) -> Exchange:
    """The answer must end with the value, so `7 + 5 = 12` is not right for 7."""
    return Exchange(question, answer, lambda text: says(value)(text.split("=")[-1]))
