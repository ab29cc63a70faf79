from __future__ import annotations

import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mlxserve.api.bodies.json_body import MAX_BODY_SIZE
from mlxserve.core.errors import EngineStopped, MlxServeError, OutOfMemory, PromptTooLong, QueueFull
from mlxserve.text.deltas import Delta
from mlxserve.text.tokenizer import Tokenizer
from tests.api.anthropic.requests import COUNT, HELLO, MESSAGES, USER, error_of, post
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import StartServer


def test_a_header_of_many_betas_is_a_short_line_of_the_log(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    many = ",".join(f"{number}-beta" for number in range(5_000))
    for betas in (many, "other-2027"):
        assert post(client, headers={"anthropic-beta": betas}).status_code == 200
    logged = [r.getMessage() for r in caplog.records if "beta" in r.getMessage()]
    assert [len(text) < 300 for text in logged] == [True, True]
    assert logged[1].endswith("the beta other-2027"), "later ones are logged as well"


def test_unknown_betas_are_tolerated(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2026,b-2027"}
    for _ in range(2):
        assert post(client, headers=headers).status_code == 200
    assert [r.getMessage() for r in caplog.records if "beta" in r.getMessage()] == [
        "Request fields without effect: the beta a-2026, the beta b-2027"
    ]


@pytest.mark.parametrize("version", ["2023-01-01", "latest", "2026-10-21\u00e9"])
def test_an_invalid_api_version_is_refused(client: TestClient, version: str) -> None:
    reply = post(client, headers={"anthropic-version": version.encode("latin-1")})
    assert "anthropic-version" in error_of(reply, 400, "invalid_request_error")["message"]


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "2031-01-01"])
def test_every_api_version_since_the_first_is_accepted(client: TestClient, version: str) -> None:
    assert post(client, headers={"anthropic-version": version}).status_code == 200


@pytest.mark.parametrize("name", ["fake", "default", "claude-opus-4-5", "claude-3-haiku-20240307"])
def test_a_claude_name_means_the_served_model(client: TestClient, name: str) -> None:
    assert post(client, model=name).json()["model"] == "fake"
    assert post(client, COUNT, model=name).status_code == 200


def test_claude_names_are_only_known_to_anthropics_routes(strict_client: TestClient) -> None:
    assert post(strict_client, model="claude-opus-4-5").status_code == 200
    reply = strict_client.post(
        "/v1/chat/completions", json={"model": "claude-opus-4-5", "messages": [USER]}
    )
    assert reply.status_code == 404


# Counting.

words = ["a", " word", "é", "\n", "<|im_start|>", "x" * 30]
text = st.lists(st.sampled_from(words), max_size=6).map("".join)
turns = st.lists(st.tuples(text, text), max_size=3)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(system=text, turns=turns, last=text)
def test_count_tokens_equals_the_messages_input_tokens(
    client: TestClient,
    chat: FakeChat,
    tokenizer: Tokenizer,
    system: str,
    turns: list[tuple[str, str]],
    last: str,
) -> None:
    chat.render = tokenizer.render
    messages = [
        message
        for question, answer in turns
        for message in (
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        )
    ]
    fields = {"system": system, "messages": [*messages, {"role": "user", "content": last}]}
    counted = post(client, COUNT, **fields).json()["input_tokens"]
    usage = post(client, **fields).json()["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted == sum(usage[name] for name in names)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("The queue is full."), 529, "overloaded_error"),
        (EngineStopped("The engine has stopped."), 529, "overloaded_error"),
        (OutOfMemory("It does not fit."), 529, "overloaded_error"),
        (
            PromptTooLong("It is too long.", num_tokens=9, max_model_len=5),
            400,
            "invalid_request_error",
        ),
    ],
)
def test_each_error_of_the_engine_has_anthropics_type(
    client: TestClient, chat: FakeChat, error: MlxServeError, status: int, kind: str
) -> None:
    chat.submit_error = error
    assert error_of(post(client), status, kind)["message"].endswith(str(error))


def test_errors_of_every_kind_have_anthropics_format(
    client: TestClient, strict_client: TestClient
) -> None:
    error_of(post(strict_client, model="gpt-4"), 404, "not_found_error")
    error_of(client.get(MESSAGES), 405, "invalid_request_error")
    error_of(client.post(f"{MESSAGES}/batches"), 404, "not_found_error")
    error_of(client.post(MESSAGES, content=b"{}"), 415, "invalid_request_error")
    headers = {"content-type": "application/json"}
    error_of(client.post(MESSAGES, content=b"{", headers=headers), 400, "invalid_request_error")
    headers["content-length"] = str(MAX_BODY_SIZE + 1)
    error_of(client.post(MESSAGES, content=b"{}", headers=headers), 413, "request_too_large")
    error_of(post(client, headers={"host": "evil.example"}), 403, "permission_error")
    error_of(post(client, headers={"origin": "https://evil"}), 403, "permission_error")


def test_anthropics_clients_get_their_errors_on_other_routes_too(client: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    error_of(client.get("/v1/models/gpt-4", headers=headers), 404, "not_found_error")


def test_a_bug_is_a_500_in_anthropics_format(client: TestClient, chat: FakeChat) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("secret detail")

    chat.render = fail
    assert "secret" not in error_of(post(client), 500, "api_error")["message"]


# Leaving.


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_aborts_its_message(
    start_server: StartServer, chat: FakeChat, stream: bool
) -> None:
    chat.script = [Delta("a"), HOLD]
    data = json.dumps({**HELLO, "stream": stream}).encode()
    head = f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", start_server().port), timeout=20) as peer:
        peer.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        assert chat.on_hold.wait(timeout=20)
    chat.wait_until_closed()
