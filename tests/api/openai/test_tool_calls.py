"""OpenAI's own client: calls of tools, reasoning and structured output, as its helpers see them.

The scripted engine says what no small model would; a real one, whose weights are noise, shows that
a structure holds whatever the model would rather say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from mlxserve.request import FinishReason
from tests.api.clients import openai
from tests.api.scripted_engine import ScriptedEngine

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
        },
    },
}
FLAT = {"type": "function", **WEATHER["function"]}


def call(city: str) -> str:
    arguments = json.dumps({"city": city, "days": 1})
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


SAYS = f"<think>\nTwo cities. Größe 🙂\n</think>\n\nI look.\n{call('Paris')}\n{call('Rome')}"


@pytest.fixture(scope="module")
def scripted_url(serve_scripted: Callable[..., Any]) -> Iterator[str]:
    with serve_scripted() as server:
        yield f"{server.url}/v1"


@pytest.fixture
def says(scripted_chat: Any) -> Any:
    engine = scripted_chat[1]
    engine.says = SAYS
    engine.requests.clear()
    engine.ends.clear()
    engine.kept.clear()
    return engine


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real(serve_real: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    with (
        serve_real() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def model(real_chat: Any) -> str:
    return real_chat.model_name


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": ASK, "tools": [WEATHER], **fields}


# Chat completions.


def test_a_reply_separates_thinking_text_and_calls(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    choice = scripted.chat.completions.create(**asked()).choices[0]
    message = choice.message
    assert message.reasoning_content == "Two cities. Größe 🙂"
    assert message.content == "I look."
    assert [(c.type, c.function.name) for c in message.tool_calls] == [
        ("function", "get_weather")
    ] * 2
    assert [json.loads(c.function.arguments)["city"] for c in message.tool_calls] == [
        "Paris",
        "Rome",
    ]
    assert len({c.id for c in message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


def test_a_streams_pieces_add_up_to_the_message(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    usage, pieces = None, []
    for chunk in scripted.chat.completions.create(
        **asked(stream=True, stream_options={"include_usage": True})
    ):
        usage = chunk.usage or usage
        pieces += [choice.delta for choice in chunk.choices]
    assert pieces[0].role == "assistant"
    assert "".join(p.content or "" for p in pieces) == "I look."
    reasoning = [p.reasoning_content for p in pieces if getattr(p, "reasoning_content", None)]
    assert "".join(reasoning) == "Two cities. Größe 🙂"
    assert len(reasoning) > 2
    calls = [call for piece in pieces for call in piece.tool_calls or ()]
    first = {c.index: c for c in calls if c.id}
    assert {index: c.function.name for index, c in first.items()} == dict.fromkeys(
        (0, 1), "get_weather"
    )
    fragments = [c.function.arguments for c in calls if c.index == 1]
    assert json.loads("".join(fragments)) == {"city": "Rome", "days": 1}
    assert len(fragments) > 5  # they came as they were written
    assert usage.completion_tokens_details.reasoning_tokens > 5


def test_the_stream_helper_ends_with_the_whole_message(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    with scripted.chat.completions.stream(**asked()) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    message = completion.choices[0].message
    assert message.content == "I look."
    assert [c.function.name for c in message.tool_calls] == ["get_weather"] * 2


def test_the_async_client_sees_the_same(scripted_url: str, says: ScriptedEngine) -> None:
    async def ask() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=scripted_url, api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(**asked())
            stream = await client.chat.completions.create(**asked(stream=True))
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return whole, text

    whole, text = asyncio.run(ask())
    assert text == whole.choices[0].message.content == "I look."


def test_without_parallel_calls_the_answer_ends_after_one(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    choice = scripted.chat.completions.create(**asked(parallel_tool_calls=False)).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert says.ends == [FinishReason.TOOL_CALLS]  # the engine does not go on
    assert says.kept == [60.0]  # until the tool has answered


def test_stop_strings_only_match_the_text(scripted: openai.OpenAI, says: ScriptedEngine) -> None:
    choice = scripted.chat.completions.create(**asked(stop=["Paris", "cities"])).choices[0]
    assert choice.finish_reason == "tool_calls"
    choice = scripted.chat.completions.create(**asked(stop=["look"])).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I ", "stop")
    assert choice.message.tool_calls is None


def test_a_truncated_call_has_the_finish_reason_length(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    says.says = call("Paris")
    choice = scripted.chat.completions.create(**asked(max_tokens=28)).choices[0]
    assert choice.finish_reason == "length"
    [cut] = choice.message.tool_calls
    assert cut.function.name == "get_weather"
    with pytest.raises(ValueError, match=r"delimiter|Unterminated|Expecting"):
        json.loads(cut.function.arguments)


def test_a_call_that_was_cut_off_before_its_arguments_is_text(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    says.says = call("Paris")
    choice = scripted.chat.completions.create(**asked(max_tokens=12)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert '{"name": "get' in choice.message.content


def test_without_tools_or_thinking_everything_is_text(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    says.says = "5 < 6 <tool"
    reply = scripted.chat.completions.create(model="scripted", messages=ASK)
    assert reply.choices[0].message.content == "5 < 6 <tool"
    assert reply.choices[0].message.tool_calls is None


def test_a_conversation_continues_with_a_tools_result(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    first = scripted.chat.completions.create(**asked()).choices[0].message
    says.says = "Sunny."
    answer = first.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in first.tool_calls]
    reply = scripted.chat.completions.create(**asked(messages=[*ASK, answer, *results]))
    assert reply.choices[0].message.content == "Sunny."
    assert reply.choices[0].finish_reason == "stop"


def test_an_impossible_tool_choice_is_a_bad_request(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    named = {"type": "function", "function": {"name": "nobody"}}
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.chat.completions.create(**asked(tool_choice=named))
    assert caught.value.param == "tool_choice"


# Responses.


def test_a_response_has_an_item_for_each_part(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    response = scripted.responses.create(model="scripted", input="Weather?", tools=[FLAT])
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output_text == "I look."
    assert json.loads(response.output[3].arguments)["city"] == "Rome"


def test_the_response_stream_helper_ends_with_the_whole_response(
    scripted: openai.OpenAI, says: ScriptedEngine
) -> None:
    with scripted.responses.stream(model="scripted", input="Weather?", tools=[FLAT]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds.count("response.output_item.done") == 4
    assert [item.type for item in response.output][2:] == ["function_call"] * 2
    says.says = "Sunny."
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in response.output[2:]
    ]
    after = scripted.responses.create(
        model="scripted", previous_response_id=response.id, input=results
    )
    assert after.output_text == "Sunny."


# A real engine with random weights, whose answers are constrained.


class Person(BaseModel):
    kind: Literal["poet", "king"]
    age: Annotated[int, Field(ge=0, le=99)]
    initials: Annotated[list[Literal["A", "B"]], Field(max_length=2)]


FORMAT = {"max_tokens": 300, "temperature": 1.0, "seed": 7}


def test_parsed_output_has_its_class(real: openai.OpenAI, model: str) -> None:
    reply = real.chat.completions.parse(model=model, messages=ASK, response_format=Person, **FORMAT)
    assert isinstance(reply.choices[0].message.parsed, Person)
    assert reply.choices[0].finish_reason == "stop"


def test_streamed_and_parsed_output_has_its_class(real: openai.OpenAI, model: str) -> None:
    with real.chat.completions.stream(
        model=model, messages=ASK, response_format=Person, **FORMAT
    ) as stream:
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Person)


def test_a_parsed_response_has_its_class(real: openai.OpenAI, model: str) -> None:
    response = real.responses.parse(
        model=model, input="Who?", text_format=Person, max_output_tokens=300
    )
    assert isinstance(response.output_parsed, Person)


def test_required_and_named_tools_are_called_with_what_their_schemas_allow(
    real: openai.OpenAI, model: str
) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        reply = real.chat.completions.create(
            model=model,
            messages=ASK,
            tools=[WEATHER],
            tool_choice=choice,
            parallel_tool_calls=False,
            **FORMAT,
        )
        [made] = reply.choices[0].message.tool_calls
        arguments = json.loads(made.function.arguments)
        assert arguments["city"] in ("Paris", "Rome")
        assert arguments["days"] in (1, 2)
        assert reply.choices[0].message.content is None
        assert reply.choices[0].finish_reason == "tool_calls"


def test_choices_of_one_request_each_follow_the_structure(real: openai.OpenAI, model: str) -> None:
    reply = real.chat.completions.create(
        model=model,
        messages=ASK,
        n=3,
        max_tokens=20,
        extra_body={"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}},
    )
    for choice in reply.choices:
        text = choice.message.content
        assert set(text[:3]) <= set("ab")
        assert text[3] == "-"
        assert text[4:].isdigit()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "objec"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"extra_body": {"structured_outputs": {"grammar": 'start: "a" foo'}}},
            "structured_outputs.grammar",
        ),
    ],
)
def test_an_unsupported_schema_is_a_bad_request(
    real: openai.OpenAI, model: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real.chat.completions.create(model=model, messages=ASK, **fields)
    assert caught.value.param == param
