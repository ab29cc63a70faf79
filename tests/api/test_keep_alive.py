"""`keep_alive` on every route whose body has it: what is refused names the field, and no value stops a route."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.app import create_server_app
from mlxserve.api.bodies.keep_alive import MAX_LENGTH
from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.helpers.fair_executor import FairExecutor
from tests.api.fake_chat import FakeChat

ROUTES = (
    "/api/chat",
    "/api/embed",
    "/api/embeddings",
    "/api/generate",
    "/api/pull",
    "/api/show",
    "/api/v1/models/load",
)
FIELDS = {"/api/embed": {"input": "a"}, "/api/embeddings": {"prompt": "a"}}


@pytest.fixture
def registry() -> ModelRegistry:
    models = [
        RegisteredModel(
            name=name, load=lambda _, name=name: FakeChat(model_name=name), keep_alive=600
        )
        for name in ("first", "second")
    ]
    registry = ModelRegistry(models)
    asyncio.run(registry.preload())
    return registry


@pytest.fixture
def client(registry: ModelRegistry) -> Iterator[TestClient]:
    app = create_server_app(registry, FairExecutor())
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def send(client: TestClient, path: str, keep_alive: str) -> Any:
    """`keep_alive`: as JSON, which also has numbers that Python's encoder does not write"""
    fields = json.dumps({"model": "second", "stream": False, **FIELDS.get(path, {})})
    body = f'{fields[:-1]}, "keep_alive": {keep_alive}}}'
    return client.post(path, content=body, headers={"content-type": "application/json"})


def test_the_document_has_the_field_on_these_routes_with_its_length(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    routes = {}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                name = body["schema"]["$ref"].rpartition("/")[2]
                routes[path] = schemas[name].get("properties", {}).get("keep_alive")
    found = {path: field for path, field in routes.items() if field is not None}
    assert sorted(found) == sorted(ROUTES)
    for field in found.values():
        assert {"type": "string", "maxLength": MAX_LENGTH} in field["anyOf"]


HOSTILE = [
    *(json.dumps("1" * size + "x") for size in (64, 5_000, 20_000, 200_000)),
    *(json.dumps("1h" * size) for size in (33, 200_000)),
    *(
        "true",
        "false",
        "[1]",
        '{"1h": 1}',
        '"NaN"',
        '"inf"',
        '"1e3"',
        '"\\u0000"',
        '"1h\\u0000"',
        '"-"',
    ),
]


@pytest.mark.parametrize("path", ROUTES)
def test_a_hostile_value_is_refused_by_its_field(client: TestClient, path: str) -> None:
    for value in HOSTILE:
        reply = send(client, path, value)
        assert reply.status_code == 400, value[:40]
        error = reply.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith("keep_alive: must "), value[:40]
        assert len(message) < 250, value[:40]
        assert isinstance(error, str) or error["param"] == "keep_alive"


@pytest.mark.parametrize("path", ROUTES)
def test_a_number_outside_json_is_one_400(client: TestClient, path: str) -> None:
    for value in ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5_000, "9" * 100_000]:
        assert send(client, path, value).status_code == 400, value[:40]


FOR_EVER = [
    *("1e15", "1e308", "-1e308", "-1", "9" * 4_000, "-" + "9" * 4_000, "31536001"),
    *(f'"{"9" * MAX_LENGTH}"', '"2562047h47m16.854775807s"', '"-1ns"'),
]


@pytest.mark.parametrize("path", ["/api/generate", "/api/v1/models/load"])
def test_more_than_a_year_is_for_ever(
    client: TestClient, registry: ModelRegistry, path: str
) -> None:
    for value in FOR_EVER:
        assert send(client, path, value).status_code == 200, value[:40]
        [_, listed] = client.get("/api/ps").json()["models"]
        assert listed["expires_at"].startswith("2318-"), value[:40]
        assert registry.state("second").seconds_left is None
        assert client.get("/api/v1/models").status_code == 200
        send(client, "/api/v1/models/load", "60")


def test_the_longest_finite_time_is_a_date(client: TestClient, registry: ModelRegistry) -> None:
    assert send(client, "/api/v1/models/load", '"8760h"').status_code == 200
    [_, listed] = client.get("/api/ps").json()["models"]
    in_a_year = datetime.now(UTC) + timedelta(days=365)
    assert abs(datetime.fromisoformat(listed["expires_at"]) - in_a_year) < timedelta(hours=1)
    assert math.isfinite(registry.state("second").seconds_left or math.inf)
