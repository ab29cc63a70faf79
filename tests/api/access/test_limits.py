from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.keys import Key, KeyFile, Scope
from mlxserve.api.access.limits import KeyLimits
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.errors import ApiError
from tests.api.fake_chat import FakeChat

KEY = Key.from_secret("secret", Scope.USER)
OTHER = Key.from_secret("another", Scope.USER)


def test_the_concurrent_answers_of_a_key_are_limited() -> None:
    limits = KeyLimits(max_requests=2)
    first, _second = limits.enter(KEY), limits.enter(KEY)
    with pytest.raises(ApiError) as refused:
        limits.enter(KEY)
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
    limits.enter(OTHER)
    first.close()
    limits.enter(KEY)


def test_every_answer_of_a_request_counts_against_the_limit() -> None:
    limits = KeyLimits(max_requests=4)
    lease = limits.enter(KEY)
    lease.take(3)
    with pytest.raises(ApiError):
        lease.take(1)
    lease.close()
    lease.close()
    assert limits.enter(KEY).take(3) is None


def test_the_requests_per_minute_refill_evenly() -> None:
    now = [100.0]
    limits = KeyLimits(requests_per_minute=3, clock=lambda: now[0])
    for _ in range(3):
        limits.enter(KEY).close()
    with pytest.raises(ApiError) as refused:
        limits.enter(KEY)
    assert refused.value.status == 429
    assert refused.value.headers == {"retry-after": "20", "retry-after-ms": "20000"}
    now[0] += 20
    limits.enter(KEY).close()
    now[0] += 3_600
    for _ in range(3):
        limits.enter(KEY).close()
    with pytest.raises(ApiError):
        limits.enter(KEY)


def test_a_refused_request_counts_nothing() -> None:
    limits = KeyLimits(max_requests=1, requests_per_minute=1, clock=lambda: 0.0)
    limits.enter(KEY).close()
    for _ in range(3):
        with pytest.raises(ApiError) as refused:
            limits.enter(KEY)
        assert refused.value.code == "rate_limit_exceeded"


def test_a_keys_own_limits_override_the_servers() -> None:
    own = Key(name="own", sha256="0" * 64, max_requests=2)
    limits = KeyLimits(max_requests=1)
    leases = [limits.enter(own), limits.enter(own)]
    with pytest.raises(ApiError):
        limits.enter(own)
    assert len(leases) == 2


def test_a_limit_is_a_429_with_retry_headers(chat: FakeChat, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    headers = {"authorization": f"Bearer {file.create('small', Scope.USER, requests_per_minute=2)}"}
    app = create_app(chat, access=AccessPolicy(keys_file=file.path, max_requests_per_key=4))
    client = TestClient(app, base_url="http://127.0.0.1")

    def ask(**body: Any) -> httpx2.Response:
        return client.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)

    too_wide = ask(prompt=["x"] * 5)
    assert (too_wide.status_code, too_wide.json()["error"]["code"]) == (429, "too_many_requests")
    assert chat.submitted == []
    assert ask(n=4).status_code == 200
    too_often = ask()
    assert too_often.status_code == 429
    assert too_often.json()["error"]["type"] == "rate_limit_error"
    assert int(too_often.headers["retry-after"]) in range(25, 31)
    assert client.get("/v1/models", headers=headers).status_code == 200  # reading is free


def test_without_keys_there_are_no_limits(chat: FakeChat) -> None:
    app = create_app(chat, access=AccessPolicy(max_requests_per_key=1))
    client = TestClient(app, base_url="http://127.0.0.1")
    assert client.post("/v1/completions", json={"prompt": ["x"] * 5}).status_code == 200


def test_what_gives_the_engine_nothing_to_do_is_not_limited(chat: FakeChat) -> None:
    access = AccessPolicy(api_keys=["key"], requests_per_minute_per_key=1)
    app = create_app(chat, access=access)  # type: ignore[arg-type]
    headers = {"authorization": "Bearer key"}
    with TestClient(app, base_url="http://127.0.0.1:8000", headers=headers) as client:
        for _ in range(3):
            assert client.post("/api/v1/render", json={"texts": ["a"]}).status_code == 200
