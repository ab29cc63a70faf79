"""The installed command with a real engine, spoken to by the official client and by hand."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxserve.api.access.keys import KeyFile
from mlxserve.api.access.keys import Scope as KeyScope

ROOT = Path(__file__).parents[3]
CONTEXT = 2_500
MAX_RUNNING, MAX_WAITING = 4, 16
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@dataclass
class Process:
    """`mlxserve serve` as a child process, ready to be asked."""

    popen: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(
            method, path, data, {"content-type": "application/json", **(headers or {})}
        )
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    def metric(self, name: str) -> float:
        _, text = self.request("GET", "/metrics")
        found = re.search(rf"^mlxserve:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 30
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is still {self.metric(name)}"

    def stop(self) -> tuple[int, str]:
        """The exit code, and what was written to stdout after the first line."""
        self.popen.send_signal(signal.SIGTERM)
        rest, _ = self.popen.communicate(timeout=60)
        return self.popen.returncode, rest


Start = Callable[..., contextlib.AbstractContextManager[Process]]


@pytest.fixture(scope="session")
def start(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    model = write_model(tmp_path_factory.mktemp("served"), "qwen3", max_position_embeddings=CONTEXT)

    @contextlib.contextmanager
    def start_process(
        *flags: str, env: dict[str, str] | None = None, **kwargs: Any
    ) -> Iterator[Process]:
        log = tmp_path_factory.mktemp("log") / "stderr"
        command = [sys.executable, "-m", "mlxserve", "serve", "--model", str(model)]
        command += ["--port", "0", "--num-pages", "1000", "--alias", "tiny", *flags]
        with log.open("w") as stderr:
            popen = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(env or {})},
                **kwargs,
            )
        assert popen.stdout is not None
        try:
            line = popen.stdout.readline()
            ready = re.fullmatch(r"mlxserve is ready at (http://\S+:[0-9]+)\n", line)
            assert ready, (line, log.read_text())
            yield Process(popen, ready[1], log)
        finally:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
            popen.stdout.close()

    return start_process


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Process]:
    """One server for the tests of this file; at its end nothing runs and it stops in order."""
    sizes = ("--max-num-seqs", str(MAX_RUNNING), "--max-num-waiting", str(MAX_WAITING))
    with start(*sizes) as process:
        yield process
        process.wait_for_metric("num_requests_running", 0)
        assert process.metric("kv_cache_usage_perc") == 0
        assert process.stop() == (0, "")
        assert "Traceback" not in process.log.read_text()


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# The official client.


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
    assert json.loads(added[1]) == {"id": "rules", "object": "prefix", "num_tokens": 100}
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
    assert (status, json.loads(body)["error"]["code"]) == (503, "out_of_memory")
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
        peer = stack.enter_context(ask_for_ever(server, stream=True))
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
        "num_tokens": 64,
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
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[5] * CONTEXT)
    assert too_long.value.code == "context_length_exceeded"


def test_a_model_is_described_with_its_capabilities(server: Process) -> None:
    card = json.loads(server.request("GET", "/v1/models/tiny")[1])
    assert (card["context_length"], card["loaded"]) == (CONTEXT, True)
    assert "completion" in card["capabilities"]


def test_models_are_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve("tiny") == model
    assert model.model_extra["max_model_len"] == CONTEXT


# What must not take the engine down.


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ATTACKS: list[tuple[str, Any, int]] = [
    (COMPLETIONS, {"prompt": ""}, 400),
    (COMPLETIONS, {"prompt": []}, 400),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": [[5], [6]], "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, 400),
    (COMPLETIONS, {"prompt": "x", "stop": "\x00", "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "\x00\x00", "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}, 400),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"2147483647": 1}}, 400),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 100}, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": [2_000_000]}, 400),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [2_000_000]}, 400),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}, 400),
    (COMPLETIONS, {"prompt": "x", "best_of": 10**9}, 400),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**12}, 400),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 400),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
    (COMPLETIONS, b'{"prompt": "x", "temperature": 1e400}', 400),
    (COMPLETIONS, {"prompt": "x", "temperature": 1e-30, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "temperature": 100, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "top_p": 1e-30, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "min_p": 1, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "top_k": 10**9, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "top_k": 10**30, "max_tokens": 2}, 400),
    (COMPLETIONS, {"prompt": "x", "seed": 2**80}, 400),
    (COMPLETIONS, {"prompt": "x", "seed": -(2**63), "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64 - 1, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "priority": -(2**31), "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 100, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": -100, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "logprobs": 20, "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "\u0000\ud83d\ude00", "max_tokens": 2}, 200),
    (COMPLETIONS, {"prompt": "\ufffe\uffff\U0010ffff", "max_tokens": 2}, 200),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (CHAT, b'{"messages": [' + b'{"role":"user","content":"x"},' * 999_999 + b"{}]}", 400),
    (CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 100_000}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}], "max_tokens": 2}, 200),
    (CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}, 200),
    (CHAT, {"messages": [{"role": "assistant", "content": "x"}], "max_tokens": 2}, 200),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400),
    (CHAT, {"messages": HELLO, "chat_template": "{{ 'x' * 10**9 }}", "max_tokens": 2}, 200),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status"),
    ATTACKS,
    ids=[f"{n}-{str(a[1])[:50]!a}" for n, a in enumerate(ATTACKS)],
)
def test_no_request_stops_the_engine(server: Process, path: str, body: bytes, status: int) -> None:
    got, text = server.request("POST", path, body)
    assert got == status, text
    if got != 200:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert server.request("GET", "/health")[0] == 200


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


def test_an_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt=[5] * (CONTEXT - 3), max_tokens=100, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == CONTEXT


# Leaving.


def ask_for_ever(server: Process, *, stream: bool, key: str = "none") -> socket.socket:
    body = json.dumps(
        {"messages": HELLO, "max_tokens": CONTEXT - 500, "ignore_eos": True, "stream": stream}
    ).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    peer.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
    )
    return peer


def test_clients_that_leave_the_queue_make_room_and_a_full_queue_is_a_503(server: Process) -> None:
    server.wait_for_metric("num_requests_running", 0)
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(ask_for_ever(server, stream=True)) for _ in range(MAX_RUNNING)
        ]
        server.wait_for_metric("num_requests_running", MAX_RUNNING)
        waiting = [
            stack.enter_context(ask_for_ever(server, stream=False)) for _ in range(MAX_WAITING)
        ]
        server.wait_for_metric("num_requests_waiting", MAX_WAITING)
        status, text = server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
        assert (status, json.loads(text)["error"]["code"]) == (503, "queue_full")
        for peer in waiting[1:]:
            peer.close()
        server.wait_for_metric("num_requests_waiting", 1)
        assert server.metric("num_requests_running") == MAX_RUNNING
        running[0].close()
        server.wait_for_metric("num_requests_waiting", 0)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_a_client_that_leaves_during_its_prompt_frees_its_pages(server: Process) -> None:
    body = json.dumps({"prompt": list(range(5, 1005)) * 2, "cache_salt": "cold"}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
        peer.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        server.wait_for_metric("num_requests_running", 1)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages(server: Process, stream: bool) -> None:
    server.wait_for_metric("num_requests_running", 0)
    peers = [ask_for_ever(server, stream=stream) for _ in range(MAX_RUNNING)]
    server.wait_for_metric("num_requests_running", MAX_RUNNING)
    for peer in peers:
        peer.close()
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0


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


# The process.


def test_running_answers_end_with_a_readable_error_at_shutdown(
    start: Start,
) -> None:
    with start("--drain-seconds", "0") as process, ask_for_ever(process, stream=True) as peer:
        process.wait_for_metric("num_requests_running", 1)
        process.popen.send_signal(signal.SIGTERM)
        data = b""
        while piece := peer.recv(1_000_000):
            data += piece
        assert b'"error":{"message":' in data[-1_000:]
        assert b"[DONE]" not in data
        process.popen.communicate(timeout=60)
        assert process.popen.returncode == 0
        assert "Traceback" not in process.log.read_text()


def test_a_second_signal_ends_the_server_at_once(start: Start) -> None:
    flags = ("--drain-seconds", "600")
    with start(*flags) as process, ask_for_ever(process, stream=False):
        process.wait_for_metric("num_requests_running", 1)
        process.popen.send_signal(signal.SIGTERM)
        while "Shutting down" not in process.log.read_text():
            assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGTERM)
        process.popen.communicate(timeout=60)
        assert process.popen.returncode == 0


@pytest.mark.parametrize("loops", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_server_killed_under_load_starts_again(start: Start, tmp_path: Path, loops: int) -> None:
    """Killed while answers stream, pages are swapped to disk and keys are made: the next one gives
    the same answer, knows the keys, and has cleaned the swap folder of the dead."""
    keys, swap, draw = KeyFile(tmp_path / "keys.json"), tmp_path / "swap", random.Random(22)
    secret = keys.create("first", KeyScope.ADMIN)
    headers = {"authorization": f"Bearer {secret}"}
    flags = ["--keys-file", str(keys.path), "--num-pages", "200", "--max-model-len", "2400"]
    flags += ["--preemption-mode", "swap", "--swap-dir", str(swap), "--max-num-seqs", "4"]
    question = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    texts = set()
    for loop in range(loops):
        with start(*flags) as process, contextlib.ExitStack() as stack:
            assert len([entry for entry in swap.iterdir() if entry.is_dir()]) == 1
            status, text = process.request("POST", CHAT, question, headers)
            assert status == 200, text
            texts.add(json.loads(text)["choices"][0]["message"]["content"])
            peers = [
                stack.enter_context(ask_for_ever(process, stream=True, key=secret))
                for _ in range(4)
            ]
            keys.create(f"of-{loop}", KeyScope.USER)
            for peer in peers:
                seen, enough = 0, draw.randrange(1, 20_000)
                while seen < enough:
                    seen += len(peer.recv(4_096))
            process.popen.kill()
            assert process.popen.wait(timeout=30) == -signal.SIGKILL
            for peer in peers:
                with contextlib.suppress(ConnectionError):
                    while peer.recv(1_000_000):
                        pass  # every client sees the end
    with start(*flags) as process:
        assert len([entry for entry in swap.iterdir() if entry.is_dir()]) == 1
        status, text = process.request("POST", CHAT, question, headers)
        assert status == 200
        texts.add(json.loads(text)["choices"][0]["message"]["content"])
        assert process.stop() == (0, "")
    assert len(texts) == 1
    assert {key.name for key in keys.read()} == {"first", *(f"of-{loop}" for loop in range(loops))}


def test_the_server_ends_when_its_stdin_does(start: Start) -> None:
    with start("--exit-with-parent", stdin=subprocess.PIPE) as process:
        assert process.request("GET", "/health")[0] == 200
        process.popen.stdin.close()
        assert process.popen.wait(timeout=60) == 0


def test_logs_escape_text_from_clients(server: Process) -> None:
    server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1, "x\x1b[31m\ny": 1})
    server.request("GET", "/a%0Ab%1B")
    log = server.log.read_text()
    assert "x\\x1b[31m\\ny" in log
    assert "\x1b" not in log


def test_a_server_on_every_address_needs_a_key_and_ctrl_c_ends_it(
    start: Start, tmp_path: Path
) -> None:
    keys = ["k" * 32, "q" * 32]
    key_file = tmp_path / "keys"
    key_file.write_text(keys[1])
    key_file.chmod(0o600)
    flags = ("--host", "0.0.0.0", "--api-key-file", str(key_file))
    with start(*flags, env={"MLXSERVE_API_KEY": keys[0]}) as process:
        assert process.request("GET", "/v1/models")[0] == 401
        first, second = ({"authorization": f"Bearer {key}"} for key in keys)
        assert process.request("GET", "/v1/models", headers=first)[0] == 200
        rebound = {**first, "host": "evil.example"}
        assert process.request("GET", "/v1/models", headers=rebound)[0] == 403
        by_address = {**first, "host": "192.168.7.7:8000"}
        assert process.request("GET", "/v1/models", headers=by_address)[0] == 200

        def cached_tokens(headers: dict[str, str]) -> int:
            body = {"prompt": [7] * 100, "max_tokens": 1}
            reply = json.loads(process.request("POST", COMPLETIONS, body, headers)[1])
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached_tokens(first) == 0
        assert cached_tokens(first) > 0
        assert cached_tokens(second) == 0  # nothing of one key is found by another
        assert cached_tokens(second) > 0
        process.popen.send_signal(signal.SIGINT)
        rest, _ = process.popen.communicate(timeout=60)
        assert (process.popen.returncode, rest) == (0, "")
        log = process.log.read_text()
        assert "Traceback" not in log
        assert not any(key in log for key in keys)
