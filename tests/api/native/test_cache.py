"""Changes of the cache, which only an admin key may make."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.errors import (
    EngineStopped,
    MlxServeError,
    OutOfMemory,
    PrefixQuotaExceeded,
    QueueFull,
)
from tests.api.fake_chat import FakeChat

RESIZE = "/api/v1/cache/resize"


@pytest.fixture
def keyed(chat: FakeChat) -> TestClient:
    app = create_app(chat, access=AccessPolicy(api_keys=["a-key"]))
    return TestClient(app, base_url="http://127.0.0.1")


def test_the_cache_is_reset_unless_requests_run(client: TestClient, chat: FakeChat) -> None:
    assert client.post("/api/v1/cache/reset").json() == {"status": "ok"}
    chat.answers.append(type("Open", (), {"is_closed": False}))
    reply = client.post("/api/v1/cache/reset")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "busy")
    assert client.post("/api/v1/cache/reset?force=true").json() == {"status": "ok"}
    assert not chat.are_files_deleted
    assert client.post("/api/v1/cache/reset?force=true&disk=true").json() == {"status": "ok"}
    assert chat.are_files_deleted
    for name in ("force", "disk"):
        refused = client.post(f"/api/v1/cache/reset?{name}=1")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_resize_reports_the_new_cache(client: TestClient) -> None:
    assert client.post(RESIZE, json={"num_pages": 64}).json() == {
        "num_pages": 64,
        "max_model_len": 1_024,
        "preempted_requests": 1,
        "forgotten_pages": 2,
    }


def test_an_invalid_number_of_pages_is_refused(client: TestClient) -> None:
    for num_pages in [1, 0, -5, 2.5, "64", True, None, 10**30, [64]]:
        reply = client.post(RESIZE, json={"num_pages": num_pages})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (
            400,
            "num_pages",
            "invalid_value",
        ), num_pages


def test_a_resize_needs_a_number(client: TestClient) -> None:
    reply = client.post(RESIZE, json={})
    assert reply.json()["error"]["code"] == "missing_required_parameter"
    assert client.post(RESIZE).status_code == 415


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("7 pages would leave 28 tokens"), 409, "busy"),
        (PrefixQuotaExceeded("named prefixes have 5 pages"), 409, "prefix_quota_exceeded"),
        (OutOfMemory("900 pages take 9 GiB"), 409, "out_of_memory"),
        (EngineStopped("The engine was closed."), 503, "engine_stopped"),
    ],
)
def test_a_failed_resize_says_why(
    client: TestClient, chat: FakeChat, error: MlxServeError, status: int, code: str
) -> None:
    chat.submit_error = error
    reply = client.post(RESIZE, json={"num_pages": 7})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"]["message"] == str(error)


@pytest.mark.parametrize("path", ["/api/v1/cache/reset", RESIZE])
def test_only_an_admin_may_change_the_cache(keyed: TestClient, path: str) -> None:
    headers = {"authorization": "Bearer a-key"}
    reply = keyed.post(path, headers=headers, json={"num_pages": 64})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_required")
