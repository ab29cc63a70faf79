"""No request stops a server process, and every client that leaves frees its pages."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest

from tests.api.server.process import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MAX_RUNNING,
    MAX_WAITING,
    Process,
    send_endless_request,
)

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
    (COMPLETIONS, {"prompt": "x", "max_tokens": -2}, 400),
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
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}', 200),
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


def test_clients_that_leave_the_queue_make_room_and_a_full_queue_is_a_503(server: Process) -> None:
    server.wait_for_metric("num_requests_running", 0)
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(send_endless_request(server, stream=True))
            for _ in range(MAX_RUNNING)
        ]
        server.wait_for_metric("num_requests_running", MAX_RUNNING)
        waiting = [
            stack.enter_context(send_endless_request(server, stream=False))
            for _ in range(MAX_WAITING)
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
    peers = [send_endless_request(server, stream=stream) for _ in range(MAX_RUNNING)]
    server.wait_for_metric("num_requests_running", MAX_RUNNING)
    for peer in peers:
        peer.close()
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_logs_escape_text_from_clients(server: Process) -> None:
    server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1, "x\x1b[31m\ny": 1})
    server.request("GET", "/a%0Ab%1B")
    log = server.log.read_text()
    assert "x\\x1b[31m\\ny" in log
    assert "\x1b" not in log
