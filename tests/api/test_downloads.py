"""`/api/v1/downloads`: a model that suits this machine, downloaded and then served beside the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api import downloads
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_server_app
from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.errors import UnsupportedModel
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.model_choices import Downloaded, Model, ModelCommandFailed, ModelOrigin
from tests.api.fake_chat import FakeChat
from tests.waiting import wait_until

DOWNLOADS = "/api/v1/downloads"
ADMIN, USER = "an-admin-key-0000", "a-user-key-00000"
LARGE = Model(
    "org/large-4bit", ModelOrigin.SUGGESTED, 2_300_000_000, True, 40_000, 8_192, is_recommended=True
)


class Catalog:
    """In the place of ModelCatalog."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.may_end = asyncio.Event()
        self.end: Model | Exception = LARGE

    async def find(self) -> list[Model]:
        return [Model("mlxserve-mini", ModelOrigin.BUNDLED, 6_000_000, True, 4_096, 4_096), LARGE]

    async def download(self, name: str) -> AsyncGenerator[Downloaded | Model, None]:
        yield Downloaded(1_000, 3_000)
        await self.may_end.wait()
        if isinstance(self.end, Exception):
            raise self.end
        yield self.end

    async def use(self, name: str) -> None:
        self.used.append(name)


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    catalog = Catalog()
    monkeypatch.setattr(downloads, "ModelCatalog", lambda: catalog)
    return catalog


def registered(name: str) -> RegisteredModel:
    return RegisteredModel(name=name, load=lambda _: FakeChat(model_name=name))  # type: ignore[arg-type, return-value]


@pytest.fixture
def make(chat: FakeChat, catalog: Catalog) -> Iterator[Callable[..., TestClient]]:
    """A client of a server whose models can be added to, with an admin's key."""
    open_clients: list[TestClient] = []

    def made(register: downloads.Register | None = registered) -> TestClient:
        policy = AccessPolicy(api_keys=[USER], admin_keys=[ADMIN])
        app = create_server_app(
            ModelRegistry.from_model(chat),  # type: ignore[arg-type]
            FairExecutor(),
            access=policy,
            register=register,
        )
        headers = {"authorization": f"Bearer {ADMIN}"}
        client = TestClient(app, base_url="http://127.0.0.1:8000", headers=headers)
        open_clients.append(client.__enter__())
        return client

    yield made
    for client in open_clients:
        client.__exit__(None, None, None)


def start(client: httpx.Client, name: str = LARGE.name) -> httpx.Response:
    return client.post(DOWNLOADS, json={"model": name})


def card(client: httpx.Client) -> dict[str, Any]:
    [found] = client.get(DOWNLOADS).json()["data"]
    return dict(found)


def state(client: httpx.Client, wanted: str) -> dict[str, Any]:
    wait_until(lambda: card(client)["state"] == wanted, complaint=f"{card(client)}")
    return card(client)


def test_what_suits_this_machine_is_offered(make: Callable[..., TestClient]) -> None:
    assert make().get(DOWNLOADS).json() == {
        "object": "list",
        "data": [],
        "recommended": {
            "model": LARGE.name,
            "short_name": None,
            "size": 2_300_000_000,
            "is_here": False,
            "context": 8_192,
            "good_for": "chats and files",
        },
    }


def test_a_downloaded_model_is_served_and_chosen(
    make: Callable[..., TestClient], catalog: Catalog
) -> None:
    client = make()
    assert start(client).json()["state"] == "running"
    assert (state(client, "running")["total"]) in (None, 3_000)
    assert client.post(f"{DOWNLOADS}/pause", json={"model": LARGE.name}).json()["state"] == "paused"
    assert start(client, "other").json()["state"] == "running"
    reply = start(client)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "busy")
    client.post(f"{DOWNLOADS}/pause", json={"model": "other"})
    catalog.may_end.set()
    start(client)
    wait_until(lambda: catalog.used == [LARGE.name])
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["loaded"]) for one in listed] == [("fake", True), (LARGE.name, False)]
    body = {"model": LARGE.name, "messages": [{"role": "user", "content": "Hi"}]}
    assert client.post("/v1/chat/completions", json=body).json()["model"] == LARGE.name
    start(client)  # it is here already
    wait_until(lambda: len(catalog.used) == 2)
    assert len(client.get("/v1/models").json()["data"]) == 2


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ModelCommandFailed("huggingface.co cannot be reached."), "cannot be reached"),
        (Model("org/huge", ModelOrigin.DOWNLOADED, 9 << 40, False, 0, 8_192), "too large"),
    ],
)
def test_a_failure_is_told(
    make: Callable[..., TestClient], catalog: Catalog, end: Any, words: str
) -> None:
    catalog.end = end
    catalog.may_end.set()
    client = make()
    start(client)
    assert words in state(client, "failed")["problem"]
    assert len(client.get("/v1/models").json()["data"]) == 1
    assert catalog.used == []


def test_a_model_that_cannot_be_served_is_told(
    make: Callable[..., TestClient], catalog: Catalog
) -> None:
    def refused(name: str) -> RegisteredModel:
        raise UnsupportedModel(f"{name} is an adapter")

    catalog.may_end.set()
    client = make(refused)
    start(client)
    assert "is an adapter" in state(client, "failed")["problem"]


def test_a_server_of_fixed_models_offers_none(make: Callable[..., TestClient]) -> None:
    client = make(None)
    assert client.get(DOWNLOADS).json()["recommended"] is None
    assert (start(client).status_code, start(client).json()["error"]["code"]) == (
        409,
        "fixed_models",
    )


def test_a_served_model_is_chosen_for_later(
    make: Callable[..., TestClient], catalog: Catalog
) -> None:
    client = make()
    assert client.post("/api/v1/models/use", json={"model": "fake"}).json()["model"] == "fake"
    assert catalog.used == ["fake"]
    assert client.post("/api/v1/models/use", json={"model": "unknown"}).status_code == 404


def test_others_may_not_fill_the_disk(chat: FakeChat, catalog: Catalog) -> None:
    app = create_server_app(ModelRegistry.from_model(chat), FairExecutor(), register=registered)  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000") as stranger:  # from no port of this user
        for reply in (stranger.get(DOWNLOADS), start(stranger)):
            assert reply.status_code == 403
            assert reply.json()["error"]["code"] == "downloads_not_allowed"
    assert catalog.used == []
