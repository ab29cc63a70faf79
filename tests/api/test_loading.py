"""Loading and unloading by hand, and what is shown of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_server_app
from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.errors import OutOfMemory
from mlxserve.helpers.fair_executor import FairExecutor
from tests.api.fake_chat import HOLD, FakeChat

LOAD, UNLOAD, LIST = "/api/v1/models/load", "/api/v1/models/unload", "/api/v1/models"


def load(name: str) -> Any:
    def make(_room: int) -> Any:
        if name == "broken":
            raise OutOfMemory("broken does not fit.")
        return FakeChat(model_name=name, script=[HOLD] if name == "slow" else None)

    return make


@pytest.fixture
def registry() -> ModelRegistry:
    models = [
        RegisteredModel(name=name, load=load(name), aliases=(f"{name}-alias",), weight_size=9)
        for name in ("first", "slow", "broken")
    ]
    registry = ModelRegistry(models)
    asyncio.run(registry.preload())
    return registry


def client_of(registry: ModelRegistry, access: AccessPolicy | None = None) -> TestClient:
    app = create_server_app(registry, FairExecutor(), access=access)
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.fixture
def client(registry: ModelRegistry) -> Iterator[TestClient]:
    with client_of(registry) as client:
        yield client


def states(client: TestClient) -> dict[str, str]:
    return {one["id"]: one["state"] for one in client.get(LIST).json()["data"]}


def test_a_model_is_loaded_and_unloaded_by_any_of_its_names(client: TestClient) -> None:
    card = client.post(LOAD, json={"model": "slow-alias"}).json()
    assert (card["id"], card["state"], card["num_requests"]) == ("slow", "loaded", 0)
    assert states(client) == {"first": "loaded", "slow": "loaded", "broken": "unloaded"}
    assert client.post(UNLOAD, json={"model": "slow"}).json()["state"] == "unloaded"
    assert client.post(UNLOAD, json={"model": "slow"}).status_code == 200  # it is already


def test_loading_says_how_long_a_model_stays(client: TestClient) -> None:
    assert client.post(LOAD, json={"model": "first"}).json()["unloads_in_seconds"] is None
    card = client.post(LOAD, json={"model": "first", "keep_alive": "5m"}).json()
    assert 200 < card["unloads_in_seconds"] <= 300
    card = client.post(LOAD, json={"model": "first", "keep_alive": -1}).json()
    assert card["unloads_in_seconds"] is None


def test_a_pinned_model_stays_until_it_is_unpinned_or_unloaded(client: TestClient) -> None:
    client.post(LOAD, json={"model": "first", "keep_alive": "5m"})
    card = client.post(LOAD, json={"model": "first", "pinned": True}).json()
    assert (card["pinned"], card["unloads_in_seconds"]) == (True, None)
    asked = {"model": "first", "messages": [], "keep_alive": 0}
    kept = client.post("/api/chat", json=asked)
    assert "it is pinned" in kept.headers["x-mlxserve-warning"]
    card = client.post(LOAD, json={"model": "first", "pinned": False}).json()
    assert not card["pinned"]
    assert 200 < card["unloads_in_seconds"] <= 300, "how long it stays is as before"
    client.post(LOAD, json={"model": "first", "pinned": True})
    assert client.post(UNLOAD, json={"model": "first"}).json()["pinned"] is False


def test_what_cannot_be_done_is_refused_with_a_reason(client: TestClient) -> None:
    for path, body, status, code in [
        (LOAD, {"model": "other"}, 404, "model_not_found"),
        (UNLOAD, {"model": "other"}, 404, "model_not_found"),
        (LOAD, {}, 400, "missing_required_parameter"),
        (LOAD, {"model": "first", "keep_alive": "soon"}, 400, "invalid_value"),
        (LOAD, {"model": "broken"}, 503, "out_of_memory"),
        (UNLOAD, {"model": "first", "force": "yes"}, 400, "invalid_value"),
    ]:
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), path


def test_a_model_that_answers_is_unloaded_by_force_only(
    client: TestClient, registry: ModelRegistry
) -> None:
    body = {"model": "slow", "prompt": "a", "stream": True}
    client.post(LOAD, json={"model": "slow"})
    chat: Any = registry.loaded("slow")
    reply: list[Any] = []
    asked = threading.Thread(target=lambda: reply.append(client.post("/v1/completions", json=body)))
    asked.start()
    assert chat.on_hold.wait(60)
    refused = client.post(UNLOAD, json={"model": "slow"})
    assert refused.status_code == 409
    assert "slow is in use by 1 request." in refused.json()["error"]["message"]
    assert client.post(UNLOAD, json={"model": "slow", "force": True}).status_code == 200
    asked.join(60)
    assert "engine has stopped" in reply[0].text


def test_any_number_of_loads_and_unloads_at_once_end_in_a_state_that_answers(
    client: TestClient,
) -> None:
    bodies = [{"model": name} for name in ("first", "slow", "first-alias")]
    paths = [(LOAD, UNLOAD)[number % 2] for number in range(60)]
    with ThreadPoolExecutor(20) as threads:
        replies = [
            threads.submit(client.post, path, json=bodies[number % 3])
            for number, path in enumerate(paths)
        ]
        found = {reply.result(60).status_code for reply in replies}
    assert found == {200}
    assert client.post(LOAD, json={"model": "first"}).json()["state"] == "loaded"
    asked = client.post("/v1/completions", json={"model": "first", "prompt": "a"})
    assert asked.status_code == 200, asked.text


def test_users_neither_load_nor_see_what_is_loaded(registry: ModelRegistry, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = {
        scope: {"authorization": f"Bearer {file.create(scope.value, scope)}"} for scope in Scope
    }
    with client_of(registry, AccessPolicy(keys_file=file.path)) as client:
        for path in (LOAD, UNLOAD):
            reply = client.post(path, json={"model": "first"}, headers=keys[Scope.USER])
            assert reply.status_code == 403
        assert client.get(LIST, headers=keys[Scope.USER]).status_code == 403
        assert client.get(LIST, headers=keys[Scope.ADMIN]).status_code == 200
        assert client.post(LOAD, json={"model": "slow"}, headers=keys[Scope.ADMIN]).is_success
