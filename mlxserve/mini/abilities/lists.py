"""Transformations of short lists: reverse, sort, count, first and last, upper case."""

from __future__ import annotations

from random import Random

from mlxserve.mini import words
from mlxserve.mini.conversation import Conversation, Exchange, Phrasings, equals, says, single
from mlxserve.mini.words import Split, split_of

_REVERSE = Phrasings(
    train=(
        "Reverse this list: {items}",
        "Reverse the list {items}",
        "Say this list backwards: {items}",
        "Reverse these words: {items}",
        "Reverse {items}",
    ),
    held_out=("Please reverse this list: {items}", "Reverse: {items}"),
)
_SORT = Phrasings(
    train=(
        "Sort these numbers: {items}",
        "Sort the numbers {items}",
        "Put these numbers in order: {items}",
        "Order these numbers: {items}",
        "Sort {items}",
    ),
    held_out=("Please sort these numbers: {items}", "Sort: {items}"),
)
_COUNT = Phrasings(
    train=(
        "Count the items: {items}",
        "How many items are in this list: {items}?",
        "Count these words: {items}",
        "How many words are there: {items}?",
    ),
    held_out=("Count the items in this list: {items}", "How many items are there: {items}?"),
)
_UPPER = Phrasings(
    train=(
        "Write {items} in upper case.",
        "Uppercase this word: {items}",
        "Uppercase: {items}",
        "Write this in capital letters: {items}",
        "Write {items} in capitals.",
    ),
    held_out=("Write this word in upper case: {items}",),
)
_ENDS = Phrasings(
    train=(
        "What is the {end} item of this list: {items}?",
        "Which word is {end} in this list: {items}?",
    ),
    held_out=("What is the {end} word of this list: {items}?",),
)


def reverse(rng: Random, split: Split) -> Exchange:
    items = _items(rng, split, 2, 5)
    answer = ", ".join(reversed(items))
    return _whole(_REVERSE.pick(rng, split), items, answer)


def sort(rng: Random, split: Split) -> Exchange:
    """Two to five numbers below 100, in ascending order; the sets of numbers are split."""
    while True:
        numbers = rng.sample(range(100), rng.randint(2, 5))
        if split_of(repr(sorted(numbers))) is split:
            break
    answer = ", ".join(str(n) for n in sorted(numbers))
    return _whole(_SORT.pick(rng, split), [str(n) for n in numbers], answer)


def count(rng: Random, split: Split) -> Exchange:
    items = _items(rng, split, 1, 7)
    answer = (
        f"There {'is' if len(items) == 1 else 'are'} {len(items)} item{'s' * (len(items) > 1)}."
    )
    question = _COUNT.pick(rng, split).format(items=", ".join(items))
    return Exchange(question, answer, says(str(len(items))))


def upper(rng: Random, split: Split) -> Exchange:
    """A word of syllables or letters: an English word is one token, whose letters nothing tells."""
    word = words.draw(rng, split, rng.choice((words.syllables, words.syllables, words.letters)))
    return _whole(_UPPER.pick(rng, split), [word], word.upper())


def ends(rng: Random, split: Split) -> Exchange:
    """The first or the last item."""
    items = _items(rng, split, 2, 6)
    end, wanted = rng.choice((("first", items[0]), ("last", items[-1])))
    question = _ENDS.pick(rng, split).format(items=", ".join(items), end=end)
    return Exchange(question, wanted, says(wanted, but_not=[i for i in items if i != wanted]))


def exchange(rng: Random, split: Split) -> Exchange:
    """Any of the above."""
    make = rng.choice((reverse, reverse, sort, sort, sort, count, upper, upper, ends))
    return make(rng, split)


def transform(rng: Random, split: Split, num_words: int) -> Conversation:
    """One list to transform, alone in its conversation."""
    del num_words
    return single(exchange(rng, split))


def _items(rng: Random, split: Split, least: int, most: int) -> list[str]:
    return [words.pick(rng, split, words.ENGLISH) for _ in range(rng.randint(least, most))]


def _whole(phrasing: str, items: list[str], answer: str) -> Exchange:
    return Exchange(phrasing.format(items=", ".join(items)), answer, equals(answer))
