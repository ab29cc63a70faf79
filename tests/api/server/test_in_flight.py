"""Requests of a key that is revoked, on a running server."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.text.deltas import Delta
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import Running, StartServer

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


@pytest.fixture
def server(start_server: StartServer, keys: KeyFile, chat: FakeChat) -> Iterator[Running]:
    keys.create("other", Scope.USER)
    chat.script = [Delta("Hel", (1,), ()), HOLD]
    return start_server(access=AccessPolicy(keys_file=keys.path))


@pytest.mark.parametrize("path", BODIES)
def test_an_open_stream_of_a_revoked_key_ends_soon_with_an_error(
    server: Running, keys: KeyFile, chat: FakeChat, path: str
) -> None:
    key = {"authorization": f"Bearer {keys.create('alice', Scope.USER)}"}
    body = {**BODIES[path], "stream": True}
    with httpx.stream("POST", server.url + path, json=body, headers=key, timeout=60) as reply:
        assert chat.on_hold.wait(timeout=60)
        keys.revoke("alice")
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"] == "The API key of this request was revoked."
    if path == "/v1/messages":
        assert (last["type"], error["type"]) == ("error", "authentication_error")
    assert "Hel" in "".join(lines)
    chat.wait_until_closed()


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
def test_a_whole_reply_to_a_revoked_key_is_a_401(
    server: Running, keys: KeyFile, chat: FakeChat, path: str
) -> None:
    key = {"authorization": f"Bearer {keys.create('alice', Scope.USER)}"}
    replies: queue.Queue[httpx.Response] = queue.Queue()
    body = BODIES.get(path, {"input": "x"})

    def ask() -> None:
        replies.put(httpx.post(server.url + path, json=body, headers=key, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    assert chat.on_hold.wait(timeout=60)
    keys.revoke("alice")
    reply = replies.get(timeout=60)
    thread.join()
    assert reply.status_code == 401
    assert "was revoked" in reply.json()["error"]["message"]


def test_a_request_that_is_still_read_when_its_key_is_revoked_is_a_401(
    server: Running, keys: KeyFile, chat: FakeChat
) -> None:
    key = keys.create("alice", Scope.USER)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n"
    head += f"content-type: application/json\r\nauthorization: Bearer {key}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        peer.sendall(head.encode())
        with httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
            assert client.get(f"{server.url}/v1/models").status_code == 200
        keys.revoke("alice")
        assert peer.recv(4_096).startswith(b"HTTP/1.1 401 ")
    assert chat.submitted == []


def test_the_streams_of_other_keys_and_a_damaged_key_file_go_on(
    server: Running, keys: KeyFile, chat: FakeChat
) -> None:
    chat.script = [HOLD]
    keys.create("alice", Scope.USER)
    key = {"authorization": f"Bearer {keys.create('bob', Scope.USER)}"}
    body = {"prompt": "x", "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=key, timeout=60) as reply:
        assert chat.on_hold.wait(timeout=60)
        keys.revoke("alice")
        text = keys.path.read_text()
        keys.path.write_text("{")
        while httpx.get(f"{server.url}/v1/models", headers=key, timeout=60).status_code != 401:
            pass
        keys.path.write_text(text)
        while httpx.get(f"{server.url}/v1/models", headers=key, timeout=60).status_code != 200:
            pass
        chat.release()
        assert "error" not in reply.read().decode()


def test_the_page_map_of_a_revoked_key_ends(server: Running, keys: KeyFile) -> None:
    key = {"authorization": f"Bearer {keys.create('alice', Scope.ADMIN)}"}
    with httpx.stream("GET", f"{server.url}/api/v1/kv/map", headers=key, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: snapshot"
        keys.revoke("alice")
        rest = list(lines)
    assert "event: error" in rest
    assert "was revoked" in "".join(rest)


def test_a_prefix_that_was_computed_for_a_key_revoked_meanwhile_is_not_kept(
    server: Running, keys: KeyFile, chat: FakeChat
) -> None:
    key = {"authorization": f"Bearer {keys.create('alice', Scope.USER)}"}
    chat.holds_prefixes = True
    replies: queue.Queue[httpx.Response] = queue.Queue()

    def put() -> None:
        url = f"{server.url}/v1/prefixes/rules"
        replies.put(httpx.put(url, json={"prompt": "x"}, headers=key, timeout=60))

    thread = threading.Thread(target=put)
    thread.start()
    assert chat.on_hold.wait(timeout=60)
    keys.revoke("alice")
    while httpx.get(f"{server.url}/v1/models", headers=key, timeout=60).status_code != 401:
        pass
    chat.release()
    assert replies.get(timeout=60).status_code == 401
    thread.join()
    assert chat.named == {}
