"""Small sums, comparisons, days and months."""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

from random import Random

from mlxserve.mini.conversation import Conversation, Exchange, Phrasings, says, single
from mlxserve.mini.words import Split, split_of

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()

_SUM = Phrasings(
    train=("What is {a} + {b}?", "{a} + {b}", "Add {a} and {b}.", "How much is {a} plus {b}?"),
    held_out=("How much is {a} + {b}?", "What is {a} plus {b}?"),
)
_DIFFERENCE = Phrasings(
    train=("What is {a} - {b}?", "{a} - {b}", "How much is {a} minus {b}?"),
    held_out=("How much is {a} - {b}?", "What is {a} minus {b}?"),
)
_LARGER = Phrasings(
    train=("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?"),
    held_out=("Which number is larger, {a} or {b}?",),
)


def addition(rng: Random, split: Split) -> Exchange:
    """a + b of up to two digits each; the pairs themselves are split."""
    a, b = _pair(rng, split, "+")
    return _answered(_SUM.pick(rng, split).format(a=a, b=b), f"{a} + {b} = {a + b}", str(a + b))


def subtraction(rng: Random, split: Split) -> Exchange:
    """a - b, never below 0."""
    a, b = sorted(_pair(rng, split, "-"), reverse=True)
    question = _DIFFERENCE.pick(rng, split).format(a=a, b=b)
    return _answered(question, f"{a} - {b} = {a - b}", str(a - b))


def comparison(rng: Random, split: Split) -> Exchange:
    a, b = _pair(rng, split, "?")
    b += a == b
    answer = f"{max(a, b)} is larger than {min(a, b)}."
    question = _LARGER.pick(rng, split).format(a=a, b=b)
    return Exchange(question, answer, lambda text: text.strip().startswith(f"{max(a, b)} "))


def calendar(rng: Random, split: Split) -> Exchange:
    """What day or month comes after or before another. There are too few to hold any out."""
    del split
    names = rng.choice((DAYS, MONTHS))
    unit = "day" if names is DAYS else "month"
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    named, wanted = names[index], names[(index + step) % len(names)]
    side = "after" if step == 1 else "before"
    question = rng.choice(("Which {u} comes {s} {n}?", "What {u} is {s} {n}?")).format(
        u=unit, s=side, n=named
    )
    return _answered(question, f"{wanted} comes {side} {named}.", wanted)


def exchange(rng: Random, split: Split) -> Exchange:
    """Any of the above, sums most often."""
    make = rng.choice((addition, addition, addition, subtraction, comparison, calendar))
    return make(rng, split)


def add(rng: Random, split: Split, num_words: int) -> Conversation:
    """One addition of two-digit numbers, alone in its conversation."""
    del num_words
    return single(addition(rng, split))


def _pair(rng: Random, split: Split, sign: str) -> tuple[int, int]:
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if split_of(f"{a}{sign}{b}") is split:
            return a, b


def _answered(question: str, answer: str, value: str) -> Exchange:
    """The value is what the answer ends with, so `7 + 5 = 12` is not right for 7."""
    return Exchange(question, answer, lambda text: says(value)(text.split("=")[-1]))
