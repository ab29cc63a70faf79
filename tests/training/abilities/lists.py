"""Transformations of short lists: reverse, sort, count, first and last, upper case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tests.training import words
from tests.training.abilities.styles import casual
from tests.training.conversation import (
    Dialogue,
    Exchange,
    Phrasings,
    Sheet,
    equals,
    says,
    single,
)
from tests.training.words import DataSplit, split_of

_REVERSE = Phrasings(
    train=(
        "Reverse this list: {items}",
        "Reverse the list {items}",
        "Say this list backwards: {items}",
        "Reverse these words: {items}",
        "Reverse {items}",
        "Please reverse these words: {items}",
        "Turn this list around: {items}",
        "Backwards, please: {items}",
        "Give me this list from last to first: {items}",
        "reverse: {items}",
        "Reverse this: {items}",
        "Reverse the words {items}",
        "Reverse the order of {items}",
        "List these backwards: {items}",
        "Can you reverse this list: {items}?",
        "Reverse this list for me: {items}",
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
        "Please sort: {items}",
        "Sort this list: {items}",
        "sort these numbers: {items}",
        "From small to large: {items}",
        "Please put these numbers in order: {items}",
        "Order {items}",
        "Put in order: {items}",
        "Sort these: {items}",
        "Arrange these numbers: {items}",
        "Sort the following numbers: {items}",
        "Can you sort {items}?",
        "Can you sort these numbers for me: {items}",
        "Sort these numbers from small to large: {items}",
        "Sort numbers: {items}",
    ),
    held_out=("Please sort these numbers: {items}", "Sort: {items}"),
)
_COUNT = Phrasings(
    train=(
        "Count the items: {items}",
        "How many items are in this list: {items}?",
        "Count these words: {items}",
        "How many words are there: {items}?",
        "Count these items: {items}",
        "Count the words in this list: {items}",
        "Please count the items: {items}",
        "How many items does this list have: {items}?",
        "How many words do you see: {items}?",
        "Count: {items}",
        "How long is this list: {items}?",
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
        "Write this in upper case: {items}",
        "Put this word in upper case: {items}",
        "Please write {items} in capital letters.",
        "upper case: {items}",
    ),
    held_out=("Write this word in upper case: {items}",),
)
_ENDS = Phrasings(
    train=(
        "What is the {end} item of this list: {items}?",
        "Which word is {end} in this list: {items}?",
        "What is the {end} item here: {items}?",
        "Give me the {end} word of this list: {items}",
        "Which is the {end} item of the list {items}?",
        "The {end} word of these, please: {items}",
        "What comes {end} in this list: {items}?",
    ),
    held_out=("What is the {end} word of this list: {items}?",),
)


_ITEM_KINDS = (words.english, words.syllables, words.fragment, words.blend)


def reverse(rng: Random, split: DataSplit) -> Exchange:
    items = _items(rng, split, 2, 5)
    answer = ", ".join(reversed(items))
    return _whole(casual(rng, split, _REVERSE), items, answer)


def sort(rng: Random, split: DataSplit) -> Exchange:
    """Two to five numbers below 100, in ascending order."""
    numbers = _numbers(rng, split)
    items = ", ".join(map(str, numbers))
    if split is DataSplit.TRAIN and rng.random() < 0.25:
        items = (
            items.replace(",", "") if rng.random() < 0.6 else " and ".join(items.rsplit(", ", 1))
        )
    answer = _in_order(numbers)
    return Exchange(casual(rng, split, _SORT).format(items=items), answer, equals(answer))


def count(rng: Random, split: DataSplit) -> Exchange:
    items = _items(rng, split, 1, 7)
    answer = (
        f"There {'is' if len(items) == 1 else 'are'} {len(items)} item{'s' * (len(items) > 1)}."
    )
    question = casual(rng, split, _COUNT).format(items=", ".join(items))
    return Exchange(question, answer, says(str(len(items))))


def upper(rng: Random, split: DataSplit) -> Exchange:
    """An invented word of syllables or letters: an English word is one token, which hides its letters."""
    word = words.draw(rng, split, rng.choice((words.syllables, words.syllables, words.letters)))
    return _whole(casual(rng, split, _UPPER), [word], word.upper())


def sheet(rng: Random, split: DataSplit, num_words: int) -> Sheet:
    """Only words to capitalise and lists to reverse, sort or count, to learn those."""
    del num_words
    return Sheet(tuple(_problem(rng, split) for _ in range(rng.randint(6, 16))))


def _problem(rng: Random, split: DataSplit) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.4:
        made = (words.syllables, words.letters, words.patchwork, words.blend)
        word = words.draw(rng, split, rng.choice(made))
        return f"{word} in capitals: ", word.upper()
    if kind < 0.55:
        items = _items(rng, split, 2, 5)
        return f"{', '.join(items)} backwards: ", ", ".join(reversed(items))
    if kind < 0.65:
        items = _items(rng, split, 1, 7)
        return f"{', '.join(items)} counted: ", str(len(items))
    numbers = _numbers(rng, split)
    return f"{', '.join(map(str, numbers))} in order: ", _in_order(numbers)


def ends(rng: Random, split: DataSplit) -> Exchange:
    """The first or the last item."""
    items = _items(rng, split, 2, 6)
    end, wanted = rng.choice((("first", items[0]), ("last", items[-1])))
    question = casual(rng, split, _ENDS).format(items=", ".join(items), end=end)
    return Exchange(question, wanted, says(wanted, but_not=[i for i in items if i != wanted]))


def exchange(rng: Random, split: DataSplit) -> Exchange:
    """Any of the above."""
    make = rng.choice((reverse, reverse, sort, sort, sort, count, upper, upper, ends))
    return make(rng, split)


def transform(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one list to transform."""
    del num_words
    return single(exchange(rng, split))


def _numbers(rng: Random, split: DataSplit) -> list[int]:
    """Two to five numbers below 100; sets of numbers are split."""
    while True:
        limit = rng.choice((10, 20, 100, 100)) if split is DataSplit.TRAIN else 100
        numbers = rng.sample(range(limit), rng.randint(2, 5))
        if split_of(repr(sorted(numbers))) is split:
            return numbers


def _in_order(numbers: list[int]) -> str:
    return ", ".join(str(n) for n in sorted(numbers))


def _items(rng: Random, split: DataSplit, least: int, most: int) -> list[str]:
    """Words; half of the lists have invented ones, which have several tokens."""
    kinds: Sequence[Callable[[Random], str]] = (
        _ITEM_KINDS[:1] if rng.random() < 0.5 else _ITEM_KINDS
    )
    if split is DataSplit.TRAIN and rng.random() < 0.4:
        kinds = rng.choice(
            (
                (words.english, words.patchwork, words.syllables),
                (words.common, words.english),
                (words.common,),
            )
        )
    return [words.draw(rng, split, rng.choice(kinds)) for _ in range(rng.randint(least, most))]


def _whole(phrasing: str, items: list[str], answer: str) -> Exchange:
    return Exchange(phrasing.format(items=", ".join(items)), answer, equals(answer))
