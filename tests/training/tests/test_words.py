"""The two splits are disjoint, and words depend on the seed only."""

from collections.abc import Callable
from random import Random

import pytest

from tests.training import words
from tests.training.words import DataSplit

MAKERS = [words.code_word, words.number, words.first_name, words.full_name, words.place]


def drawn(make: Callable[[Random, DataSplit], str], split: DataSplit, seed: int = 0) -> list[str]:
    rng = Random(seed)
    return [make(rng, split) for _ in range(400)]


@pytest.mark.parametrize("make", MAKERS)
def test_no_word_is_in_both_splits(make: Callable[[Random, DataSplit], str]) -> None:
    train = {word.lower() for word in drawn(make, DataSplit.TRAIN)}
    held_out = {word.lower() for word in drawn(make, DataSplit.HELD_OUT)}
    assert train.isdisjoint(held_out)


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_seed_gives_the_same_words(make: Callable[[Random, DataSplit], str]) -> None:
    assert drawn(make, DataSplit.TRAIN, seed=3) == drawn(make, DataSplit.TRAIN, seed=3)
    assert drawn(make, DataSplit.TRAIN, seed=3) != drawn(make, DataSplit.TRAIN, seed=4)


def test_a_words_split_does_not_depend_on_its_case() -> None:
    assert all(words.split_of(w) is words.split_of(w.upper()) for w in words.ENGLISH)


def test_about_an_eighth_of_the_words_is_held_out() -> None:
    held_out = sum(words.split_of(str(n)) is DataSplit.HELD_OUT for n in range(20_000))
    assert held_out / 20_000 == pytest.approx(words.HELD_OUT_SHARE, abs=0.01)


def test_the_example_of_the_documentation_never_trains_the_model() -> None:
    assert words.split_of("plum-42") is DataSplit.HELD_OUT
    assert words.split_of("Plum-42") is DataSplit.HELD_OUT


def test_both_splits_have_words_of_every_list() -> None:
    for listed in (words.ENGLISH, words.NAMES, words.PLACES):
        assert {words.split_of(word) for word in listed} == {DataSplit.TRAIN, DataSplit.HELD_OUT}


def test_code_words_come_in_many_kinds() -> None:
    made = drawn(words.code_word, DataSplit.TRAIN)
    assert any(word in words.ENGLISH for word in made)
    assert any("-" in word and word[-1].isdigit() for word in made)
    assert any(word.isalpha() and word not in words.ENGLISH for word in made)
    assert any(word[:1].isupper() for word in made)


def test_only_training_replaces_listed_words_by_invented_ones() -> None:
    def picked(split: DataSplit, listed: list[str]) -> list[str]:
        return drawn(lambda rng, split: words.pick(rng, split, listed), split)

    assert set(picked(DataSplit.HELD_OUT, words.PLACES)) <= set(words.PLACES)
    invented = [
        place for place in picked(DataSplit.TRAIN, words.PLACES) if place not in words.PLACES
    ]
    assert len(invented) / 400 == pytest.approx(words.INVENTED_SHARE, abs=0.1)
    assert all(place[0].isupper() for place in invented if place[0].isascii())
    assert all(split is DataSplit.TRAIN for split in map(words.split_of, invented))
    animals = [a for a in picked(DataSplit.TRAIN, words.ANIMALS) if a not in words.ANIMALS]
    assert any(animal[0].islower() for animal in animals)


def test_every_token_of_letters_occurs_as_a_word() -> None:
    tokens = words.lettered_tokens()
    assert len(tokens) > 1000
    assert {"ward", "ney"} <= set(tokens), "in held-out words, and rare in training words"
    rng = Random(0)
    made = {words.fragment(rng) for _ in range(20 * len(tokens))}
    assert len(made.intersection(tokens)) > 0.99 * len(tokens)
