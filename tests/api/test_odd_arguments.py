"""No arguments that a model writes make a reply fail, and none that a client sends back.

The official clients parse every reply, whole and streamed, of every API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.text.tokenizer import Tokenizer
from tests.api.clients import anthropic, ollama, openai
from tests.api.odd_arguments import ODD
from tests.api.scripted_engine import ScriptedEngine
from tests.api.serving import serving

ASK: list[Any] = [{"role": "user", "content": "Look"}]
FUNCTION: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
FLAT: dict[str, Any] = {"type": "function", **FUNCTION}
NAMED: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "look"}
# What passes the grammar of a forced call.
FORCED = ("an exponent that is too large", "a thousand lists", "4,400 digits")


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """With room for long arguments, in larger steps."""
    engine = ScriptedEngine(tokenizer)
    engine.max_model_len, engine.step_size = 32_000, 16
    return engine


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[str]:
    from mlxserve.chat.language_model import language_model

    chat = language_model(
        engine,  # type: ignore[arg-type]
        tokenizer,
        name="scripted",
        vocab_size=tokenizer.vocab_size,
        default_params=SamplingParams(),
    )
    with serving(chat, stop_engine=lambda: None) as server:
        yield server.url
    chat.close()


@pytest.fixture(scope="module")
def openai_client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ollama_client(url: str) -> Iterator[Any]:
    with ollama.Client(host=url) as client:
        yield client


def says(engine: ScriptedEngine, kind: str) -> tuple[str, dict[str, Any]]:
    """Have the model call with these arguments: (their text, the object that clients hear of)."""
    written, expected = ODD[kind]
    engine.says = f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
    text = json.loads(written) if written.startswith('"') else written
    return text, {"INVALID_JSON": text} if expected is None else expected


def check_text(arguments: str, written: str, expected: dict[str, Any]) -> None:
    """As the model wrote them, but for lone surrogates, which no client could encode."""
    if "INVALID_JSON" in expected:
        assert arguments == written
    else:
        assert json.loads(arguments) == expected


@pytest.mark.parametrize("kind", ODD)
def test_chat_completions(openai_client: Any, engine: ScriptedEngine, kind: str) -> None:
    text, expected = says(engine, kind)
    asked: dict[str, Any] = {"model": "scripted", "messages": ASK, "tools": [TOOL]}
    message = openai_client.chat.completions.create(**asked).choices[0].message
    with openai_client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    [call], [same] = message.tool_calls, streamed.tool_calls
    assert call.function.arguments == same.function.arguments
    check_text(call.function.arguments, text, expected)
    engine.says = "Yes."
    result = {"role": "tool", "tool_call_id": call.id, "content": "Seen."}
    history = [*ASK, message.model_dump(exclude_none=True), result]
    openai_client.chat.completions.create(messages=history, model="scripted")


@pytest.mark.parametrize("kind", ODD)
def test_responses(openai_client: Any, engine: ScriptedEngine, kind: str) -> None:
    text, expected = says(engine, kind)
    asked: dict[str, Any] = {"model": "scripted", "input": ASK, "tools": [FLAT]}
    response = openai_client.responses.create(**asked)
    with openai_client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    [call], [same] = response.output, streamed.output
    assert call.arguments == same.arguments
    check_text(call.arguments, text, expected)
    [custom] = openai_client.responses.create(**{**asked, "tools": [CUSTOM]}).output
    assert custom.type == "custom_tool_call"
    engine.says = "Yes."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Seen."}
    openai_client.responses.create(
        model="scripted", input=[result], previous_response_id=response.id
    )
    openai_client.responses.create(model="scripted", input=[*ASK, call.model_dump(), result])


@pytest.mark.parametrize("kind", ODD)
def test_messages(anthropic_client: Any, engine: ScriptedEngine, kind: str) -> None:
    _, expected = says(engine, kind)
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 20_000, "messages": ASK}
    with anthropic_client.messages.stream(**asked, tools=[NAMED]) as stream:
        streamed = stream.get_final_message()
    message = anthropic_client.messages.create(**asked, tools=[NAMED])
    [block], [same] = message.content, streamed.content
    assert block.input == same.input == expected
    assert streamed.stop_reason == message.stop_reason == "tool_use"
    engine.says = "Yes."
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Seen."}
    answered = [
        {"role": "assistant", "content": [one.model_dump() for one in message.content]},
        {"role": "user", "content": [result]},
    ]
    anthropic_client.messages.create(**{**asked, "messages": [*ASK, *answered]})


@pytest.mark.parametrize("kind", ODD)
def test_ollama(ollama_client: Any, engine: ScriptedEngine, kind: str) -> None:
    _, expected = says(engine, kind)
    asked: dict[str, Any] = {"model": "scripted", "messages": ASK, "tools": [TOOL]}
    message = ollama_client.chat(**asked).message
    pieces = [piece.message for piece in ollama_client.chat(**asked, stream=True)]
    streamed = [call for piece in pieces for call in piece.tool_calls or ()]
    [call], [same] = message.tool_calls, streamed
    assert call.function.arguments == same.function.arguments == expected
    engine.says = "Yes."
    result = {"role": "tool", "tool_name": "look", "content": "Seen."}
    ollama_client.chat(model="scripted", messages=[*ASK, message.model_dump(), result])


@pytest.mark.parametrize("kind", FORCED)
def test_forced_calls(
    openai_client: Any, anthropic_client: Any, engine: ScriptedEngine, kind: str
) -> None:
    text, expected = says(engine, kind)
    asked: dict[str, Any] = {"model": "scripted", "tool_choice": "required"}
    choice = openai_client.chat.completions.create(messages=ASK, tools=[TOOL], **asked).choices[0]
    [item] = openai_client.responses.create(input=ASK, tools=[FLAT], **asked).output
    assert choice.message.tool_calls[0].function.arguments == item.arguments == text
    asked = {**asked, "tool_choice": {"type": "any"}, "max_tokens": 20_000}
    message = anthropic_client.messages.create(messages=ASK, tools=[NAMED], **asked)
    assert message.content[0].input == expected
