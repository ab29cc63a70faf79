"""Several models behind one address: which one answers, and what they share."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_server_app
from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.errors import UnsupportedModel
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.facts import ModelFacts
from tests.api.fake_chat import FakeChat
from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "hi"}]


class Models:
    """What each name has loaded so far, and a client of their server."""

    def __init__(
        self, client: TestClient, chats: dict[str, list[FakeChat]], registry: ModelRegistry
    ):
        self.client = client
        self.chats = chats
        self.registry = registry

    def ask(self, model: str | None, **fields: Any) -> Any:
        body = {"messages": MESSAGES, **({} if model is None else {"model": model}), **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def unload(self, name: str) -> None:
        self.client.portal.call(self.registry.unload, name)  # type: ignore[union-attr]


Serve = Callable[..., Models]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:

        def start(
            *models: RegisteredModel, access: AccessPolicy | None = None, strict: bool = False
        ) -> Models:
            chats: dict[str, list[FakeChat]] = {}
            registry = ModelRegistry(
                models or [_registered(name, chats) for name in ("org/One", "two")]
            )
            asyncio.run(registry.preload())
            app = create_server_app(
                registry, FairExecutor(), strict_model_names=strict, access=access
            )
            client = TestClient(
                app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False
            )
            return Models(stack.enter_context(client), chats, registry)

        yield start


def _registered(name: str, chats: dict[str, list[FakeChat]]) -> RegisteredModel:
    def load(_room: int) -> Any:
        chats.setdefault(name, []).append(FakeChat(model_name=name))
        return chats[name][-1]

    return RegisteredModel(name=name, load=load, aliases=(f"{name}-alias",), weight_size=7)


# ---- which model


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        (None, "org/One"),
        ("org/One", "org/One"),
        ("one:latest", "org/One"),
        ("two", "two"),
        ("TWO", "two"),
        ("two-alias", "two"),
    ],
)
def test_the_model_that_a_request_names_answers(
    serve: Serve, asked: str | None, answers: str
) -> None:
    reply = serve().ask(asked)
    assert (reply.status_code, reply.json()["model"]) == (200, answers)
    assert "x-mlxserve-warning" not in reply.headers


def test_the_first_model_answers_with_a_warning_where_no_model_has_the_name(serve: Serve) -> None:
    reply = serve().ask("gpt-9")
    assert reply.json()["model"] == "org/One"
    assert "gpt-9" in reply.headers["x-mlxserve-warning"]


def test_a_strict_server_names_all_its_models(serve: Serve) -> None:
    reply = serve(strict=True).ask("gpt-9")
    assert reply.status_code == 404
    assert "'org/One'" in reply.text
    assert "'two'" in reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_every_dialect_reaches_the_model_it_names(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    models = serve()
    reply = models.client.post(path, json={**body, "model": "two"})
    assert (reply.status_code, reply.json()["model"]) == (200, "two")
    [chat] = models.chats["two"]
    assert chat.submitted or chat.embedded


def test_a_stream_comes_from_the_model_it_names(serve: Serve) -> None:
    reply = serve().ask("two", stream=True)
    first = json.loads(reply.text.split("\n")[0].removeprefix("data: "))
    assert first["model"] == "two"
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"[]", 400), (b'{"model": "two", "messages": 5}', 400), (b'{"model": 5}', 400)],
)
def test_a_bad_body_is_refused_as_by_one_model(serve: Serve, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    models = serve()
    reply = models.client.post("/v1/chat/completions", content=content, headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, "invalid_request_error")
    assert models.client.post("/v1/chat/completions", content=b"x").status_code == 415
    assert models.client.post("/v1/nothing", content=b"{", headers=headers).status_code == 404
    assert models.client.get("/v1/chat/completions").status_code == 405


def test_errors_of_anthropics_route_are_in_its_shape(serve: Serve) -> None:
    body = {"model": "two", "messages": 5, "max_tokens": 5}
    reply = serve().client.post("/v1/messages", json=body)
    assert (reply.status_code, reply.json()["type"]) == (400, "error")


# ---- loading


def test_a_model_is_loaded_by_its_first_request_and_again_after_it_was_unloaded(
    serve: Serve,
) -> None:
    models = serve()
    assert list(models.chats) == ["org/One"]
    assert models.ask("two").status_code == 200
    models.unload("two")
    assert models.chats["two"][0].is_closed
    assert models.ask("two").status_code == 200
    assert len(models.chats["two"]) == 2
    assert models.chats["two"][1].submitted


def test_the_first_model_is_loaded_again_too(serve: Serve) -> None:
    models = serve()
    models.unload("org/One")
    assert models.ask(None).json()["model"] == "org/One"
    assert len(models.chats["org/One"]) == 2


def test_a_single_model_that_was_unloaded_is_loaded_again(serve: Serve) -> None:
    chats: dict[str, list[FakeChat]] = {}
    models = serve(_registered("only", chats))
    models.unload("only")
    assert models.ask("whatever").json()["model"] == "only"
    assert len(chats["only"]) == 2


def test_a_model_that_cannot_be_loaded_is_a_503_that_says_why(serve: Serve) -> None:
    def fail(_room: int) -> Any:
        raise UnsupportedModel("broken is of no kind.")

    models = serve(_registered("one", {}), RegisteredModel(name="broken", load=fail))
    reply = models.ask("broken")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "broken is of no kind."
    assert reply.json()["error"]["code"] == "model_not_loaded"
    assert models.ask("one").status_code == 200


def test_a_model_that_is_not_loaded_is_described_by_its_files(serve: Serve) -> None:
    facts = ModelFacts("bert", "safetensors", "F32", 22_000_000, 90_000_000, 384)
    other = RegisteredModel(name="two", load=_never, purpose="embedding", context=256, facts=facts)
    models = serve(_registered("one", {}), other)
    card = models.client.get("/v1/models/two").json()
    assert (card["loaded"], card["capabilities"], card["context_length"]) == (
        False,
        ["embedding"],
        256,
    )
    shown = models.client.post("/api/show", json={"model": "two"}).json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["details"]["parameter_size"] == "22M"
    assert shown["model_info"]["bert.embedding_length"] == 384
    assert shown["model_info"]["bert.context_length"] == 256


def _never(_room: int) -> Any:
    raise AssertionError("it is not asked for")


def ollama(models: Models, path: str, name: str, **fields: Any) -> Any:
    said = {"input": "hi"} if path == "embed" else {"messages": MESSAGES}
    body = {"model": name, "stream": False, **said, **fields}
    return models.client.post(f"/api/{path}", json=body)


@pytest.mark.parametrize("path", ["chat", "embed"])
def test_a_request_of_ollamas_clients_says_how_long_its_model_stays(
    serve: Serve, path: str
) -> None:
    chats: dict[str, list[FakeChat]] = {}
    on_demand = replace(_registered("two", chats), keep_alive=600.0)
    models = serve(_registered("one", chats), on_demand)

    assert ollama(models, path, "two", keep_alive="1h30m").status_code == 200
    seconds = models.registry.state("two").seconds_left
    assert seconds is not None
    assert 5300 < seconds <= 5400
    expires = {
        one["name"]: one["expires_at"] for one in models.client.get("/api/ps").json()["models"]
    }
    assert expires["one:latest"].startswith("2318")
    left = datetime.fromisoformat(expires["two:latest"]) - datetime.now(UTC)
    assert 5300 < left.total_seconds() <= 5400

    assert ollama(models, path, "two", keep_alive=-1).status_code == 200
    assert models.registry.state("two").seconds_left is None
    unloaded = ollama(models, path, "two", keep_alive=0)
    assert "x-mlxserve-warning" not in unloaded.headers
    assert unloaded.json().get("done_reason") != "load"
    wait_until(lambda: models.registry.state("two").state == "unloaded")

    stays = ollama(models, "chat", "one", keep_alive=0, messages=[])
    assert stays.json()["done_reason"] == "load"
    assert stays.json()["warning"] == "keep_alive: one stays loaded by the server's options"
    assert models.registry.state("one").state == "loaded"


def test_a_model_without_a_prompt_that_is_not_kept_is_unloaded(serve: Serve) -> None:
    chats: dict[str, list[FakeChat]] = {}
    models = serve(_registered("one", chats), replace(_registered("two", chats), keep_alive=600.0))
    unloaded = ollama(models, "chat", "two", keep_alive=0, messages=[]).json()
    assert (unloaded["done_reason"], "warning" in unloaded) == ("unload", False)
    wait_until(lambda: models.registry.state("two").state == "unloaded")


def test_a_key_without_admin_rights_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    chats: dict[str, list[FakeChat]] = {}
    on_demand = replace(_registered("two", chats), keep_alive=600.0)
    file = KeyFile(tmp_path / "keys.json")
    user = file.create("user", Scope.USER)
    access = AccessPolicy(keys_file=file.path)
    models = serve(_registered("one", chats), on_demand, access=access)
    models.client.headers["authorization"] = f"Bearer {user}"
    told = ollama(models, "chat", "two", keep_alive=0, messages=[])
    assert told.json()["warning"].endswith("this API key does not have the scope admin")
    assert models.registry.state("two").state == "loaded"


def test_what_looks_at_a_model_does_not_load_it(serve: Serve) -> None:
    models = serve()
    assert models.client.get("/api/v1/model").json()["id"] == "org/One"
    reply = models.client.get("/api/v1/kv/stats?model=two")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "model_not_loaded")
    models.ask("two")
    assert models.client.get("/api/v1/model?model=two").json()["id"] == "two"
    assert models.client.get("/api/v1/model?model=three").status_code == 404


# ---- what lists them


def test_the_list_says_which_models_are_loaded_and_their_size(serve: Serve) -> None:
    models = serve()
    one, two = models.client.get("/v1/models").json()["data"]
    assert (one["id"], one["loaded"], one["size"], one["max_model_len"]) == (
        "org/One",
        True,
        7,
        1_000,
    )
    assert (two["id"], two["loaded"], two["aliases"]) == ("two", False, ["two-alias"])
    assert "max_model_len" not in two
    assert models.client.get("/v1/models/two-alias").json()["id"] == "two"
    assert models.client.get("/v1/models/gpt-9").status_code == 404
    headers = {"anthropic-version": "2023-06-01"}
    listed = models.client.get("/v1/models", headers=headers).json()
    assert [card["id"] for card in listed["data"]] == ["org/One", "two"]
    assert (listed["first_id"], listed["last_id"]) == ("org/One", "two")


def test_metrics_are_those_of_each_loaded_model(serve: Serve) -> None:
    models = serve()
    models.ask("two")
    page = models.client.get("/metrics").text
    for name in ("org/One", "two"):
        assert f'mlxserve:prefix_cache_queries_total{{model_name="{name}"}} 100.0' in page
    models.unload("two")
    assert 'model_name="two"' not in models.client.get("/metrics").text


def test_the_server_is_ready_with_the_sums_of_its_models(serve: Serve) -> None:
    models = serve()
    models.ask("two")
    reply = models.client.get("/ready").json()
    assert (reply["model"], reply["num_requests_running"]) == ("org/One", 0)
    models.chats["two"][0].silence = 50.0
    assert models.client.get("/ready").status_code == 503
    assert models.client.get("/health").json()["status"] == "stalled"


def test_a_dead_engine_leaves_the_other_models(serve: Serve) -> None:
    models = serve()
    models.ask("two")
    models.chats["two"][0].alive = False
    assert models.client.get("/health").status_code == 200
    assert models.ask("org/One").status_code == 200
    assert models.ask("two").status_code == 200
    assert len(models.chats["two"]) == 2


# ---- what is of each model, and what is of all


def test_prefixes_belong_to_a_model(serve: Serve) -> None:
    models = serve()
    reply = models.client.put("/v1/prefixes/p", json={"prompt": "abc", "model": "two"})
    assert reply.status_code == 200
    assert models.client.get("/v1/prefixes").json()["data"] == []
    [found] = models.client.get("/v1/prefixes?model=two").json()["data"]
    assert found["id"] == "p"
    assert models.client.delete("/v1/prefixes/p?model=two").status_code == 200


def test_stored_responses_belong_to_the_server_and_outlive_their_model(serve: Serve) -> None:
    models = serve()
    first = models.client.post("/v1/responses", json={"input": "a", "model": "two"}).json()
    models.unload("two")
    assert models.client.get(f"/v1/responses/{first['id']}").json()["model"] == "two"
    body = {"input": "b", "model": "org/One", "previous_response_id": first["id"]}
    assert models.client.post("/v1/responses", json=body).json()["model"] == "org/One"


def test_a_revoked_key_loses_its_prefixes_of_every_model(serve: Serve, tmp_path: Any) -> None:
    file = KeyFile(tmp_path / "keys.json")
    admin = {"authorization": f"Bearer {file.create('admin', Scope.ADMIN)}"}
    user = {"authorization": f"Bearer {file.create('user', Scope.USER)}"}
    models = serve(access=AccessPolicy(keys_file=file.path))
    for name in ("org/One", "two"):
        body = {"prompt": "abc", "model": name}
        reply = models.client.put("/v1/prefixes/p", json=body, headers=user)
        assert reply.status_code == 200
    file.revoke("user")
    for name in ("org/One", "two"):
        reply = models.client.get(f"/v1/prefixes?model={name}", headers=admin)
        assert reply.json()["data"] == []


def test_a_key_may_be_for_some_models_only(serve: Serve, tmp_path: Any) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.create("only", Scope.USER, models=["two-alias"])
    models = serve(access=AccessPolicy(keys_file=file.path))
    models.client.headers["authorization"] = f"Bearer {secret}"
    assert models.ask("two").status_code == 200
    for asked in (None, "one", "gpt-9"):
        reply = models.ask(asked)
        assert reply.status_code == 403
        assert reply.json()["error"]["message"] == (
            "This API key is not for the model 'org/One', but for: two-alias."
        )
    assert [card["id"] for card in models.client.get("/v1/models").json()["data"]] == ["two"]
    assert models.client.get("/v1/prefixes").status_code == 403
    assert models.client.get("/v1/prefixes?model=two").status_code == 200


def test_the_description_of_the_api_has_the_routes_of_models(serve: Serve) -> None:
    paths = serve().client.get("/openapi.json").json()["paths"]
    assert paths["/v1/chat/completions"]["post"]["summary"] == "Answers a conversation."
    assert "/v1/responses/{id}" in paths


# ---- documents


class Meanings(FakeChat):
    """Embeds what is about money in one direction, and everything else in another."""

    async def embed(self, texts: Sequence[Sequence[int]], **_: Any) -> list[list[float]]:
        said = [bytes(ids).decode() for ids in texts]
        return [[1.0, 0.0] if "money" in text or "refund" in text else [0.0, 1.0] for text in said]


def _ask_about_money(
    serve: Serve, *, is_loaded: bool = True, key_for: Sequence[str] = (), home: Path | None = None
) -> str:
    """The part of a long document that the model gets, whose server embeds as well."""
    chats: dict[str, list[FakeChat]] = {}
    embedder = RegisteredModel(
        name="embedder",
        load=lambda _: Meanings(model_name="embedder"),  # type: ignore[arg-type, return-value]
        purpose="embedding",
        preload=is_loaded,
    )
    access, headers = None, {}
    if home is not None:
        file = KeyFile(home / "keys.json")
        secret = file.create("only", Scope.USER, models=key_for)
        access, headers = AccessPolicy(keys_file=file.path), {"authorization": f"Bearer {secret}"}
    models = serve(_registered("writer", chats), embedder, access=access)
    pages = [f"{number} Nothing of it. " + "x " * 100 for number in range(9)]
    pages[6] = "Purchases: a refund within 30 days. " + "x " * 100
    data = base64.b64encode("\f".join(pages).encode()).decode()
    file_part = {"filename": "a.pdf", "file_data": f"data:text/plain;base64,{data}"}
    question = {"type": "text", "text": "How do I get my money back?"}
    content = [{"type": "file", "file": file_part}, question]
    body = {"model": "writer", "messages": [{"role": "user", "content": content}]}
    reply = models.client.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return str(chats["writer"][-1].rendered[-1].messages[0]["content"])


def test_parts_of_a_document_are_chosen_by_an_embedding_model_that_is_loaded(serve: Serve) -> None:
    shown = _ask_about_money(serve)
    assert "[page 7]\nPurchases" in shown
    assert shown.index("[page 1]") < shown.index("[page 7]"), "in the order of the document"


def test_without_a_loaded_embedding_model_parts_are_chosen_by_words(serve: Serve) -> None:
    assert "Purchases" not in _ask_about_money(serve, is_loaded=False)


@pytest.mark.parametrize(
    ("names", "is_found"), [(["writer"], False), (["writer", "embedder"], True)]
)
def test_a_key_that_may_not_use_the_embedding_model_has_words_compared(
    serve: Serve, tmp_path: Path, names: list[str], is_found: bool
) -> None:
    shown = _ask_about_money(serve, key_for=names, home=tmp_path)
    assert ("Purchases" in shown) is is_found
