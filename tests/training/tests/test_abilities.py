"""Each ability accepts its reference answers and refuses others; the splits have different phrasings."""

import json
from random import Random

import pytest

from tests.training.abilities import (
    ABILITIES,
    Ability,
    arithmetic,
    knowledge,
    personal,
    recall,
    structured,
    tools,
)
from tests.training.conversation import Dialogue, mentions, says
from tests.training.words import DataSplit, split_of

# One answer is right for every request; test_refusals.py has wrong ones.
REFUSING = ("refusals", "refusals in other languages", "requests as newcomers write them")
BY_NAME = pytest.mark.parametrize("ability", ABILITIES, ids=lambda ability: ability.name)


def reference(conversation: Dialogue) -> str:
    """The reference answer as a model must write it, with its tool calls."""
    message = conversation.messages[-1]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] + "".join(
        f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls
    )


@BY_NAME
def test_the_reference_answer_is_accepted(ability: Ability) -> None:
    for index in range(50):
        made = ability.test(0, index)
        assert made.accepts(reference(made)), made


@pytest.mark.parametrize(
    "ability", [a for a in ABILITIES if a.name not in REFUSING], ids=lambda ability: ability.name
)
def test_an_answer_to_another_question_is_refused(ability: Ability) -> None:
    tests = [ability.test(0, index) for index in range(60)]
    pairs = list(zip(tests, tests[7:], strict=False))  # fixed prompts are grouped by topic
    refused = sum(not first.accepts(reference(second)) for first, second in pairs)
    assert refused / len(pairs) > 0.7  # small answers (a count, a day) coincide by chance


@BY_NAME
def test_an_empty_answer_is_refused(ability: Ability) -> None:
    assert not any(ability.test(0, index).accepts("") for index in range(20))


@BY_NAME
def test_prompts_are_deterministic(ability: Ability) -> None:
    assert ability.test(1, 7).messages == ability.test(1, 7).messages
    drawn = {str(ability.test(1, index).messages) for index in range(20)}
    assert len(drawn) > 10


@BY_NAME
def test_the_turns_alternate_and_end_with_the_assistant(ability: Ability) -> None:
    for split in DataSplit:
        roles = [m["role"] for m in ability.make(Random(2), split, 60).messages]
        assert roles[-1] == "assistant"
        spoken = [role for role in roles if role not in ("system", "tool")]
        assert spoken == ["user", "assistant"] * (len(spoken) // 2) or "tool" in roles


def test_held_out_questions_about_mlxserve_never_train() -> None:
    train = {question for topic in knowledge.TOPICS for question in topic.train}
    held_out = {question for topic in knowledge.TOPICS for question in topic.held_out}
    assert train.isdisjoint(held_out)


def test_every_topic_accepts_its_answer_because_of_its_keywords() -> None:
    for topic in knowledge.TOPICS:
        assert mentions(*topic.keywords)(topic.answer)
        assert not mentions(*topic.keywords)("Something else entirely.")


def test_a_job_has_the_right_article() -> None:
    jobs = {
        personal.Told(trait, "Ada", trait.make(Random(i), DataSplit.TRAIN)).value
        for i in range(200)
        for trait in personal.TRAITS
        if "{value}." in trait.answer
    }
    assert {"an actor", "a baker"} <= jobs


def test_an_invented_answer_to_an_untold_fact_is_refused() -> None:
    made = (personal.personal(Random(i), DataSplit.HELD_OUT, 0) for i in range(100))
    untold = [one for one in made if one.answer == personal.NOT_TOLD]
    assert untold
    assert not any(one.accepts("Your name is Ada.") for one in untold)


def test_a_drill_asks_for_exactly_one_untold_fact() -> None:
    for seed in range(30):
        made = personal.drill(Random(seed), DataSplit.TRAIN, 0)
        answers = [m["content"] for m in made.messages if m["role"] == "assistant"]
        assert answers.count(personal.NOT_TOLD) == 1
        assert made.accepts(reference(made))


def test_tools_offered_together_have_distinct_names() -> None:
    for seed in range(100):
        offered = tools.tool_calls(Random(seed), DataSplit.TRAIN, 0).tools
        assert len({tool["function"]["name"] for tool in offered}) == len(offered)


def test_a_drill_calls_several_of_the_offered_tools() -> None:
    called = []
    for seed in range(30):
        made = tools.drill(Random(seed), DataSplit.TRAIN, 0)
        names = [tool["function"]["name"] for tool in made.tools]
        chosen = [
            call["function"]["name"] for m in made.messages for call in m.get("tool_calls", [])
        ]
        assert len(chosen) >= 4
        assert set(chosen) <= set(names)
        assert made.accepts(reference(made))
        called.append(len(set(chosen)))
    assert sum(count > 1 for count in called) > 20


def test_json_is_compared_as_json() -> None:
    check = structured.is_json({"name": "Ada", "age": 31})
    assert check('{"age":31, "name": "Ada"}')
    assert not check('{"name": "Ada", "age": "31"}')
    assert not check('{"name": "Ada", "age": 31')


def test_facts_have_distinct_keys_and_values() -> None:
    for seed in range(50):
        facts = recall.facts(Random(seed), DataSplit.TRAIN, 8)
        assert len({fact.key for fact in facts}) == 8
        assert len({fact.value for fact in facts}) == 8


def test_a_recalled_value_belongs_to_the_requested_split() -> None:
    for split in DataSplit:
        for seed in range(100):
            for fact in recall.facts(Random(seed), split, 2):
                assert all(split_of(part) is split for part in fact.value.split())


def test_a_long_context_has_about_the_requested_length() -> None:
    for make in (recall.in_one_turn, recall.over_turns):
        text = " ".join(m["content"] for m in make(Random(0), DataSplit.TRAIN, 130).prompt)
        assert 110 < len(text.split()) < 260


def test_a_value_within_a_longer_word_does_not_count() -> None:
    check = says("plum-4")
    assert check("The code word is plum-4.")
    assert check("plum-4")
    assert not check("The code word is plum-42.")
    assert not check("The code word is x-plum-4.")
    assert not check("The code word is Plum-4.")


def test_an_answer_with_every_value_is_refused() -> None:
    check = says("plum", but_not=["fig"])
    assert check("It is plum.")
    assert not check("It is plum or fig.")


def test_a_sum_is_judged_by_its_result() -> None:
    made = arithmetic.add(Random(0), DataSplit.HELD_OUT, 0)
    left, right = made.answer.split(" = ")
    assert made.accepts(right)
    assert made.accepts(made.answer)
    assert not made.accepts(f"{left} = {int(right) + 1}")


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>', True),
        ('<tool_call>{"arguments": {"city": "Oslo"}, "name": "f"}</tool_call>', True),
        ('<tool_call>\n{"name": "g", "arguments": {"city": "Oslo"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}\n</tool_call>', False),
        ('{"name": "f", "arguments": {"city": "Oslo"}}', False),
    ],
)
def test_only_a_well_formed_call_of_the_right_tool_is_accepted(answer: str, is_right: bool) -> None:
    assert tools.calls("f", {"city": "Oslo"})(answer) is is_right
