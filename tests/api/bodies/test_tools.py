"""The chat endpoint's fields for tools and thinking."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxserve.api.errors import ApiError
from mlxserve.api.openai.schema import ChatRequest
from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.text.parsing.turn import ToolChoice

HELLO = [{"role": "user", "content": "Hello"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def asked(**fields: Any) -> ChatRequest:
    return ChatRequest.read({"messages": HELLO, **fields})


def test_a_choice_says_which_tools_may_or_must_be_called() -> None:
    for choice, mode, names in [
        (None, ToolChoice.AUTO, ["a", "b"]),
        ("auto", ToolChoice.AUTO, ["a", "b"]),
        ("none", ToolChoice.NONE, ["a", "b"]),
        ("required", ToolChoice.REQUIRED, ["a", "b"]),
        ({"type": "function", "function": {"name": "b"}}, ToolChoice.REQUIRED, ["b"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("a")]}},
            ToolChoice.AUTO,
            ["a"],
        ),
    ]:
        turn = asked(tools=[tool("a"), tool("b")], tool_choice=choice).turn()
        assert turn.tool_choice is mode, choice
        assert [t["function"]["name"] for t in turn.tools] == names, choice


def test_a_single_named_tool_is_called_once() -> None:
    turn = asked(tools=[tool("a")], tool_choice={"type": "function", "function": {"name": "a"}})
    assert turn.turn().tool_name == "a"
    assert not turn.turn().parallel_tool_calls


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
    ],
)
def test_choosing_an_unknown_tool_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields).turn()
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_templates_see_tools_without_fields_meant_for_clients() -> None:
    strict = {"type": "function", "function": {"name": "a", "description": "d", "strict": True}}
    assert asked(tools=[strict]).definitions == [
        {"type": "function", "function": {"name": "a", "description": "d"}}
    ]


def test_thinking_becomes_a_template_variable_and_a_budget() -> None:
    for fields, kwargs, budget in [
        ({}, {}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}, 0),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}, None),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            None,
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, 0),
        ({"thinking_budget": 7}, {"thinking_budget": 7}, 7),
        ({"thinking_token_budget": 7}, {"thinking_budget": 7}, 7),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"enable_thinking": True, "thinking_budget": 7},
            7,
        ),
        ({"reasoning": {"max_tokens": 7}}, {"thinking_budget": 7}, 7),
        ({"thinking_budget": 0}, {"enable_thinking": False}, 0),
        ({"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": False}, 0),
        ({"thinking": {"type": "auto"}}, {}, None),
        ({"chat_template_kwargs": {"reasoning_effort": None}}, {}, None),
    ]:
        request = asked(**fields)
        assert request.template_kwargs == kwargs, fields
        assert request.turn().thinking_budget == budget, fields


def test_tools_are_refused_for_a_model_whose_calls_cannot_be_parsed(
    scripted_chat: Any, tokenizer_with: Any
) -> None:
    from mlxserve.chat.language_model import language_model

    tokenizer = tokenizer_with([], "{{ messages[0].content }}{{ tools }}")
    chat = language_model(
        type(scripted_chat[1])(tokenizer),
        tokenizer,
        name="mute",
        vocab_size=tokenizer.vocab_size,
        default_params=SamplingParams(),
    )
    turn = asked(tools=[tool("a")]).turn()
    prompt = chat.writer.render(HELLO, tools=turn.tools)
    with pytest.raises(InvalidParameter, match="tools: how this model writes tool calls"):
        asyncio.run(chat.writer.submit(prompt, SamplingParams(), RequestOptions(turn=turn)))
    chat.close()
