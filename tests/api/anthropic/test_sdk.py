"""Anthropic's own client against our server: how it parses our replies, and which errors it raises.

The scripted chat says what no small model would; the real engine shows that the rest is true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.chat.text_model import TextModel
from mlxserve.core.errors import EngineStopped, PromptTooLong, QueueFull
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from mlxserve.text.signature import sign
from tests.api.clients import anthropic
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer

HELLO: dict[str, Any] = {
    "model": "claude-local",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Hello"}],
}
GREEDY = {"temperature": 0}  # no field of this client's any more
# The model has never been trained, and would write spaces for ever: all that may come next is made
# about as likely.
EVENLY: dict[str, Any] = {"extra_body": {"temperature": 20, "seed": 1}}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def fake(start_server: Callable[..., Any]) -> Iterator[anthropic.Anthropic]:
    url = start_server().url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real(real_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=real_url, api_key="none", max_retries=0) as client:
        yield client


def input_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


# The real engine.


@pytest.mark.slow
def test_count_tokens_predicts_the_usage_of_a_message(real: anthropic.Anthropic) -> None:
    asked = {**HELLO, "system": [{"type": "text", "text": "Be brief. " * 40}]}
    message = real.messages.create(**asked, extra_body=GREEDY)
    foretold = real.messages.count_tokens(
        **{name: asked[name] for name in ("model", "messages", "system")}
    )
    assert foretold.input_tokens == input_tokens(message.usage)
    assert 0 < message.usage.output_tokens <= HELLO["max_tokens"]
    again = real.messages.create(**asked, extra_body=GREEDY)
    assert again.content == message.content
    assert again.usage.cache_read_input_tokens > 0
    assert foretold.input_tokens == input_tokens(again.usage)


def test_a_stream_adds_up_to_the_message(real: anthropic.Anthropic) -> None:
    whole = real.messages.create(**HELLO, extra_body=GREEDY)
    with real.messages.stream(**HELLO, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content)
    assert [block.text for block in message.content] == [text]
    assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, None)
    assert input_tokens(message.usage) == input_tokens(whole.usage)
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_a_stop_sequence_is_reported(real: anthropic.Anthropic) -> None:
    text = real.messages.create(**{**HELLO, "max_tokens": 40}, extra_body=GREEDY).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = real.messages.create(
        **{**HELLO, "max_tokens": 40}, extra_body=GREEDY, stop_sequences=["never this", stop]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_the_async_client_streams_many_at_once(real_url: str) -> None:
    async def ask(client: anthropic.AsyncAnthropic, number: int) -> str:
        messages = [{"role": "user", "content": f"Say {number}"}]
        async with client.messages.stream(**{**HELLO, "messages": messages}) as stream:
            return (await stream.get_final_message()).stop_reason

    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=real_url, api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(8)))

    assert set(asyncio.run(ask_all())) <= {"end_turn", "max_tokens"}


def test_a_prompt_beyond_the_context_is_a_bad_request(real: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "word " * 5_000}]
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"
    ) as caught:
        real.messages.create(**{**HELLO, "messages": messages})
    assert caught.value.type == "invalid_request_error"


def test_the_model_is_listed_in_anthropics_format(
    real: anthropic.Anthropic, real_chat: TextModel
) -> None:
    [model] = real.models.list()
    assert (model.id, model.type, model.lifecycle) == (real_chat.model_name, "model", "active")
    assert model.max_input_tokens == real_chat.max_model_len
    assert real.models.retrieve("claude-any") == real.models.retrieve(model.id)


# The scripted chat.


def tool_call(chat: Any) -> list[Any]:
    return [
        Delta(reasoning="I should look."),
        Delta("One moment."),
        Delta(tool_calls=(ToolCallDelta(0, "call_1", "weather", '{"city"'),)),
        Delta(
            tool_calls=(ToolCallDelta(0, arguments=': "Köln"}'),),
            finish_reason=FinishReason.TOOL_CALLS,
            usage=Usage(20, 9, 4),
        ),
    ]


def expected(message: Any) -> None:
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I should look.")
    assert thinking.signature == sign("I should look.")
    assert (text.type, text.text) == ("text", "One moment.")
    assert (call.type, call.id, call.name) == ("tool_use", "call_1", "weather")
    assert call.input == {"city": "Köln"}
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (16, 4, 9)


def test_thinking_and_tool_calls_can_be_sent_back(
    fake: anthropic.Anthropic, chat: FakeChat
) -> None:
    chat.script = tool_call(chat)
    asked = {**HELLO, "max_tokens": 2_000, "tools": [TOOL]}
    thinking = {"type": "enabled", "budget_tokens": 1_024}
    message = fake.messages.create(**asked, thinking=thinking)
    expected(message)
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "Rain"}
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    fake.messages.create(**{**asked, "messages": messages}, thinking=thinking)
    _, answer, tool = chat.rendered[-1].messages
    assert answer["reasoning_content"] == "I should look."
    assert answer["tool_calls"][0]["function"]["name"] == "weather"
    assert (tool["role"], tool["content"]) == ("tool", "Rain")


def test_the_streaming_helper_accumulates_thinking_and_tools(
    fake: anthropic.Anthropic, chat: FakeChat
) -> None:
    chat.script = tool_call(chat)
    with fake.messages.stream(**HELLO, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        expected(stream.get_final_message())
    assert {"thinking", "signature", "text", "input_json", "content_block_stop"} <= set(kinds)
    assert kinds[-1] == "message_stop"


def test_the_raw_stream_has_every_event(fake: anthropic.Anthropic) -> None:
    events = list(fake.messages.create(**HELLO, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_errors_are_the_clients_own_types(fake: anthropic.Anthropic, chat: FakeChat) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        fake.models.retrieve("gpt-4")
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        fake.messages.create(**{**HELLO, "max_tokens": 0})
    image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
    with pytest.raises(anthropic.BadRequestError, match="image parts are not supported"):
        fake.messages.create(**{**HELLO, "messages": [{"role": "user", "content": [image]}]})
    chat.submit_error = QueueFull("The queue is full.")
    with pytest.raises(anthropic.OverloadedError) as full:
        fake.messages.create(**HELLO)
    assert full.value.response.headers["retry-after"] == "1"
    chat.submit_error = PromptTooLong("It is too long.", num_tokens=9, max_model_len=5)
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        fake.messages.stream(**HELLO).__enter__()


def test_a_stream_that_breaks_raises(fake: anthropic.Anthropic, chat: FakeChat) -> None:
    chat.script = [Delta("a"), EngineStopped("The engine has stopped.")]
    with (
        pytest.raises(anthropic.APIStatusError, match="has stopped"),
        fake.messages.stream(**HELLO) as stream,
    ):
        stream.until_done()


def test_a_key_is_accepted_in_either_header(chat: FakeChat, start_server: StartServer) -> None:
    url = start_server(access=AccessPolicy(api_keys=["k" * 32])).url
    with anthropic.Anthropic(base_url=url, api_key="k" * 32) as client:
        assert client.messages.create(**HELLO).content[0].text == "Hello"
    with anthropic.Anthropic(base_url=url, auth_token="k" * 32) as client:
        assert client.messages.create(**HELLO).content[0].text == "Hello"
    with (
        anthropic.Anthropic(base_url=url, api_key="q" * 32) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(**HELLO)
    assert refused.value.type == "authentication_error"


class Weather(BaseModel):
    unit: Literal["C", "F"]


def test_an_answer_is_parsed_as_the_requested_type(real: anthropic.Anthropic) -> None:
    asked = {**HELLO, "max_tokens": 200, **EVENLY}
    message = real.messages.parse(**asked, output_format=Weather)
    assert message.parsed_output.unit in ("C", "F")


def test_a_required_tool_is_called_with_what_its_schema_allows(
    real: anthropic.Anthropic,
) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"name": "weather", "description": "The weather.", "input_schema": schema}
    asked = {**HELLO, "max_tokens": 200, "tools": [tool], **EVENLY}
    choice = {"type": "tool", "name": "weather"}
    message = real.messages.create(**asked, tool_choice=choice)
    [call] = message.content
    assert (call.type, call.name) == ("tool_use", "weather")
    assert call.input["unit"] in ("C", "F")
    assert message.stop_reason == "tool_use"
    with real.messages.stream(**asked, tool_choice=choice) as stream:
        [call] = stream.get_final_message().content
    assert call.input["unit"] in ("C", "F")


def test_rate_limits_and_refused_pages_are_the_clients_own_errors(
    chat: FakeChat, start_server: StartServer
) -> None:
    access = AccessPolicy(api_keys=["k" * 32], requests_per_minute_per_key=1)
    url = start_server(access=access).url
    with anthropic.Anthropic(base_url=url, api_key="k" * 32, max_retries=0) as client:
        client.messages.create(**HELLO)
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(**HELLO)
        assert limited.value.type == "rate_limit_error"
        assert int(limited.value.response.headers["retry-after"]) > 0
        with pytest.raises(anthropic.PermissionDeniedError):
            client.messages.create(**HELLO, extra_headers={"origin": "https://evil.example"})
