from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.bodies.json_body import MAX_BODY_SIZE
from mlxserve.api.native.schema import DetokenizeRequest, TokenizeRequest
from mlxserve.api.openai.schema import ChatRequest, CompletionRequest
from mlxserve.api.responses.schema import ResponsesRequest
from mlxserve.core.version import __version__
from tests.api.fake_chat import FakeChat
from tests.api.smallest_bodies import ENDLESS

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def error_of(reply: httpx2.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_health_follows_the_engine(client: TestClient, chat: FakeChat) -> None:
    health = client.get("/health").json()
    assert health.pop("event_loop").keys() == {
        "blocked_seconds",
        "longest_route",
        "longest_seconds",
    }
    assert health == {
        "status": "ok",
        "seconds_since_step": 0.0,
        "engine_failures": 0,
        "memory": "normal",
        "disk_cache": "works",
    }
    chat.alive = False
    reply = client.get("/health")
    assert reply.status_code == 503
    assert error_of(reply)["code"] == "engine_stopped"


def test_ready_reports_running_and_waiting_requests(client: TestClient, chat: FakeChat) -> None:
    reply = client.get("/ready")
    assert reply.json() == {
        "status": "ready",
        "model": "fake",
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.25,
        "seconds_since_step": 0.0,
    }
    chat.silence = 31.4
    stalled = client.get("/ready")
    assert (stalled.status_code, error_of(stalled)["code"]) == (503, "engine_stalled")
    health = client.get("/health")  # it may come back
    assert (health.status_code, health.json()["status"]) == (200, "stalled")
    chat.alive = False
    assert error_of(client.get("/ready"))["code"] == "engine_stopped"


def test_the_version_is_reported(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}


def test_an_unknown_route_is_a_404_in_openais_format(client: TestClient) -> None:
    for path in ["/v1", "/v1/chat", "/v1/v2/chat/completions", "/docs", "/index.html"]:
        reply = client.get(path, follow_redirects=False)
        assert reply.status_code == 404, path
        assert error_of(reply)["code"] == "unknown_url", path


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "/v1/v1/chat/completions",
        "/v1//chat/completions",
        f"{CHAT}/",
        "/v1/chat//completions",
    ],
)
def test_a_path_of_a_wrong_base_url_is_answered(client: TestClient, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert client.post(path, json=body).json()["object"] == "chat.completion"
    assert error_of(client.get("/nothing"))["message"] == "There is no GET /nothing."


def test_the_models_are_listed_at_every_base_url(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    for path in ("/models", "/models/", "/v1/models/", "/v1/v1/models", "/v1//models"):
        assert client.get(path).json() == listed, path
    card = client.get("/v1/models/fake").json()
    assert client.get("/models/fake/").json() == card
    for path in ("/v1/api/tags", "/api/tags/", "/api//tags"):
        assert "models" in client.get(path).json(), path


def test_a_path_is_canonical_before_it_is_checked() -> None:
    """Errors are in the dialect of the route that is meant, and its key is required."""
    app = create_app(FakeChat(), access=AccessPolicy(api_keys=["k"]))  # type: ignore[arg-type]
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    for path in ("/messages", "/v1/v1/messages", "/v1/messages/"):
        assert client.post(path, json={}).json()["type"] == "error", path
    assert client.get("/health/").status_code == 200
    for path in ("/models", "/v1/models/", "/v1//models"):
        assert client.get(path).status_code == 401, path


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/v1/prefixes/x"), ("POST", "/health")],
)
def test_a_wrong_method_is_a_405_that_lists_the_allowed_ones(
    client: TestClient, method: str, path: str
) -> None:
    reply = client.request(method, path)
    assert reply.status_code == 405
    assert reply.headers["allow"]
    assert error_of(reply)["code"] == "method_not_allowed"


def test_only_plain_json_is_accepted(client: TestClient) -> None:
    for headers in [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ]:
        reply = client.post(CHAT, content=b"{}", headers=headers)
        assert reply.status_code == 415, headers
        error_of(reply)


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=UTF-8", "application/json;"]
)
def test_every_spelling_of_the_json_content_type_is_accepted(
    client: TestClient, content_type: str
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    reply = client.post(CHAT, content=body, headers={"content-type": content_type})
    assert reply.status_code == 200


def test_broken_json_is_a_400_in_openais_format(client: TestClient) -> None:
    for raw in [b"", b"{", b"[" * 100_000, b'{"a": NaN}', b"\xff\xfe", b"[]"]:
        reply = client.post(CHAT, content=raw, headers=JSON)
        assert reply.status_code == 400, raw
        assert error_of(reply)["code"] == "invalid_json", raw


def test_an_oversized_body_is_refused_by_its_declared_size(client: TestClient) -> None:
    reply = client.post(
        CHAT, content=b"{}", headers={**JSON, "content-length": str(MAX_BODY_SIZE + 1)}
    )
    assert reply.status_code == 413
    assert error_of(reply)["code"] == "request_too_large"


def test_an_oversized_body_is_refused_by_its_real_size(client: TestClient) -> None:
    piece = b" " * 2**20

    def pieces() -> Iterator[bytes]:
        for _ in range(MAX_BODY_SIZE // len(piece) + 1):
            yield piece

    reply = client.post(CHAT, content=pieces(), headers=JSON)
    assert reply.status_code == 413


def test_a_large_body_within_the_limit_is_parsed(client: TestClient) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "user": "y" * 2**20})
    assert client.post(CHAT, content=body, headers=JSON).status_code == 200


