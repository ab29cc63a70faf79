"""An empty chat: ideas, recent chats, and a model that suits the machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from mlxserve.hub.model_choices import (
    BUNDLED,
    Downloaded,
    Model,
    ModelCatalog,
    ModelOrigin,
    best_of,
)
from tests.tui.chats_on_disk import write_chat
from tests.tui.fake_server import FakeServer, in_place_of_a_server
from tests.tui.terminals import Open, Terminal
from tui.home import Home
from tui.talk.connection import ConnectOptions, Connector

FOUND = [
    Model(BUNDLED, ModelOrigin.BUNDLED, 6_000_000, True, 90_000, 4096),
    Model("org/Small-1B-4bit", ModelOrigin.SUGGESTED, 700_000_000, True, 90_000, 40_960),
    Model(
        "org/Good-4B-4bit",
        ModelOrigin.SUGGESTED,
        2_300_000_000,
        False,
        11_000,
        40_960,
        is_recommended=True,
    ),
    Model("org/Tight-8B-4bit", ModelOrigin.SUGGESTED, 4_600_000_000, False, 900, 40_960),
    Model("org/Huge-70B-4bit", ModelOrigin.SUGGESTED, 39_000_000_000, False, 0, 40_960),
]


class Machine(ModelCatalog):
    """Lists these models, and has them at once."""

    async def find(self) -> list[Model]:
        return FOUND

    async def download(self, name: str) -> AsyncGenerator[Downloaded | Model, None]:
        yield next(model for model in FOUND if model.name == name)

    async def use(self, name: str) -> None:
        """Remembered by nobody."""


def own(server: FakeServer, home: Home) -> Connector:
    """A server of the chat's own, which has the bundled model."""
    server.models = [BUNDLED]
    server.model_fields = {"owned_by": "mlxserve", "max_model_len": 4096}
    return Connector(ConnectOptions(), home, in_place_of_a_server(server))


def test_the_model_that_suits_the_machine_is_recommended() -> None:
    best = best_of(FOUND)
    assert best is not None
    assert best.name == "org/Good-4B-4bit"
    assert best_of(FOUND[:1]) is None


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_demonstration_says_what_it_is_and_recommends_a_model(
    terminal: Open, server: FakeServer, home: Home, size: tuple[int, int]
) -> None:
    connector = own(server, home)

    async with terminal(connector, is_ready=False, size=size, models=Machine()) as t:
        await t.until_shown("mlxserve-mini, the included model")
        await t.until_shown("Download Good-4B-4bit, 2.3 GB   it suits this machine")
        await t.until_shown("What is a page?")
        server.models = ["org/Good-4B-4bit"]
        assert t.screen.index("What is a page?") < t.screen.index("Good-4B")
        await t.press("down")
        await t.until_shown("↑↓ select · Enter confirms")
        await t.press("end", "enter")
        await t.until(lambda: "Good-4B-4bit" in t.screen.split("\n")[0])


@pytest.mark.parametrize("way", ["tab", "down", "enter"])
async def test_an_idea_is_asked_with_enter(t: Terminal, way: str) -> None:
    await t.until_shown("Explain how a paged KV cache works.")
    assert "included model" not in t.screen
    await t.press(way, "down", "enter")
    await t.until(lambda: t.messages[-1:] == ["Yes."])
    assert t.messages[0] == "Write a Python function that parses an ISO date."
    assert t.composer.has_focus


async def test_recent_chats_go_on(terminal: Open, home: Home) -> None:
    for title in ("First things", "Last things"):
        write_chat(home, title, title)

    async with terminal() as t:
        await t.until_shown("Open  Last things")
        await t.press("tab", *["down"] * 4, "enter")
        await t.until(lambda: t.messages == ["First things"])


async def test_a_new_chat_is_welcomed_as_well(t: Terminal) -> None:
    await t.talk("why?")
    await t.press("ctrl+n")
    await t.until_shown("Open  why?")


async def test_up_or_a_letter_goes_back_to_the_composer(t: Terminal) -> None:
    await t.until_shown("Explain how a paged KV cache works.")
    await t.press("down")
    await t.until(lambda: not t.composer.has_focus)
    await t.press("up")
    await t.until(lambda: t.composer.has_focus)
    await t.press("down")
    await t.until(lambda: not t.composer.has_focus)
    await t.press("h", "i")
    await t.until(lambda: t.composer.text == "hi")
    assert t.composer.has_focus
