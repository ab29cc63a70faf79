"""An adapter is a model of its own name, beside its base: listed, asked for, limited and unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.chat.registry.entries import RegisteredAdapter, RegisteredModel
from tests.api.fake_chat import FakeChat
from tests.api.test_dispatch import MESSAGES, Models, Serve
from tests.api.test_dispatch import serve as serve

ADAPTERS = (RegisteredAdapter(name="coder", size=3), RegisteredAdapter(name="poet", size=4))


class Loaded:
    """Two models, of which the first has adapters, and what each has loaded."""

    def __init__(self, serve: Serve, **options: Any) -> None:
        self.chats: dict[str, list[FakeChat]] = {"org/One": [], "two": []}
        self.models: Models = serve(self._model("org/One"), self._model("two"), **options)
        self.client = self.models.client

    def _model(self, name: str) -> RegisteredModel:
        adapters = ADAPTERS if name == "org/One" else ()

        def load(_room: int) -> Any:
            names = tuple(one.name for one in adapters)
            self.chats[name].append(FakeChat(model_name=name, adapters=names))
            return self.chats[name][-1]

        return RegisteredModel(
            name=name, load=load, aliases=("first",) if adapters else (), adapters=adapters
        )

    def answered(self) -> dict[str, int]:
        """Requests of each model and adapter."""
        found = {}
        for chats in self.chats.values():
            for chat in chats:
                for one in (chat, *(chat.with_adapter(name) for name in chat.adapters)):
                    found[one.model_name] = len(one.submitted)
        return found


@pytest.fixture
def loaded(serve: Serve) -> Loaded:
    return Loaded(serve)


def test_adapters_are_listed_after_their_model_which_is_their_parent(loaded: Loaded) -> None:
    cards = loaded.client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("org/One", None),
        ("org/One:coder", "org/One"),
        ("org/One:poet", "org/One"),
        ("two", None),
    ]
    assert [card["loaded"] for card in cards] == [True, True, True, False]
    assert (cards[1]["size"], cards[1]["aliases"]) == (3, ["first:coder"])
    card = loaded.client.get("/v1/models/first:coder").json()
    assert (card["id"], card["parent"]) == ("org/One:coder", "org/One")
    [one, _] = loaded.client.get("/api/v1/models").json()["data"]
    assert (one["id"], one["adapters"]) == ("org/One", ["coder", "poet"])


def test_ollamas_clients_see_adapters_as_tags(loaded: Loaded) -> None:
    tags = loaded.client.get("/api/tags").json()["models"]
    names = ["org/One:latest", "first:latest", "org/One:coder", "first:coder", "org/One:poet"]
    assert [tag["name"] for tag in tags][:5] == names
    assert tags[2]["details"]["parent_model"] == "org/One"
    assert len({tag["digest"] for tag in tags}) == 4
    shown = loaded.client.post("/api/show", json={"model": "first:coder"}).json()
    assert "FROM org/One\nADAPTER coder\n" in shown["modelfile"]
    body = {"model": "first:coder", "messages": MESSAGES, "stream": False}
    assert loaded.client.post("/api/chat", json=body).status_code == 200
    assert loaded.answered()["org/One:coder"] == 1


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("org/One:coder", "org/One:coder"),
        ("one:CODER", "org/One:coder"),
        ("first:poet", "org/One:poet"),
        ("org/One", "org/One"),
        ("one:latest", "org/One"),
        (None, "org/One"),
    ],
)
def test_the_adapter_that_a_request_names_answers(
    loaded: Loaded, asked: str | None, answers: str
) -> None:
    reply = loaded.models.ask(asked)
    assert (reply.status_code, reply.json()["model"]) == (200, answers)
    assert "x-mlxserve-warning" not in reply.headers
    assert {name for name, count in loaded.answered().items() if count} == {answers}


@pytest.mark.parametrize("asked", ["org/One:nobody", "one:nobody", "first:nobody"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_unknown_adapter_is_a_404_that_names_those_there_are(
    serve: Serve, asked: str, strict: bool
) -> None:
    loaded = Loaded(serve, strict=strict)
    reply = loaded.models.ask(asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "'org/One:coder', 'org/One:poet'" in reply.text
    assert loaded.client.get(f"/v1/models/{asked}").status_code == 404
    assert not any(loaded.answered().values())


def test_a_model_without_adapters_has_no_names_of_adapters(loaded: Loaded) -> None:
    """As any other name that no model has."""
    reply = loaded.models.ask("two:coder")
    assert (reply.status_code, reply.json()["model"]) == (200, "org/One")
    assert "two:coder" in reply.headers["x-mlxserve-warning"]


def test_named_prefixes_are_those_of_the_adapter(loaded: Loaded) -> None:
    body = {"prompt": "abc", "model": "org/One:coder"}
    assert loaded.client.put("/v1/prefixes/p", json=body).status_code == 200
    listed = [
        loaded.client.get("/v1/prefixes", params={"model": name}).json()["data"]
        for name in ("org/One:coder", "org/One", "org/One:poet")
    ]
    assert [len(prefixes) for prefixes in listed] == [1, 0, 0]


def test_an_adapter_is_loaded_and_unloaded_with_its_model(loaded: Loaded) -> None:
    assert loaded.models.ask("org/One:coder").status_code == 200
    loaded.models.unload("org/One")
    card = loaded.client.get("/v1/models/org/One:coder").json()
    assert (card["loaded"], card["size"]) == (False, 3)
    assert loaded.models.ask("org/One:coder").json()["model"] == "org/One:coder"
    assert len(loaded.chats["org/One"]) == 2


def test_requests_of_adapters_count_as_those_of_their_model(loaded: Loaded) -> None:
    for name in ("org/One:coder", "org/One:poet", "org/One"):
        assert loaded.models.ask(name).status_code == 200
    metrics = loaded.client.get("/metrics").text
    assert 'model_name="org/One"' in metrics
    assert "org/One:coder" not in metrics


def test_a_key_for_an_adapter_is_not_one_for_its_model(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret = KeyFile(file).create("only", Scope.USER, models=["first:coder"])
    loaded = Loaded(serve, access=AccessPolicy(keys_file=file))
    loaded.client.headers["authorization"] = f"Bearer {secret}"
    listed = loaded.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["org/One:coder"]
    asked = ("org/One:coder", "org/One", "org/One:poet", "two")
    assert [loaded.models.ask(name).status_code for name in asked] == [200, 403, 403, 403]
