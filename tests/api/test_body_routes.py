"""The rules of every route with a body, walked from `/openapi.json`: a new route is covered by itself.

A route of a model refuses another model's name where names are strict, answers a prompt that is too long
with the error that clients recognise, and every reply names the fields that had no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxserve.api import model_routes
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.bodies.body_route import BodyRoute, check_subject
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import json_response
from mlxserve.api.model_names import ModelNames
from mlxserve.api.native.tokenization import Tokenization
from mlxserve.core.errors import EngineStopped, PromptTooLong
from tests.api.fake_chat import FakeChat
from tests.api.smallest_bodies import SmallestBodies, filled

KEY = "an-admin-key-of-the-tests"
STRANGE, UNKNOWN = "strange-model", "an_unknown_field"
MOST_CHARACTERS = 4_000
# They start work without a body, or refuse it.
WITHOUT_BODY = {"/api/v1/cache/reset", "/v1/responses/{id}/cancel"}


class ShortChat(FakeChat):
    """Refuses to encode a text that can never fit, as `Chat` does."""

    max_characters = MOST_CHARACTERS

    def encode(self, text: str) -> list[int]:
        if len(text) > self.max_characters:
            raise PromptTooLong.for_answer(len(text), self.max_model_len)
        return super().encode(text)


@dataclass(frozen=True)
class Server:
    """A server whose names are strict, and its routes by method and path."""

    client: TestClient
    routes: dict[tuple[str, str], BodyRoute]
    bodies: SmallestBodies

    def post(self, route: BodyRoute, body: dict[str, Any]) -> Any:
        return self.client.request(route.method, filled(route.path), json=body)

    def smallest(self, route: BodyRoute) -> dict[str, Any]:
        return self.bodies.body(route.body.__name__)


@contextmanager
def serving() -> Iterator[Server]:
    app = create_app(
        ShortChat(),  # type: ignore[arg-type]
        strict_model_names=True,
        access=AccessPolicy(admin_keys=[KEY]),
    )
    client = TestClient(
        app,
        base_url="http://127.0.0.1:8000",
        raise_server_exceptions=False,
        headers={"authorization": f"Bearer {KEY}"},
    )
    with client:
        bodies = SmallestBodies(client.get("/openapi.json").json(), "fake")
        found = {(one.method, one.path): one for one in app.routes if isinstance(one, BodyRoute)}
        yield Server(client, {each: found[each] for each in bodies.names()}, bodies)


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats and choices of tools are written below the home."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


# ---- the rules


def refuses_strange_names(server: Server, route: BodyRoute) -> None:
    reply = server.post(route, {**server.smallest(route), "model": STRANGE})
    if route.of_model:
        assert reply.status_code == 404, (route.path, reply.text)
        assert STRANGE in reply.text, route.path
    assert reply.status_code < 500, (route.path, reply.text)


def names_unknown_fields(server: Server, route: BodyRoute) -> None:
    reply = server.post(route, {**server.smallest(route), UNKNOWN: 1})
    assert reply.status_code < 500, (route.path, reply.text)
    assert reply.status_code == 200 or not route.of_model, (route.path, reply.text)
    if reply.status_code == 200:
        assert UNKNOWN in reply.headers["x-mlxserve-warning"], route.path


def refuses_or_cuts_long_prompts(server: Server, route: BodyRoute) -> None:
    name = route.body.__name__
    field = route.body.model_construct(messages=None).prompt_field
    if not route.of_model or not server.bodies.has_field(name, field):
        return
    text = "x" * (MOST_CHARACTERS + 1)
    reply = server.post(route, server.bodies.with_text(name, field, text))
    if reply.status_code == 200:
        assert "cut to" in reply.headers["x-mlxserve-warning"], route.path
        return
    assert reply.status_code == 400, (route.path, reply.text)
    assert "maximum context length" in reply.text or "prompt is too long" in reply.text, route.path
    error = reply.json()["error"]
    assert isinstance(error, str) or error.get("param", field) == field, route.path


RULES = (refuses_strange_names, names_unknown_fields, refuses_or_cuts_long_prompts)


@pytest.mark.parametrize("rule", RULES)
def test_every_route_with_a_body_has_the_rule(
    server: Server, rule: Callable[[Server, BodyRoute], None]
) -> None:
    assert len(server.routes) > 30
    for route in server.routes.values():
        rule(server, route)


def test_the_smallest_bodies_are_valid(server: Server) -> None:
    """Otherwise the rules above would hold for any reason."""
    for route in server.routes.values():
        route.body.read(server.smallest(route))
        assert not route.of_model or server.post(route, server.smallest(route)).status_code == 200


def test_work_is_asked_for_by_routes_with_a_body(server: Server) -> None:
    routes = [one for one in server.client.app.routes if isinstance(one, Route)]  # type: ignore[attr-defined]
    plain = {
        route.path
        for route in routes
        if not isinstance(route, BodyRoute) and {"POST", "PUT", "PATCH"} & (route.methods or set())
    }
    assert plain == WITHOUT_BODY


# ---- a route by the recipe of docs/contributing.md


class CountRequest(RequestBody):
    """The body of `POST /api/v1/count`."""

    prompt: str


class Counting(Tokenization):
    """With one more route, written by the recipe."""

    kind: type[CountRequest] = CountRequest

    def routes(self) -> list[Route]:
        return [*super().routes(), BodyRoute("/api/v1/count", self.count, body=self.kind)]

    async def count(self, _request: Request, body: CountRequest) -> Response:
        """Counts tokens."""
        if body.prompt == "stop":
            raise EngineStopped("The engine has stopped.")
        return json_response({"count": len(self._model.encode(body.prompt))})


def test_a_route_by_the_recipe_has_all_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "Tokenization", Counting)
    with serving() as server:
        route = server.routes["POST", "/api/v1/count"]
        for rule in RULES:
            rule(server, route)
        assert server.post(route, {"prompt": "abc"}).json() == {"count": 3}
        stopped = server.post(route, {"prompt": "stop"})
        assert (stopped.status_code, stopped.json()["error"]["code"]) == (503, "engine_stopped")


class ForgetfulRequest(CountRequest):
    """Takes any model's name and any field."""

    def check_model(self, _names: ModelNames) -> None:
        return None

    @property
    def unknown_fields(self) -> list[str]:
        return []


@pytest.mark.parametrize("rule", [refuses_strange_names, names_unknown_fields])
def test_the_walk_finds_a_route_that_forgets(
    rule: Callable[[Server, BodyRoute], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_routes, "Tokenization", Counting)
    monkeypatch.setattr(Counting, "kind", ForgetfulRequest)
    with serving() as server, pytest.raises((AssertionError, KeyError)):
        rule(server, server.routes["POST", "/api/v1/count"])


def test_a_route_of_a_model_is_refused_among_those_of_the_server_and_the_other_way_round() -> None:
    async def handler(_request: Request, _body: CountRequest) -> Response:
        return json_response({})

    for of_model in (True, False):
        route = BodyRoute("/count", handler, body=CountRequest, of_model=of_model)
        check_subject([route], of_model=of_model)
        with pytest.raises(ValueError, match="/count"):
            check_subject([route], of_model=not of_model)
