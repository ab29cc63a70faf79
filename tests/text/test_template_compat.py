"""Every shape of conversation that agents send, with every rule of public templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from mlxserve.text import template_compat
from mlxserve.text.conversation import (
    Call,
    Conversation,
    Message,
    Unreadable,
    completed_tool,
    read_messages,
)
from mlxserve.text.template_caps import Arguments, CallIds, TemplateCaps, find_abilities
from mlxserve.text.template_compat import (
    AdaptedConversation,
    Fitting,
    results_after_calls,
    single_typed_tool,
)
from tests.text.rendering import renderer, worker
from tests.text.template_rules import LOSING, MOVING, RULES

TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
    {
        "type": "function",
        "function": {"name": "edit", "parameters": {"properties": {"a": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "bare"}},
]


def rendered(template: str, messages: Sequence[Any], tools: Any = None, **variables: Any) -> Any:
    [text] = worker().render_each(
        [
            {
                "chat_template": template,
                "conversations": [list(messages)],
                "tools": tools and [completed_tool(tool) for tool in tools],
                "documents": None,
                "add_generation_prompt": True,
                **variables,
            }
        ]
    )
    return text


TEMPLATES = {**RULES, **MOVING, **LOSING}


@cache
def fitting(rule: str) -> Fitting:
    template = TEMPLATES[rule]
    return Fitting(find_abilities(renderer(template), worker().variables(template)))


# ---- shapes


def user(text: str) -> Message:
    return Message(role="user", text=text)


def system(text: str) -> Message:
    return Message(role="system", text=text)


def answer(text: str = "", *calls: Call, reasoning: str = "") -> Message:
    return Message(role="assistant", text=text, calls=calls, reasoning=reasoning)


def call(name: str = "c1", call_id: str = "call_0123456789abcdef01234567") -> Call:
    return Call(f"{call_id}{name}", "read", json.dumps({"path": f"{name}.py"}))


def result(name: str = "c1", call_id: str = "call_0123456789abcdef01234567") -> Message:
    return Message(role="tool", text=f"result of {name}", call_id=f"{call_id}{name}")


SHAPES: Mapping[str, list[Message]] = {
    "a question": [user("q1")],
    "a system message": [system("s1"), user("q1")],
    "Codex: instructions and a developer message": [system("s1"), system("s2"), user("q1")],
    "Codex: environment, then the question": [system("s1"), user("q1"), user("q2")],
    "Claude Code: a system message after the first user's": [
        system("s1"),
        user("q1"),
        system("s2"),
    ],
    "Claude Code: a reminder further down": [
        system("s1"),
        user("q1"),
        answer("a1"),
        user("q2"),
        system("s2"),
        answer("a2"),
        user("q3"),
    ],
    "a reminder after a result": [
        system("s1"),
        user("q1"),
        answer("", call()),
        result(),
        system("s2"),
    ],
    "a result after a reminder and a question, in another order": [
        system("s1"),
        user("q1"),
        answer("a1", call()),
        system("s2"),
        user("q2"),
        result(),
    ],
    "a title request with only a system message": [system("s1")],
    "a tool loop": [system("s1"), user("q1"), answer("a1", call()), result()],
    "a tool loop with text and reasoning": [
        user("q1"),
        answer("a1", call(), reasoning="t1"),
        result(),
        answer("", call("c2"), reasoning="t2"),
        result("c2"),
    ],
    "steering after a result": [
        user("q1"),
        answer("", call()),
        result(),
        user("q2"),
        answer("a1"),
        user("q3"),
    ],
    "two calls in one answer": [
        user("q1"),
        answer("a1", call("c1"), call("c2")),
        result("c1"),
        result("c2"),
    ],
    "results in another order": [
        user("q1"),
        answer("", call("c1"), call("c2"), call("c3")),
        result("c3"),
        result("c1"),
        result("c2"),
        answer("a1"),
        user("q2"),
    ],
    "a result that never came": [
        user("q1"),
        answer("", call("c1"), call("c2")),
        result("c2"),
        user("q2"),
    ],
    "ids of nine characters": [
        user("q1"),
        answer("", call("x", "abcdefgh")),
        result("x", "abcdefgh"),
    ],
    "Anthropic's ids": [user("q1"), answer("", call("x", "toolu_01A")), result("x", "toolu_01A")],
    "an aborted answer": [user("q1"), user("q2"), answer("a1"), user("q3"), user("q4")],
    "an answer without text": [user("q1"), answer(""), user("q2")],
    "an answer with reasoning only": [user("q1"), answer("", reasoning="t1"), user("q2")],
    "two answers in a row": [user("q1"), answer("a1"), answer("a2"), user("q2")],
    "an answer first": [answer("a1"), user("q1")],
    "a compacted history": [system("s1"), result("c1"), user("q1")],
    "a result without its call": [user("q1"), result("c1"), answer("a1"), user("q2")],
    "cut-off arguments": [
        user("q1"),
        answer("a1", Call("call_1", "edit", '{"path": "a')),
        Message(role="tool", text="result of c1", call_id="call_1"),
        user("q2"),
    ],
    "a call that was denied": [system("s1"), user("q1"), answer("", call()), user("q2")],
    "a text and a call that was denied": [user("q1"), answer("a1", call()), user("q2")],
    "two calls that were denied": [user("q1"), answer("", call("c1"), call("c2")), user("q2")],
    "a call that was denied, and more": [
        user("q1"),
        answer("a1", call()),
        user("q2"),
        answer("a2"),
        user("q3"),
    ],
    "a call that was denied at the end": [system("s1"), user("q1"), answer("a1", call())],
    "a call that was denied before another": [
        system("s1"),
        user("q1"),
        answer("a1", call("c1")),
        answer("a2", call("c2")),
        result("c2"),
    ],
    "an answer before one with a call": [
        user("q1"),
        answer("a1"),
        answer("a2", call()),
        result(),
        answer("a3"),
        user("q2"),
    ],
    "a call first": [answer("", call()), result(), user("q1")],
    "thinking at the end": [user("q1"), answer("", reasoning="t1")],
    "an image of a tool": [
        user("q1"),
        answer("", call()),
        Message.from_parts("tool", ("seen ", Unreadable("image")), call_id=call().id),
    ],
    "an empty question": [system("s1"), user(""), answer("a1"), user("q1")],
}


def marks(messages: Sequence[Message]) -> list[str]:
    """What must be in the prompt, in this order."""
    found: list[str] = []
    for message in messages:
        found += [message.text] if message.text else []
        found += [f"{call.id[-2:]}.py" for call in message.calls if call.id.startswith("call_0")]
    return found


def missing(text: str, wanted: Sequence[str]) -> str | None:
    at = 0
    for mark in wanted:
        at = text.find(mark, at)
        if at < 0:
            return mark
        at += len(mark)
    return None


@pytest.mark.parametrize("rule", [*RULES, *LOSING])
def test_every_shape_is_rendered_whole_and_in_order(rule: str) -> None:
    takes = fitting(rule).abilities
    is_in_order = takes.parallel_calls and (takes.text_with_calls or takes.text_before_calls)
    for shape in SHAPES:
        messages = SHAPES[shape]
        fitted = fitting(rule).fit(Conversation.from_messages(messages))
        text = rendered(TEMPLATES[rule], fitted.messages, TOOLS)
        assert text is not None, (fitted.changes, fitting(rule).abilities)
        if is_in_order and "order" not in shape:
            assert missing(text, marks(messages)) is None, (text, fitted.changes)
        assert all(mark in text for mark in marks(messages)), (text, fitted.changes)


def session() -> list[list[Message]]:
    """What an agent appends in each of twelve turns."""
    two = answer("look", call("c3"), call("c4"), reasoning="why two")
    taken = Message.from_parts("tool", ("seen ", Unreadable("image")), call_id=call("c6").id)
    return [
        [system("s1"), system("s2"), user("environment"), user("q1")],
        [answer("", call("c1"), reasoning="why"), result("c1")],
        [answer("", call("c2")), result("c2"), system("reminder")],
        [two, result("c3"), result("c4")],
        [answer("done"), user("q2")],
        [answer("", call("c5")), result("c5"), user("steer")],
        [answer("", call("c6")), taken],
        [answer("halfway"), user("q3"), system("late")],
        [answer(""), user("again")],
        [answer("", call("c7"), call("c8")), result("c8"), result("c7")],
        [answer("a9", reasoning="why nine"), user("summarise")],
        [answer("summary"), user("q5")],
    ]


@pytest.mark.parametrize("rule", [*RULES, *(rule for rule in LOSING if "mistral" in rule)])
def test_twelve_turns_keep_the_beginning_of_the_prompt(rule: str) -> None:
    turns: list[tuple[AdaptedConversation, str]] = []
    said: list[Message] = []
    for appended in session():
        said += appended
        fitted = fitting(rule).fit(Conversation.from_messages(said))
        text = rendered(TEMPLATES[rule], fitted.messages, [], add_generation_prompt=False)
        assert text is not None, (fitted.changes, fitting(rule).abilities)
        turns.append((fitted, text))
    assert len(turns) == 12
    for (before, prompt), (after, longer) in pairwise(turns):
        # Only the last message may have grown, by a neighbour of its role.
        kept = before.messages[:-1]
        assert after.messages[: len(kept)] == kept
        if kept and kept[-1]["role"] != "system":
            start = rendered(TEMPLATES[rule], kept, [], add_generation_prompt=False)
            assert start is None or (prompt.startswith(start) and longer.startswith(start))


@pytest.mark.parametrize("rule", MOVING)
def test_reminders_between_the_steps_of_a_tool_loop_keep_the_whole_earlier_prompt(
    rule: str,
) -> None:
    said = [system("s1"), user("q1"), system("s2")]
    prompts = []
    for turn in range(12):
        asked = answer("", call(f"c{turn}"), reasoning=f"why {turn}")
        said += [asked, result(f"c{turn}"), *([system(f"reminder {turn}")] if turn % 2 else [])]
        fitted = fitting(rule).fit(Conversation.from_messages(said))
        prompts.append(rendered(MOVING[rule], fitted.messages, TOOLS, add_generation_prompt=False))
        assert missing(prompts[-1], [m.text for m in said[3:] if m.text]) is None
    assert all(longer.startswith(prompt) for prompt, longer in pairwise(prompts))


# ---- what is found


def abilities(rule: str) -> TemplateCaps:
    return fitting(rule).abilities


def test_a_template_that_takes_everything_changes_nothing() -> None:
    for messages in SHAPES.values():
        assert fitting("takes everything").fit(Conversation.from_messages(messages)).changes == ()


def test_the_abilities_of_known_rules_are_found() -> None:
    assert not abilities("qwen 3.5").late_system
    assert not abilities("qwen 3.5").several_systems
    assert abilities("qwen 3.5").repeated_users
    assert abilities("qwen 3.5").reasoning == "reasoning_content"
    assert abilities("mistral small 3.2").call_ids is CallIds.NINE
    assert not abilities("mistral small 3.2").user_after_result
    assert not abilities("mistral small 3.2").repeated_users
    assert not abilities("ministral 3").empty_answers
    assert not abilities("llama 3.1").parallel_calls
    assert not abilities("llama 3.3 that shows one call").parallel_calls
    assert not abilities("llama 3.3 that drops a text beside a call").text_with_calls
    assert not abilities("llama 3.3 that drops a text beside a call").without_user
    assert abilities("qwen 3").text_with_calls
    assert not abilities("gemma 2").system
    assert not abilities("gpt-oss").bare_tools
    assert not abilities("gpt-oss").orphan_results
    assert not abilities("gpt-oss").late_results
    assert not abilities("mistral nemo").late_results
    assert abilities("qwen 3").late_results
    assert not abilities("gpt-oss").text_and_reasoning
    assert abilities("gpt-oss").reasoning == "reasoning_content"
    assert not abilities("lfm 2").calls
    assert abilities("lfm 2").results
    assert not abilities("a template without tools").results
    assert abilities("reasoning under its short name").reasoning == "reasoning"
    assert not abilities("mistral small 3.2: a text beside a call").text_before_calls
    assert not abilities("mistral small 3.2").unanswered_calls
    assert not abilities("nemotron: a call at the end").unanswered_calls
    assert abilities("qwen 3").unanswered_calls
    assert not abilities("hermes: no list of tools").without_tools
    assert abilities("qwen 3").without_tools
    assert not abilities("llama 3.3: a call in the first message").answer_first


def said_to(rule: str, *messages: Message) -> list[dict[str, Any]]:
    return fitting(rule).fit(Conversation.from_messages(messages)).messages


def test_a_call_that_was_not_run_says_so_where_the_template_needs_a_result() -> None:
    history = [user("q1"), answer("", call("c1"), call("c2")), result("c1"), user("q2")]
    assert [m["role"] for m in said_to("qwen 3", *history)].count("tool") == 1
    results = [m for m in said_to("mistral small 3.2", *history) if m["role"] == "tool"]
    assert [m["content"] for m in results] == ["result of c1", "[not run]"]
    assert len({m["tool_call_id"] for m in results}) == 2


def test_every_call_has_one_result_and_every_text_a_place() -> None:
    history = (user("q1"), answer("a1", call("c1"), call("c2")), result("c2"), user("q2"))
    whole = template_compat.results_of_all_calls(history)
    assert [message.text for message in whole[2:4]] == ["result of c2", "[not run]"]
    assert template_compat.results_of_all_calls(whole) == whole
    moved = template_compat.texts_after_calls((*whole, answer("a2", call("c3")), answer("a3")))
    assert [message.text for message in moved if "a1" in message.text] == [
        "a1",
        "[Said before this call: a1]\n\nresult of c2",
    ]
    assert moved[-1].text == "a2\n\na3"


def test_a_text_beside_a_call_is_before_it_or_in_its_result() -> None:
    history = [user("q1"), answer("a1", call(), reasoning="t1"), result()]
    rule = "gpt-oss: a text beside a call once an answer follows"
    _, before, asked, _ = said_to(rule, *history)
    assert (before["content"], "tool_calls" in before) == ("a1", False)
    # Thinking that led to a call stays beside it: templates show it there alone.
    assert (asked["content"], asked["reasoning_content"]) == ("", "t1")
    *_, after = said_to("mistral small 3.2: a text beside a call", *history)
    assert after["content"] == "[Said before this call: a1]\n\nresult of c1"


def test_a_system_message_that_a_loop_of_tools_loses_is_before_the_first_question() -> None:
    rule = "mistral nemo: the system message beside a last message of the user's"
    first, *_ = said_to(rule, system("s1"), user("q1"))
    assert first == {"role": "user", "content": "s1\n\nq1"}


LOOSE = {
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "nothing": {"type": "null"},
    "any": {},
    "date": {"type": "date"},
    "list": {"type": ["array", "null"], "items": {"type": ["integer", "string"]}},
    "tree": {"type": "object", "properties": {"n": {"type": ["number", "null"]}}},
    "plain": {"type": "integer", "enum": ["1"]},
}


@pytest.mark.parametrize("rule", ["hermes 3", "seed-oss"])
def test_parameters_have_one_type_where_a_template_cannot_show_others(rule: str) -> None:
    assert not abilities(rule).loose_types
    parameters = {"type": "object", "properties": LOOSE, "additionalProperties": False}
    loose = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    single = single_typed_tool(completed_tool(loose))
    properties = single["function"]["parameters"]["properties"]
    assert {key: value["type"] for key, value in properties.items()} == {
        "maybe": "string",
        "either": "integer",
        "nothing": "string",
        "any": "string",
        "date": "string",
        "list": "array",
        "tree": "object",
        "plain": "integer",
    }
    assert properties["list"]["items"] == {"type": "string"}
    assert properties["tree"]["properties"]["n"] == {"type": "number"}
    asked = [{"role": "user", "content": "q"}]
    [refused, shown] = [
        worker().render_each(
            [
                {
                    "chat_template": RULES[rule],
                    "conversations": [asked],
                    "tools": [completed_tool(tool)],
                    "documents": None,
                    "add_generation_prompt": True,
                }
            ]
        )[0]
        for tool in (loose, single)
    ]
    assert refused is None
    assert "either" in str(shown)


def test_templates_that_show_schemas_as_they_are_keep_their_types() -> None:
    assert all(abilities(rule).loose_types for rule in ("qwen 3", "gpt-oss", "lfm 2", "gemma 3"))


def test_system_messages_that_a_template_moves_to_the_front_become_user_messages() -> None:
    assert not abilities("deepseek v3").late_system
    fitted = fitting("deepseek v3").fit(
        Conversation.from_messages(
            [system("s1"), user("q1"), answer("a1"), system("s2"), user("q2")]
        )
    )
    assert [message["role"] for message in fitted.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]


def test_arguments_stay_text_where_that_is_what_the_model_wrote() -> None:
    for rule, form in [
        ("qwen 3", Arguments.TEXT),
        ("deepseek v3", Arguments.TEXT),
        ("qwen 2.5", Arguments.OBJECT),
        ("glm 4.7", Arguments.OBJECT),
        ("gemma 4", Arguments.OBJECT),  # it prints a text as it is, which is not its own syntax
    ]:
        assert abilities(rule).arguments is form, rule


def test_variables_of_the_template_are_found() -> None:
    template = "{{ messages }}{% if preserve_thinking %}{% set x = effort %}{{ x }}{% endif %}"
    assert {"preserve_thinking", "effort"} <= set(worker().variables(template))
    assert "namespace" not in worker().variables("{% set a = namespace() %}")


def test_ids_become_the_same_nine_characters_in_a_call_and_its_result() -> None:
    fitted = fitting("mistral nemo").fit(Conversation.from_messages(SHAPES["a tool loop"]))
    asked, told = fitted.messages[-2:]
    short = asked["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert told["tool_call_id"] == short
    kept = fitting("mistral nemo").fit(Conversation.from_messages(SHAPES["ids of nine characters"]))
    assert kept.messages[-1]["tool_call_id"] == "abcdefghx"


def test_results_move_to_the_last_answer_with_their_call() -> None:
    """Some servers number the calls of each answer anew."""
    said = [
        *(user("q1"), answer("", call("c1")), user("q2"), result("c1")),
        *(
            answer("", call("c1"), call("c2")),
            result("c2"),
            system("s1"),
            result("c1"),
            result("c9"),
        ),
    ]
    fitted = results_after_calls(tuple(said))
    order = [0, 1, 3, 2, 4, 5, 7, 6, 8]
    assert fitted == tuple(said[number] for number in order)
    assert results_after_calls(fitted) == fitted


def test_a_template_that_renders_nothing_is_taken_to_be_able_to_do_everything() -> None:
    found = find_abilities(lambda probes: [None] * len(probes), {})
    assert found == TemplateCaps()


def test_what_was_changed_is_said() -> None:
    fitted = fitting("qwen 3.5").fit(
        Conversation.from_messages(SHAPES["a reminder after a result"])
    )
    assert fitted.changes == ("later system messages are user messages or part of results",)


# ---- the canonical conversation


def test_the_librarys_messages_are_read_with_members_that_only_a_template_knows() -> None:
    told = read_messages(
        [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}], "mood": 1},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "r", "tool_call_id": "i"},
        ]
    )
    first, asked, called, answered = told.messages
    assert first.role == "system"
    assert asked.extra == {"mood": 1}
    assert called.calls == (Call("i", "f", '{"a": 1}'),)
    assert answered.name == "f"
    assert Fitting(TemplateCaps()).fit(told).messages[1] == {
        "role": "user",
        "content": "q",
        "mood": 1,
    }


def test_a_tool_is_completed_without_changing_what_it_has() -> None:
    whole = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"properties": {}, "type": "object"},
        },
    }
    assert json.dumps(completed_tool(whole)) == json.dumps(whole)
    bare = completed_tool({"type": "function", "function": {"name": "f", "description": None}})
    assert bare["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
