"""The document describes every route, and requests generated from it get well-formed replies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

from mlxserve.api.errors import speaks_ollama
from tests.api.serving import StartServer
from tests.api.smallest_bodies import ENDLESS

NUM_EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "4"))  # of each route; more on demand


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def test_every_route_is_described(client: TestClient, document: dict[str, Any]) -> None:
    described = {
        (method, path) for path, operations in document["paths"].items() for method in operations
    }
    routes = {
        (method.lower(), re.sub(r":\w+", "", route.path))
        for route in client.app.routes
        if route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert described == routes
    assert len(routes) > 20


def test_every_post_and_put_route_shows_its_body_unless_it_has_none(
    document: dict[str, Any],
) -> None:
    bodiless = {
        (path, method)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method in ("post", "put") and "requestBody" not in operation
    }
    assert bodiless == {("/api/v1/cache/reset", "post"), ("/v1/responses/{id}/cancel", "post")}


def test_every_reference_is_defined(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= schemas.keys()
    assert "ChatRequest" in names


# Of values that a function reads, which has bounds of its own.
READ_BY_FUNCTIONS = {"ChosenTools", "Structure"}


def unbounded(schema: dict[str, Any], where: str) -> Iterator[str]:
    """The strings, numbers and lists of a schema that have no most."""
    kind, named = schema.get("type"), schema.keys()
    if kind == "string" and not named & {"maxLength", "enum", "const", "pattern"}:
        yield where
    if kind in ("integer", "number") and not {"minimum", "maximum"} <= named:
        yield where
    if kind == "array" and "maxItems" not in named:
        yield where
    for name, inner in schema.get("properties", {}).items():
        yield from unbounded(inner, f"{where}.{name}")
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from unbounded(inner, where)
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from unbounded(inner, f"{where}[]")


def test_every_string_has_a_length_every_number_a_range_and_every_list_a_most(
    document: dict[str, Any],
) -> None:
    schemas = {
        name: schema
        for name, schema in document["components"]["schemas"].items()
        if not name.endswith("Error") and name not in READ_BY_FUNCTIONS
    }
    assert len(schemas) > 40
    assert [each for name, schema in schemas.items() for each in unbounded(schema, name)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "number", "maximum": 0},
        {"type": "array", "items": {}},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "array", "maxItems": 3, "items": {"type": "integer"}},
    ],
)
def test_a_field_without_a_bound_is_found(schema: dict[str, Any]) -> None:
    assert list(unbounded({"properties": {"x": schema}}, "Body"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_no_generated_request_gets_a_5xx_or_a_malformed_error(
    start_server: StartServer, document: dict[str, Any], kind: str
) -> None:
    import schemathesis  # takes a second

    url = start_server().url
    mode = schemathesis.GenerationMode(kind)
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    if kind == "negative":  # only a body can be wrong
        operations = [one for one in operations if one.definition.raw.get("requestBody")]
    assert len(operations) >= 10

    def fuzz(operation: Any) -> None:
        is_large = operation.path.startswith("/v1/messages")  # to generate one takes 5 s

        @settings(
            max_examples=max(1, NUM_EXAMPLES // 5) if is_large else NUM_EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers(case: Any) -> None:
            reply = case.call(base_url=url, timeout=30)
            assert reply.status_code < 500, reply.content
            if reply.status_code >= 400:
                check_shape(operation.path, reply)

        answers()

    for operation in operations:
        if operation.path not in ENDLESS:
            fuzz(operation)


def check_shape(path: str, reply: httpx2.Response) -> None:
    body = json.loads(reply.content)
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    elif speaks_ollama(path):
        assert isinstance(body.pop("error"), str)
        assert not body
        return
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


def test_an_unknown_field_of_any_name_fits_into_the_warning_header(
    start_server: StartServer,
) -> None:
    """Found by the requests generated above: a header may not end with a space."""
    url = f"{start_server().url}/v1/completions"
    headers = {"content-type": "application/json"}
    for name in ("", " ", "x ", "\n", "\u2028", "é" * 100):
        reply = httpx.post(
            url, content=json.dumps({"prompt": "x", name: 1}), headers=headers, timeout=60
        )
        assert reply.status_code == 200
        assert reply.headers["x-mlxserve-warning"].startswith("ignored unknown fields: ")
