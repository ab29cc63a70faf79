"""Nothing that the model is evaluated on occurs in its training data."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from tests.training import curriculum, prose, words
from tests.training.abilities import (
    ABILITIES,
    Ability,
    arithmetic,
    knowledge,
    lists,
    newcomers,
    requests,
)
from tests.training.conversation import Dialogue, Example, Phrasings, Sheet
from tests.training.words import DataSplit, split_of

TOO_FEW = "days and months"  # 19 words and two directions: only the phrasings are held out


@pytest.fixture(scope="module")
def trained_on() -> list[Example]:
    """The examples of some training steps."""
    first, last = curriculum.CONTINUED_PLAN[0], curriculum.CONTINUED_PLAN[-1]
    return [
        *islice(curriculum.examples(1, 0, first), 3000),
        *islice(curriculum.examples(1, 0, last), 1500),
    ]


@pytest.fixture(scope="module")
def trained_turns(trained_on: list[Example]) -> set[str]:
    conversations = (e for e in trained_on if isinstance(e, Dialogue))
    return {m["content"] for c in conversations for m in c.messages if m["role"] == "user"}


@pytest.mark.parametrize("ability", ABILITIES, ids=lambda ability: ability.name)
def test_no_evaluation_question_is_a_training_turn(
    ability: Ability, trained_turns: set[str]
) -> None:
    asked = {user_turns(ability.test(0, index))[-1] for index in range(60)}
    assert asked.isdisjoint(trained_turns)


def plain(text: str) -> str:
    """The words of a message, without case and punctuation."""
    return " ".join(re.findall(r"[\w+*/-]+", text.lower()))


def test_nothing_that_newcomers_wrote_is_a_training_turn(trained_turns: set[str]) -> None:
    written = {
        plain(case.prompt[-1]["content"]): case.prompt
        for case in (*newcomers.REFUSED, *newcomers.ANSWERED)
    }
    rng = Random(0)
    composed = {requests.request(rng, DataSplit.TRAIN) for _ in range(30_000)}
    known = {question for topic in knowledge.TOPICS for question in topic.train}
    assert written.keys().isdisjoint(map(plain, trained_turns | composed | known))


def user_turns(conversation: Dialogue) -> list[str]:
    return [m["content"] for m in conversation.prompt if m["role"] == "user"]


def test_no_pair_of_numbers_is_added_in_both_splits(
    trained_on: list[Example],
) -> None:
    sheets = [sheet for sheet in trained_on if isinstance(sheet, Sheet)]
    problems = (problem for sheet in sheets for problem, _ in sheet.problems)
    taught = {pair(problem) for problem in problems if problem.endswith(" = ")}
    examined = {pair(arithmetic.add(Random(i), DataSplit.HELD_OUT, 0).answer) for i in range(300)}
    assert len(taught) > 1000
    assert examined.isdisjoint(taught)


def pair(sum_: str) -> tuple[str, ...]:
    """The sign and the sorted numbers: 38 + 47 and 47 + 38 are the same pair."""
    first, sign, second = sum_.split()[:3]
    return (sign, *sorted((first, second)))


def carried(rng: Random) -> set[str]:
    """Words and numbers that evaluation prompts ask for."""
    made = (words.code_word, words.number, words.first_name, words.place)
    listed = (words.ENGLISH, words.NAMES, words.PLACES, words.JOBS)
    return {make(rng, DataSplit.HELD_OUT) for make in made for _ in range(400)} | {
        words.pick(rng, DataSplit.HELD_OUT, some) for some in listed for _ in range(200)
    }


def test_no_evaluation_word_or_number_occurs_in_training(
    trained_on: list[Example],
) -> None:
    """Neither in answers nor in questions, prose, sheets or tools."""
    wanted = {word.lower() for word in carried(Random(0))}
    assert len(wanted) > 1000
    text = " ".join(map(text_of, trained_on)).lower()
    units = set(re.findall(r"[^\W_]+(?:-[^\W_]+)*", text))
    assert len(units) > 10_000
    assert units.isdisjoint(wanted), units & wanted


def text_of(example: Example) -> str:
    if isinstance(example, Sheet):
        return " ".join(f"{problem} {result}" for problem, result in example.problems)
    said = [f"{m['content']} {json.dumps(m.get('tool_calls'))}" for m in example.messages]
    return f"{' '.join(said)} {json.dumps(example.tools)}"


def test_no_set_of_numbers_is_sorted_in_both_splits() -> None:
    def sets(split: DataSplit) -> Iterator[tuple[str, ...]]:
        return (tuple(lists.sort(Random(i), split).answer.split(", ")) for i in range(800))

    assert set(sets(DataSplit.TRAIN)).isdisjoint(sets(DataSplit.HELD_OUT))


@pytest.mark.parametrize("split", DataSplit)
def test_paragraphs_have_only_sentences_of_their_split(split: DataSplit) -> None:
    for seed in range(20):
        for sentence in prose.paragraph(Random(seed), split, 60):
            assert split_of(sentence) is split


@pytest.mark.parametrize("ability", ABILITIES, ids=lambda ability: ability.name)
def test_evaluation_uses_held_out_phrasings_only(
    ability: Ability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice between phrasings is made by `Phrasings.pick`, for the held-out split."""
    picked: list[DataSplit] = []
    pick = Phrasings.pick

    def spy(self: Phrasings, rng: Random, split: DataSplit) -> str:
        picked.append(split)
        return pick(self, rng, split)

    monkeypatch.setattr(Phrasings, "pick", spy)
    ability.test(0, 0)
    is_fixed = bool(ability.cases) or ability.name in ("mlxserve and manners", "no tool needed")
    assert set(picked) == (set() if is_fixed else {DataSplit.HELD_OUT})


def test_phrasings_that_overlap_are_refused() -> None:
    with pytest.raises(AssertionError):
        Phrasings(train=("What is it?",), held_out=("What is it?",))


def test_no_training_variation_of_a_question_is_held_out() -> None:
    rng = Random(0)
    asked = {knowledge.exchange(rng, DataSplit.TRAIN).question for _ in range(8000)}
    assert asked.isdisjoint(knowledge.HELD_OUT_QUESTIONS)
    assert len(asked) > len([q for topic in knowledge.TOPICS for q in topic.train])


def test_the_example_of_the_readme_is_in_no_training_turn(trained_turns: set[str]) -> None:
    assert not any(re.search("plum-42", turn, re.IGNORECASE) for turn in trained_turns)
    assert words.split_of("plum-42") is DataSplit.HELD_OUT
