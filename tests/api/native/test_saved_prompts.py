"""Saved prompts over HTTP: each key's own, within limits that are sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.history import saved_prompts
from mlxserve.history.store import Store
from tests.api.access.kept_secret import KeptSecret
from tests.api.chats.test_answers import ended
from tests.api.fake_chat import FakeChat
from tests.api.serving import Serve, StartServer

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = "/api/v1/prompts"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def page(start_server: StartServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=start_server().url, timeout=60) as client:
        yield client


def listed(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get(PROMPTS).json()["data"])


def test_a_prompt_is_saved_listed_replaced_and_deleted(page: httpx.Client, home: Path) -> None:
    sampling = {"temperature": 0.2, "top_k": 40, "effort": "low"}
    saved = page.post(PROMPTS, json={"name": " My \n coach ", "sampling": sampling}).json()
    assert (saved["name"], saved["system"], saved["sampling"]) == ("My coach", "", sampling)
    again = page.post(PROMPTS, json={"name": "My coach", "system": "Be brief."}).json()
    assert (again["id"], again["sampling"]) == (saved["id"], {})
    assert listed(page) == [again]
    store = Store.open(home / "chat.sqlite")
    assert [prompt.name for prompt in store.prompts.all()] == ["My coach"], "the terminal's file"
    store.close()
    assert page.delete(f"{PROMPTS}/{saved['id']}").json()["deleted"] is True
    for gone in (saved["id"], "x", "-1", "9" * 30):
        reply = page.delete(f"{PROMPTS}/{gone}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_prompt")
    assert listed(page) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": " \n "}, "name"),
        ({"name": "x" * 61}, "name"),
        ({"name": "x", "system": "y" * 262_145}, "system"),
        ({"name": "x", "system": 5}, "system"),
        ({"name": "x", "sampling": {"temperature": 3}}, "sampling.temperature"),
        ({"name": "x", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"name": "x", "sampling": {"effort": "huge"}}, "sampling.effort"),
        ({"name": "x", "sampling": [1]}, "sampling"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_field(
    page: httpx.Client, body: dict[str, Any], field: str
) -> None:
    reply = page.post(PROMPTS, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert listed(page) == []


def test_one_prompt_too_many_is_refused_by_a_sentence(
    page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_prompts, "MAX_PROMPTS", 1)
    page.post(PROMPTS, json={"name": "one"})
    reply = page.post(PROMPTS, json={"name": "two"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "too_many_prompts")
    assert "Delete one of them first." in reply.json()["error"]["message"]


def test_each_key_has_prompts_of_its_own(start_server: StartServer, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", KeptSecret())
    keys = [file.create(name, Scope.USER) for name in ("one", "two")]
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    one, two = (
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) for key in keys
    )
    with one, two:
        saved = one.post(PROMPTS, json={"name": "mine"}).json()
        assert listed(two) == []
        assert two.delete(f"{PROMPTS}/{saved['id']}").status_code == 404
        assert [prompt["name"] for prompt in listed(one)] == ["mine"]


def test_an_answer_takes_every_value_that_a_prompt_can_set(
    page: httpx.Client, chat: FakeChat
) -> None:
    number = page.post("/api/v1/chats", json={"title": "One"}).json()["id"]
    values = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3}
    body = {"text": "Why?", "max_tokens": 7, "reasoning_effort": "low", **values}
    assert page.post(f"/api/v1/chats/{number}/answers", json=body).status_code == 200
    ended(page, number)
    params = chat.submitted[0].params
    assert {name: getattr(params, name) for name in values} == values
    assert params.max_tokens == 7


@pytest.mark.slow
def test_chats_with_one_saved_prompt_share_its_pages(serve_real: Serve) -> None:
    system = "Answer as a lighthouse keeper who counts ships. " * 30
    with serve_real() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        saved = client.post(PROMPTS, json={"name": "Keeper", "system": system}).json()
        cached = []
        for question in ("How many?", "Which ones?"):
            fields = {"title": question, "system": saved["system"]}
            number = client.post("/api/v1/chats", json=fields).json()["id"]
            answer = {"text": question, "max_tokens": 2, "temperature": 0}
            client.post(f"/api/v1/chats/{number}/answers", json=answer)
            cached.append(ended(client, number)["messages"][-1]["stats"])
    first, second = cached
    assert first["cached_tokens"] == 0
    # All but the question and what did not fill a page.
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"]
