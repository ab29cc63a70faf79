"""A small evaluation: twenty prompts of each ability on mlxserve's own engine.

The bars are those of `python -m tests.training evaluate`, with a margin for few prompts.
"""

from collections.abc import Iterator
from math import comb
from pathlib import Path

import pytest

from mlxserve.hub.embedded import model_path
from tests.training.abilities import ABILITIES, Ability
from tests.training.conditions import BAR, CONDITIONS, Condition, examine_under
from tests.training.evaluate import AbilityResult, Student, examine

NUM_PROMPTS = 20
QUICK = (
    "recall, short",
    "copy a line",
    "addition",
    "tool results",
    "refusals",
)  # the others take half a minute
SHORT = [ability for ability in ABILITIES if ability.name in QUICK]
MIDDLE = [a for a in ABILITIES if a not in SHORT and a.num_words < 500]
LONG = [ability for ability in ABILITIES if ability.num_words >= 500]


@pytest.fixture(scope="module")
def student() -> Iterator[Student]:
    with Student(num_pages=600) as student:
        yield student


def allowed_misses(bar: float, num_prompts: int = NUM_PROMPTS) -> int:
    """Misses that a model with accuracy `bar` exceeds with a probability of at most 1 %."""
    chances = (
        comb(num_prompts, k) * (1 - bar) ** k * bar ** (num_prompts - k)
        for k in range(num_prompts + 1)
    )
    total, misses = 0.0, -1
    for chance in chances:
        total, misses = total + chance, misses + 1
        if total >= 0.99:
            break
    return misses


def check(result: AbilityResult) -> None:
    bar, num_prompts = result.ability.bar, result.num_prompts
    assert bar is not None
    shown = [(miss.conversation.prompt[-1]["content"], miss.given) for miss in result.misses]
    assert len(shown) <= allowed_misses(bar, num_prompts), shown


def test_few_misses_are_allowed() -> None:
    assert [allowed_misses(bar) for bar in (0.98, 0.95, 0.9)] == [2, 4, 6]
    assert allowed_misses(0.98, 1000) == 31


@pytest.mark.parametrize("ability", SHORT, ids=lambda ability: ability.name)
def test_the_packaged_model_has_the_ability(ability: Ability, student: Student) -> None:
    check(examine(ability, NUM_PROMPTS, seed=1, answer=student))


@pytest.mark.parametrize("ability", MIDDLE, ids=lambda ability: ability.name)
def test_the_packaged_model_has_the_other_abilities(ability: Ability, student: Student) -> None:
    check(examine(ability, NUM_PROMPTS, seed=1, answer=student))


@pytest.mark.parametrize("ability", LONG, ids=lambda ability: ability.name)
def test_the_packaged_model_recalls_from_long_contexts(ability: Ability, student: Student) -> None:
    check(examine(ability, 8, seed=1, answer=student))


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_recall_survives(condition: Condition) -> None:
    result = examine_under(condition, NUM_PROMPTS, 1, Path(model_path()))
    assert result.ability.bar == BAR
    assert result.remark
    check(result)