def test_a_million_messages_are_refused(client: TestClient) -> None:
    body = b'{"messages": [' + b",".join([b'{"role":"user","content":"x"}'] * 1_000_000) + b"]}"
    assert len(body) < MAX_BODY_SIZE
    reply = client.post(CHAT, content=body, headers=JSON)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "messages"


def test_a_bug_is_a_500_that_reveals_no_internals(client: TestClient, chat: FakeChat) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("secret detail")

    chat.render = fail
    reply = client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
    assert reply.status_code == 500
    assert error_of(reply)["code"] == "internal_error"
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"]
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_no_reply_of_any_route_is_sniffed(chat: FakeChat) -> None:
    """Whatever its status: replies, refusals, errors and preflights."""
    app = create_app(chat, access=AccessPolicy(api_keys=["a-key"], origins=["https://a.example"]))
    client = TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)
    statuses = set()
    for headers in (
        {"authorization": "Bearer a-key"},
        {"host": "evil.com"},
        {"origin": "https://evil.com"},
        {"origin": "https://a.example", "access-control-request-method": "POST"},
        {},
    ):
        for route in app.routes:
            assert isinstance(route, Route)
            # The reply to GET may not end.
            read = "HEAD" if route.path in ENDLESS else "GET"
            for method in (read, "POST", "DELETE", "OPTIONS"):
                reply = client.request(method, route.path, headers=headers)
                assert reply.headers["x-content-type-options"] == "nosniff", (method, route.path)
                statuses.add(reply.status_code)
    assert {200, 204, 400, 401, 403, 404, 405} <= statuses


def test_every_reply_has_its_own_id(client: TestClient) -> None:
    replies = [client.get("/health"), client.get("/nowhere"), client.get("/health")]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 3


# Whatever is sent.

MODELS = {
    CHAT: (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", "text", "type", "function", 0, 1, -1, [], {}])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "include_usage"]) | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
every_example = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(MODELS)))
    model, valid = MODELS[path]
    names = sorted({*model.model_fields, *model.NOT_YET})
    changes = draw(st.dictionaries(st.sampled_from(names) | st.text(), values, max_size=4))
    return path, {**valid, **changes}


@every_example
@given(asked=requests())
def test_every_json_object_gets_an_answer_or_a_well_formed_refusal(
    client: TestClient, asked: tuple[str, dict[str, Any]]
) -> None:
    path, body = asked
    reply = client.post(path, json=body)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert error_of(reply)["type"] == "invalid_request_error"


@every_example
@given(path=st.sampled_from(sorted(MODELS)), raw=st.binary(max_size=60) | st.text().map(str.encode))
def test_every_other_body_gets_a_well_formed_refusal(
    client: TestClient, path: str, raw: bytes
) -> None:
    reply = client.post(path, content=raw, headers=JSON)
    assert reply.status_code == 400
    error_of(reply)


@every_example
@given(path=st.text(max_size=40), method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]))
def test_every_unknown_path_gets_a_well_formed_refusal(
    client: TestClient, path: str, method: str
) -> None:
    reply = client.request(method, "/v2/" + quote(path, safe="/"))
    assert reply.status_code == 404
    error_of(reply)
