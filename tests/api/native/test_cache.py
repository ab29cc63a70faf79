"""Changes of the cache, which only an admin key may make."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.core.errors import (
    EngineStopped,
    MlxServeError,
    OutOfMemory,
    PrefixQuotaExceeded,
    QueueFull,
)
from tests.api.fake_chat import FakeChat
from tests.api.serving import Serve

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


def test_a_resize_below_the_share_of_a_key_changes_nothing_while_an_answer_streams(
    serve_real: Serve, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    alice, root = (
        {"authorization": f"Bearer {keys.create(name, scope)}"}
        for name, scope in (("alice", Scope.USER), ("root", Scope.ADMIN))
    )
    access = AccessPolicy(keys_file=keys.path, max_prefix_share_per_key=0.25)
    ask = {"prompt": [9] * 40, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with (
        serve_real(access=access) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        rules = {"prompt": [7] * 640}
        assert client.put("/v1/prefixes/rules", json=rules, headers=alice).status_code == 200
        before = client.get("/api/v1/kv/stats", headers=root).json()["pages"]
        with client.stream("POST", "/v1/completions", json=ask, headers=alice) as reply:
            events = reply.iter_lines()
            assert next(events).startswith("data: ")
            refused = httpx.post(
                server.url + RESIZE, json={"num_pages": 100}, headers=root, timeout=60
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                409,
                "prefix_quota_exceeded",
            )
            assert "it may have only 12" in refused.json()["error"]["message"]
            assert [line for line in events if line][-1] == "data: [DONE]"
        after = client.get("/api/v1/kv/stats", headers=root).json()["pages"]
        assert (after["total"], after["pinned"]) == (before["total"], before["pinned"])
        assert client.delete("/v1/prefixes/rules", headers=alice).status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/cache/reset", RESIZE])
def test_only_an_admin_may_change_the_cache(keyed: TestClient, path: str) -> None:
    headers = {"authorization": "Bearer a-key"}
    reply = keyed.post(path, headers=headers, json={"num_pages": 64})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_required")
