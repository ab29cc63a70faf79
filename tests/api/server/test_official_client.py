"""The official client and a real engine in another process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections.abc import Iterator

import pytest

from tests.api.clients import openai
from tests.api.server.process import (
    CONTEXT,
    HELLO,
    MAX_WAITING,
    Process,
    send_endless_request,
)


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_gets_a_chat_completion(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 5
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 5


def test_a_stream_adds_up_to_the_whole_reply(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper_accumulates_a_reply(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[len(text) // 2 :][:3]  # the helper raises for answers that were cut at max_tokens
    with client.chat.completions.stream(**asked, stop=stop) as stream:
        kinds = {event.type for event in stream}
        reply = stream.get_final_completion()
    assert "content.delta" in kinds
    assert reply.choices[0].message.content == text[: text.index(stop)]


def test_the_async_client_streams_many_at_once(server: Process) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"Number {number}",
            max_tokens=10,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return sum([1 async for chunk in stream if chunk.choices[0].finish_reason == "length"])

    async def ask_all() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(MAX_WAITING)))

    assert asyncio.run(ask_all()) == [1] * MAX_WAITING


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "once upon a time " * 60, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**asked)
    second = client.completions.create(**asked)
    salted = client.completions.create(**asked, extra_body={"cache_salt": "mine"})
    assert first.usage.prompt_tokens > 64
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 33
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert first.choices[0].text == second.choices[0].text == salted.choices[0].text
    skipping = client.completions.create(**asked, extra_body={"skip_prefix_cache": True})
    assert skipping.usage.prompt_tokens_details.cached_tokens == 0
    assert skipping.usage.model_extra["cache"]["reason"] == "off"
    assert skipping.choices[0].text == first.choices[0].text


def test_logprobs_arrive_in_the_clients_types(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
        extra_body={"ignore_eos": True},
    )
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == 3
    for token in tokens:
        assert len(token.top_logprobs) == 4
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy takes the best
        assert token.bytes is None or bytes(token.bytes).decode() == token.token


def test_the_same_seed_gives_the_same_text_and_another_does_not(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 20, "temperature": 1}
        return client.completions.create(**asked, seed=seed).choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(1), ask(2), ask(3)}) == 3


def test_choices_differ_and_share_their_prompts_pages(
    client: openai.OpenAI, server: Process
) -> None:
    before = server.metric("prefix_cache_hits_total")
    reply = client.completions.create(
        model="tiny", prompt="the shared beginning " * 40, n=4, max_tokens=12, seed=1, temperature=1
    )
    assert len({choice.text for choice in reply.choices}) == 4
    assert server.metric("prefix_cache_hits_total") - before >= 3 * 64


def test_a_named_prefix_is_in_the_cache_before_it_is_first_used(
    server: Process, client: openai.OpenAI
) -> None:
    prefix = list(range(100, 200))
    added = server.request("PUT", "/v1/prefixes/rules", {"prompt": prefix})
    card = {"id": "rules", "object": "prefix", "num_tokens": 100, "key": None}
    assert json.loads(added[1]) == card
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    named = client.completions.create(prompt=[7, 8], **asked, extra_body={"prefix_name": "rules"})
    assert named.usage.prompt_tokens == 102
    assert named.usage.prompt_tokens_details.cached_tokens == 100
    whole = client.completions.create(prompt=[*prefix, 7, 8], **asked)
    assert whole.choices[0].text == named.choices[0].text
    assert server.request("DELETE", "/v1/prefixes/rules")[0] == 200


def test_the_cache_can_be_reset_when_nothing_runs(server: Process, client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": [9] * 70, "max_tokens": 1}
    client.completions.create(**asked)
    server.wait_for_metric("num_requests_running", 0)
    assert server.request("POST", "/api/v1/cache/reset")[0] == 200
    again = client.completions.create(**asked)
    assert again.usage.prompt_tokens_details.cached_tokens == 0


def test_a_resize_of_the_cache_changes_the_context(server: Process, client: openai.OpenAI) -> None:
    def context() -> int:
        return json.loads(server.request("GET", "/v1/models")[1])["data"][0]["max_model_len"]

    def num_pages() -> int:
        return json.loads(server.request("GET", "/api/v1/kv/stats")[1])["pages"]["total"]

    asked = {"model": "tiny", "prompt": [8] * 70, "max_tokens": 5, "temperature": 0}
    before, total, wanted = context(), num_pages(), client.completions.create(**asked)
    status, body = server.request("POST", "/api/v1/cache/resize", {"num_pages": 6})
    assert (status, json.loads(body)["num_pages"]) == (200, 6)
    assert context() == json.loads(body)["max_model_len"] < before
    assert num_pages() == 6
    assert client.completions.create(**asked).choices[0].text == wanted.choices[0].text
    status, body = server.request("POST", "/api/v1/cache/resize", {"num_pages": 1 << 24})
    assert (status, json.loads(body)["error"]["code"]) == (409, "out_of_memory")
    assert server.request("POST", "/api/v1/cache/resize", {"num_pages": total})[0] == 200
    assert context() == before


def test_the_map_shows_the_pages_of_a_request_while_it_runs(
    server: Process, client: openai.OpenAI
) -> None:
    server.wait_for_metric("num_requests_running", 0)
    with contextlib.ExitStack() as stack:
        watching = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        stack.callback(watching.close)
        watching.request("GET", "/api/v1/kv/map")
        lines = iter(watching.getresponse().readline, b"")
        events = (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
        first = next(events)
        assert (first["seq"], first["num_pages"], first["requests"]) == (0, 1000, [])
        peer = stack.enter_context(send_endless_request(server, stream=True))
        reply_id = re.search(rb"x-request-id: (\w+)", peer.recv(1_000))[1].decode()
        found = next(one for event in events for one in event["requests"])
        assert found["id"] == reply_id
        assert found["from"] == 0
        assert found["pages"]
        [live] = json.loads(server.request("GET", "/api/v1/requests")[1])["data"]
        assert live["id"] == reply_id
        assert live["state"] in ("prefilling", "decoding")
        peer.close()
        assert next(event for event in events if event["gone"])["gone"] == [reply_id]


def test_a_reply_says_why_no_more_of_the_prompt_was_cached(client: openai.OpenAI) -> None:
    prompt = [11] * 70
    asked = {"model": "tiny", "max_tokens": 1}
    client.completions.create(prompt=prompt, **asked)
    usage = client.completions.create(prompt=[*prompt[:66], 12, 13], **asked).usage
    assert usage.cache == {
        "num_pages": 2,
        "page_size": 32,
        "num_tokens": 64,
        "tokens_from_disk": 0,
        "tokens_from_store": 0,
        "differs_at": 64,
        "reason": "below_one_page",
    }


def test_a_text_survives_tokenization(server: Process) -> None:
    text = "Zoë said: 你好, \U0001f600!"
    tokens = json.loads(server.request("POST", "/tokenize", {"prompt": text})[1])["tokens"]
    reply = json.loads(server.request("POST", "/detokenize", {"tokens": tokens})[1])
    assert reply == {"prompt": text}


def test_the_tokens_of_a_conversation_are_counted_before_it_is_sent(
    server: Process, client: openai.OpenAI
) -> None:
    counted = json.loads(server.request("POST", "/tokenize", {"messages": HELLO})[1])["count"]
    reply = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
    assert counted == reply.usage.prompt_tokens


def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = client.completions.create(**asked, stop=stop).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_the_client_gets_a_response_and_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete"
    text = whole.output_text
    stop = text[len(text) // 2 :][:3]
    with client.responses.stream(**asked, extra_body={"stop": stop}) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == text[: text.index(stop)]
    assert final.usage.output_tokens > 0
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=30, temperature=0
    )
    assert chat.choices[0].message.content == text


def test_errors_are_the_clients_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.models.retrieve("gpt-4")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[5] * CONTEXT)
    assert too_long.value.code == "context_length_exceeded"
    assert f"This model's maximum context length is {CONTEXT} tokens." in str(too_long.value)


def test_a_model_is_described_with_its_capabilities(server: Process) -> None:
    card = json.loads(server.request("GET", "/v1/models/tiny")[1])
    assert (card["context_length"], card["loaded"]) == (CONTEXT, True)
    assert "completion" in card["capabilities"]


def test_models_are_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve("tiny") == model
    assert model.model_extra["max_model_len"] == CONTEXT


def test_a_prompt_that_repeats_an_earlier_prompt_and_its_answer_is_answered(
    client: openai.OpenAI,
) -> None:
    for length in (31, 32, 33, 63, 64, 65):
        prompt = [5] * length
        asked = {"model": "tiny", "max_tokens": 40, "temperature": 0, "logprobs": 0}
        asked["extra_body"] = {"ignore_eos": True}
        first = client.completions.create(prompt=prompt, **asked)
        assert first.usage.completion_tokens == 40
        again = client.completions.create(prompt=prompt, **asked)
        assert again.choices[0].text == first.choices[0].text


@pytest.mark.slow
def test_an_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt=[5] * (CONTEXT - 3), max_tokens=100, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == CONTEXT


@pytest.mark.slow
def test_the_client_may_stop_reading_a_stream(server: Process, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=2_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert next(iter(stream))
    stream.close()
    server.wait_for_metric("num_requests_running", 0)
