"""One declaration of an option: what it accepts, and the sentence for what it refuses."""

# Annotations are read at run time, so this file does not postpone them.

from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.core.option import Option, Options, options_of


class Colour(Enum):
    RED = auto()
    DARK_BLUE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint(Options):
    colour: Annotated[Colour, Option("Its colour.", "Model")] = Colour.RED
    litres: Annotated[float, Option("How much.", "Memory", "litres", gt=0, le=10)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House(Options):
    floors: Annotated[int, Option("Floors.", "Model", "floors", ge=1)] = 2
    doors: Annotated[int, Option("Doors.", "Model", ge=0, le=9)] = 1
    size: Annotated[int, Option("Size.", "Model", choices=(16, 32))] = 16
    paint: Paint = Paint()
    name: Annotated[str | None, Option("Its name.", "Model", default="none")] = None
    is_open: Annotated[bool, Option("Whether it is open.", "Model")] = False
    guests: Annotated[tuple[str, ...], Option("Who is there.", "Model")] = ()
    budget: Annotated[float, Option("What it may cost.", "Model", ge=0)] = 0.5


def test_a_value_within_its_bounds_is_kept() -> None:
    for name, value, expected in [
        ("floors", 1, 1),
        ("doors", 9, 9),
        ("size", 32, 32),
        ("colour", Colour.DARK_BLUE, Colour.DARK_BLUE),
        ("litres", 10, 10),
        ("name", None, None),
        ("name", "a", "a"),
        ("is_open", True, True),
        ("guests", ["a", "b"], ("a", "b")),
        ("budget", 0, 0),
    ]:
        house = House().with_options(**{name: value})
        owner = house.paint if name in ("colour", "litres") else house
        assert getattr(owner, name) == expected, name


def test_an_enums_member_is_given_by_its_name_in_lower_case() -> None:
    assert House().with_options(colour="dark_blue").paint.colour is Colour.DARK_BLUE


def test_another_value_is_refused_by_a_sentence_with_name_range_and_value() -> None:
    for name, value, sentence in [
        ("floors", 0, "floors must be a whole number of floors, at least 1, got 0"),
        ("floors", 1.0, "floors must be a whole number of floors, at least 1, got 1.0"),
        ("floors", True, "floors must be a whole number of floors, at least 1, got True"),
        ("floors", None, "floors must be a whole number of floors, at least 1, got None"),
        ("doors", 10, "doors must be a whole number from 0 to 9, got 10"),
        ("size", 17, "size must be one of 16, 32, got 17"),
        ("size", 16.0, "size must be one of 16, 32, got 16.0"),
        ("colour", "RED", "colour must be one of red, dark_blue, got 'RED'"),
        ("litres", 0, "litres must be a number of litres above 0 and at most 10, got 0"),
        ("litres", "1", "litres must be a number of litres above 0 and at most 10, got '1'"),
        ("name", "", "name must be non-empty text, got ''"),
        ("name", ["a"], "name must be non-empty text, got ['a']"),
        ("is_open", 1, "is_open must be true or false, got 1"),
        ("guests", "a", "guests must be a list of texts, got 'a'"),
        ("guests", ("a", ""), "guests must be a list of texts, got ('a', '')"),
        ("budget", -1, "budget must be a number, at least 0, got -1"),
        (
            "budget",
            float("inf"),
            "budget must be a number, at least 0 and at most 1000000000, got inf",
        ),
        ("budget", float("nan"), "budget must be a number, at least 0, got nan"),
    ]:
        with pytest.raises(InvalidConfig) as caught:
            House().with_options(**{name: value})
        assert str(caught.value) == sentence, name
        assert caught.value.option == name, name


def test_an_unknown_name_is_refused_with_similar_names() -> None:
    with pytest.raises(InvalidConfig, match=r"no option 'litre'\. Did you mean litres"):
        House().with_options(litre=1)
    with pytest.raises(InvalidConfig, match="--help"):
        House().with_options(zzzzzz=1)


def test_the_options_of_a_nested_config_are_listed_in_its_place() -> None:
    names = [option.name for option in options_of(House)]
    assert names[2:6] == ["size", "colour", "litres", "name"]


def test_a_text_is_read_as_the_options_type() -> None:
    for name, text, value in [
        ("floors", "3", 3),
        ("litres", "0.5", 0.5),
        ("is_open", "Yes", True),
        ("is_open", "0", False),
        ("guests", "a, b,", ("a", "b")),
        ("name", "3", "3"),
        ("colour", "red", "red"),
    ]:
        [option] = [option for option in options_of(House) if option.name == name]
        assert option.parsed(text) == value, name


@pytest.mark.parametrize(("name", "text"), [("floors", "x"), ("litres", "x"), ("is_open", "x")])
def test_a_text_of_another_type_is_refused(name: str, text: str) -> None:
    [option] = [option for option in options_of(House) if option.name == name]
    with pytest.raises(InvalidConfig, match=f"{name} must be .*, got 'x'"):
        option.parsed(text)


def test_a_default_is_described_in_the_words_that_set_it() -> None:
    for name, text in [
        ("floors", "2"),
        ("colour", "red"),
        ("name", "none"),
        ("is_open", ""),
        ("guests", ""),
    ]:
        [option] = [option for option in options_of(House) if option.name == name]
        assert option.default_text() == text, name
