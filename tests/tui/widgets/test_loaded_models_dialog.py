"""The dialog of `/models`, over a server's routes as a transport of httpx answers them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.tui.terminals import hosted
from tui.talk.client import ChatClient
from tui.widgets.loaded_models_dialog import LoadedModelsDialog

URL = "http://127.0.0.1:1"


class Models:
    """The routes of a server with two models."""

    def __init__(self) -> None:
        self.cards: dict[str, dict[str, Any]] = {
            "org/one": {"state": "loaded", "memory": 3 << 30, "num_requests": 0},
            "org/two": {"state": "unloaded", "memory": 0, "size": 2 << 30, "num_requests": 0},
        }
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refusal: tuple[int, str, str] | None = None  # status, code and message of a change

    @property
    def client(self) -> ChatClient:
        return ChatClient(URL, transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            data = [{"id": name, **card} for name, card in self.cards.items()]
            return httpx.Response(200, json={"data": data, "memory_limit": 8 << 30})
        body = json.loads(request.content)
        what = request.url.path.rpartition("/")[2]
        self.requests.append((what, body))
        if self.refusal is not None:
            status, code, message = self.refusal
            self.refusal = None
            return httpx.Response(status, json={"error": {"code": code, "message": message}})
        card = self.cards[body["model"]]
        card |= {"state": "loaded" if what == "load" else "unloaded"}
        card |= {"memory": 2 << 30 if what == "load" else 0}
        card["pinned"] = body.get("pinned", card.get("pinned", False)) and what == "load"
        return httpx.Response(200, json={"id": body["model"], **card})


async def test_models_are_shown_with_their_memory_loaded_pinned_and_unloaded() -> None:
    models = Models()
    async with models.client as client, hosted(LoadedModelsDialog(client.control)) as t:
        await t.until_shown("3.00 GiB in use of 8.00 GiB for all.")
        assert "● org/one  3.00 GiB" in t.screen
        assert "○ org/two  not loaded · 2.00 GiB of weights" in t.screen
        await t.press("down", "enter")
        await t.until_shown("● org/two  2.00 GiB")
        await t.press("p")
        await t.until_shown("2.00 GiB · pinned")
        await t.press("p")
        await t.until(lambda: "pinned" not in t.screen)
        await t.press("u")
        await t.until_shown("○ org/two  not loaded")
    assert models.requests == [
        ("load", {"model": "org/two"}),
        ("load", {"model": "org/two", "pinned": True}),
        ("load", {"model": "org/two", "pinned": False}),
        ("unload", {"model": "org/two", "force": False}),
    ]


async def test_a_model_that_answers_is_unloaded_with_the_second_press() -> None:
    models = Models()
    async with models.client as client, hosted(LoadedModelsDialog(client.control)) as t:
        await t.until_shown("● org/one")
        models.refusal = (409, "busy", "org/one is in use by 1 request.")
        await t.press("u")
        await t.until_shown("org/one is answering. U again ends its answers.")
        await t.press("u")
        await t.until_shown("○ org/one  not loaded")
    assert [body["force"] for _, body in models.requests] == [False, True]


async def test_what_the_server_refuses_is_said_in_its_words() -> None:
    models = Models()
    async with models.client as client, hosted(LoadedModelsDialog(client.control)) as t:
        await t.until_shown("○ org/two")
        models.refusal = (503, "out_of_memory", "org/two needs 9.00 GiB. Unpin one of: org/one.")
        await t.press("down", "enter")
        await t.until_shown("org/two needs 9.00 GiB. Unpin one of: org/one.")
        await t.press("up", "enter")
        await t.until_shown("org/one is loaded. U unloads it, P pins it.")
        await t.press("escape")
        assert t.app.results == [None]


async def test_a_server_without_these_routes_is_named() -> None:
    absent = httpx.MockTransport(lambda _: httpx.Response(404, json={}))
    async with (
        ChatClient(URL, transport=absent) as client,
        hosted(LoadedModelsDialog(client.control)) as t,
    ):
        await t.until_shown("does not say what it has loaded")


async def test_a_key_that_may_not_see_them_is_told_so() -> None:
    refusal = {"error": {"code": "admin_required", "message": "This needs the scope admin."}}
    transport = httpx.MockTransport(lambda _: httpx.Response(403, json=refusal))
    async with (
        ChatClient(URL, transport=transport) as client,
        hosted(LoadedModelsDialog(client.control)) as t,
    ):
        await t.until_shown("This needs the scope admin.")
