"""Ollama's own client against our server: how it parses our replies, and which errors it raises.

The scripted chat says what no small model would; the real engine shows that the rest is true.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.chat.text_model import TextModel
from mlxserve.core.errors import EngineStopped
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.clients import ollama
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import StartServer

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
# The model has never been trained, and would write spaces for ever: all that may come next is made
# about as likely.
EVENLY: dict[str, Any] = {"temperature": 20, "seed": 1}


@pytest.fixture
def fake(start_server: StartServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=start_server().url) as client:
        yield client


@pytest.fixture(scope="module")
def real(real_url: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=real_url) as client:
        yield client


@pytest.fixture(scope="module")
def model(real_chat: TextModel) -> str:
    return real_chat.model_name


def weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: Where.
    """
    return f"rain in {city}"


# The real engine.


def test_a_stream_adds_up_to_the_whole_chat(real: ollama.Client, model: str) -> None:
    whole = real.chat(model, HELLO, options=GREEDY)
    pieces = list(real.chat(f"{model}:latest", HELLO, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    last = pieces[-1]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count > 0
    assert whole.total_duration > whole.prompt_eval_duration > 0
    assert whole.eval_duration > 0


def test_a_context_goes_on_where_the_answer_ended(
    real: ollama.Client, real_chat: TextModel, model: str
) -> None:
    first = real.generate(model, "Hello", options=GREEDY)
    prompt = first.context[: first.prompt_eval_count]
    answer = first.context[first.prompt_eval_count :]
    assert len(answer) == first.eval_count
    assert real_chat.codec.decode(answer).startswith(first.response)
    again = real.generate(model, "And you?", context=first.context, options=GREEDY)
    assert again.context[: len(first.context)] == first.context
    raw = real.generate(model, real_chat.codec.decode(prompt), raw=True, options=GREEDY)
    assert raw.context is None


def test_a_schema_is_followed(real: ollama.Client, model: str) -> None:
    class Paint(BaseModel, extra="forbid"):
        colour: Literal["red", "blue"]
        is_dry: bool

    reply = real.chat(model, HELLO, format=Paint.model_json_schema(), options=EVENLY)
    assert Paint.model_validate_json(reply.message.content).colour in ("red", "blue")


def test_log_probabilities_are_those_of_openais_route(real: ollama.Client, model: str) -> None:
    reply = real.chat(model, HELLO, logprobs=True, top_logprobs=2, options=GREEDY)
    assert len(reply.logprobs) == reply.eval_count
    for token in reply.logprobs:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_vectors_have_length_one(real: ollama.Client, model: str) -> None:
    texts = ["The sea is wide.", "A stone"]
    reply = real.embed(model, texts)
    assert [math.hypot(*vector) for vector in reply.embeddings] == pytest.approx([1, 1], abs=1e-5)
    one = real.embeddings(model, texts[0])
    assert one.embedding == pytest.approx(reply.embeddings[0], abs=1e-5)
    short = real.embed(model, texts[0], dimensions=8)
    assert len(short.embeddings[0]) == 8


def test_the_model_is_listed_shown_and_running(
    real: ollama.Client, real_chat: TextModel, model: str
) -> None:
    [listed] = real.list().models
    [running] = real.ps().models
    assert listed.model == running.name == f"{model}:latest"
    assert listed.size == real_chat.facts.weight_size > 0
    assert listed.details.family == "qwen3"
    shown = real.show(model)
    assert shown.modelinfo["qwen3.context_length"] == real_chat.max_model_len
    assert shown.modelinfo["general.parameter_count"] > 1_000
    assert "completion" in shown.capabilities
    assert real.pull(model).status == "success"


def test_the_async_client_streams_many_at_once(real_url: str, model: str) -> None:
    async def ask(client: ollama.AsyncClient, number: int) -> int:
        messages = [{"role": "user", "content": f"Say {number}"}]
        stream = await client.chat(model, messages, options=GREEDY, stream=True)
        return [part.eval_count async for part in stream][-1]

    async def ask_all() -> list[int]:
        async with ollama.AsyncClient(host=real_url) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(8)))

    assert all(0 < count <= GREEDY["num_predict"] for count in asyncio.run(ask_all()))


def test_a_prompt_beyond_the_context_is_refused(real: ollama.Client, model: str) -> None:
    messages = [{"role": "user", "content": "word " * 5_000}]
    with pytest.raises(ollama.ResponseError, match="maximum context length") as caught:
        real.chat(model, messages)
    assert caught.value.status_code == 400


# The scripted chat.


def test_functions_are_tools_and_calls_name_them(fake: ollama.Client, chat: FakeChat) -> None:
    chat.script = [
        Delta(token_ids=(1,), tool_calls=(ToolCallDelta(0, "c", "weather", '{"city": '),)),
        Delta(token_ids=(2,), tool_calls=(ToolCallDelta(0, arguments='"Rome"}'),)),
        Delta("", (3,), (), FinishReason.TOOL_CALLS, Usage(3, 3, 0)),
    ]
    reply = fake.chat("fake", HELLO, tools=[weather])
    [call] = reply.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    assert chat.rendered[0].tools[0]["function"]["description"] == "Tell the weather."
    result = {"role": "tool", "tool_name": "weather", "content": weather("Rome")}
    chat.script = None
    fake.chat("fake", [*HELLO, reply.message, result], tools=[weather])
    _, answer, told = chat.rendered[1].messages
    assert told["tool_call_id"] == answer["tool_calls"][0]["id"]
    assert (told["name"], told["content"]) == ("weather", "rain in Rome")


def test_errors_are_raised_with_their_status(fake: ollama.Client, chat: FakeChat) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'llama3' not found") as caught:
        fake.chat("llama3", HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mlxserve pull"):
        list(fake.pull("llama3", stream=True))
    chat.can_call = False
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        fake.chat("fake", HELLO, tools=[{"type": "function", "function": {"name": "f"}}])
    chat.script = [Delta("He", (72,)), EngineStopped("It has stopped.")]
    stream = fake.chat("fake", HELLO, stream=True)
    assert next(stream).message.content == "He"
    with pytest.raises(ollama.ResponseError, match=r"It has stopped\."):
        next(stream)


def test_a_client_that_leaves_ends_its_answer(fake: ollama.Client, chat: FakeChat) -> None:
    chat.script = [Delta("He", (72,)), HOLD]
    stream = fake.generate("fake", "Hi", stream=True)
    assert next(stream).response == "He"
    stream.close()
    chat.wait_until_closed()


def test_a_key_is_sent_as_everywhere(start_server: StartServer) -> None:
    server = start_server(access=AccessPolicy(api_keys=["a-key"]))
    with ollama.Client(host=server.url) as client, pytest.raises(ollama.ResponseError):
        client.list()
    headers = {"Authorization": "Bearer a-key"}
    with ollama.Client(host=server.url, headers=headers) as client:
        assert client.list().models[0].model == "fake:latest"
