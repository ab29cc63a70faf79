"""Refusals: one sentence for what the model cannot do, in many words and languages."""

from collections import Counter
from random import Random

import pytest

from tests.training.abilities import (
    ABILITIES,
    foreign,
    newcomers,
    refusals,
    requests,
    styles,
    tools,
)
from tests.training.abilities.refusals import ONLY_ENGLISH, REFUSAL, refuses
from tests.training.words import DataSplit


@pytest.mark.parametrize("answer", [REFUSAL, ONLY_ENGLISH, f"{REFUSAL}\n"])
def test_a_refusal_is_one_sentence_that_names_the_command_of_chat_and_shell(answer: str) -> None:
    assert refuses(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Noted.",
        "I can't help with that.",
        "I can't help with that. Load a larger one with `/model`.",
        f"{REFUSAL} {REFUSAL}",
        f"{REFUSAL}\n\n```python\nprint(1)\n```",
        "I can't do that: load a larger one with `/model` or `-m`",  # stopped in the middle
        "I can't help with that: load a larger one with `/model`.",
        '<tool_call>\n{"name": "/model", "arguments": {}}\n</tool_call>',
        "Type `/model NAME` in the chat.",
    ],
)
def test_anything_else_is_not_a_refusal(answer: str) -> None:
    assert not refuses(answer)


def test_no_other_ability_accepts_a_refusal() -> None:
    for ability in ABILITIES:
        for index in range(20):
            made = ability.test(3, index)
            if not refuses(made.answer):
                assert not made.accepts(REFUSAL), made
                assert not made.accepts(ONLY_ENGLISH), made


def test_requests_vary() -> None:
    rng = Random(0)
    made = [refusals.exchange(rng, DataSplit.TRAIN).question for _ in range(4000)]
    assert len(set(made)) > 3200
    commonest = Counter(text.split()[0].lower() for text in made if text.split()).most_common(1)
    assert commonest[0][1] < 600, "no first word gives the refusal away"


@pytest.mark.parametrize("split", DataSplit)
def test_requests_leave_no_field_open(split: DataSplit) -> None:
    rng = Random(1)
    for _ in range(3000):
        text = requests.request(rng, split)
        assert "{text}" not in text
        assert text.strip()


def test_the_splits_share_no_message_in_another_language() -> None:
    rng = Random(2)
    train = {foreign.message(rng, DataSplit.TRAIN) for _ in range(4000)}
    held_out = {foreign.message(rng, DataSplit.HELD_OUT) for _ in range(1000)}
    assert len(foreign.LANGUAGES) > 40
    assert len(held_out) > 80
    assert train.isdisjoint(held_out)


def test_earlier_turns_come_before_some_requests() -> None:
    lengths = {len(refusals.refusal(Random(i), DataSplit.HELD_OUT, 0).messages) for i in range(60)}
    assert {2, 4, 6} <= lengths


def test_a_question_for_a_tool_is_refused_without_one() -> None:
    for seed in range(30):
        made = tools.without_tools(Random(seed), DataSplit.HELD_OUT)
        assert refuses(made.answer)


def test_pairs_have_both_answers_and_refusals() -> None:
    answers = [
        message["content"]
        for seed in range(60)
        for message in newcomers.contrasts(Random(seed), DataSplit.TRAIN, 0).messages
        if message["role"] == "assistant"
    ]
    share = sum(map(refuses, answers)) / len(answers)
    assert 0.3 < share < 0.7


def test_a_visit_ends_with_a_question_about_the_user() -> None:
    for seed in range(30):
        made = newcomers.visit(Random(seed), DataSplit.TRAIN, 40)
        assert not refuses(made.answer)
        assert made.accepts(made.answer)


def test_the_examination_has_three_hundred_requests_and_twenty_languages() -> None:
    texts = [case.prompt[-1]["content"] for case in newcomers.REFUSED]
    assert len(set(texts)) == 300
    scripts = [text for text in texts if sum(not c.isascii() for c in text) > len(text) / 2]
    assert len(scripts) >= 3 * 9, "languages in other scripts"
    (ability,) = (a for a in ABILITIES if a.name == "requests as newcomers write them")
    assert (ability.bar, len(ability.tests(0, 5))) == (0.95, 300)


def test_what_newcomers_may_ask_is_not_answered_by_a_refusal() -> None:
    assert len(newcomers.ANSWERED) == 62
    for case in newcomers.ANSWERED:
        assert case.accepts(case.answer)
        assert not case.accepts(REFUSAL)


def test_a_misspelt_word_keeps_its_length_within_one_letter() -> None:
    rng = Random(4)
    texts = [styles.misspelt(rng, "elephant") for _ in range(400)]
    assert {len(text) for text in texts} == {7, 8, 9}
    assert texts.count("elephant") > 300
