"""`/prompts` in the chat, over a scripted server that keeps prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Open
from tui.widgets.prompts_dialog import PromptsDialog

PROMPTS = "/api/v1/prompts"
RHYME = {"id": 3, "name": "Rhyme", "system": "In verse.", "sampling": {"temperature": 1.1}}


@pytest.fixture
def kept(server: FakeServer) -> list[dict[str, Any]]:
    """The prompts of the server."""
    prompts = [RHYME]
    server.engine[PROMPTS] = {"data": prompts}
    return prompts


@pytest.mark.usefixtures("kept")
async def test_a_prompt_is_chosen_by_its_name_or_in_the_list(
    terminal: Open, server: FakeServer
) -> None:
    async with terminal() as t:
        await t.ask("/prompts Rhyme")
        await t.until_shown("Rhyme is used from the next message on.")
        await t.ask("why?")
        await t.until(lambda: len(server.requests) == 1)
        assert server.requests[0]["messages"][0] == {"role": "system", "content": "In verse."}
        assert server.requests[0]["temperature"] == 1.1
        await t.until_ready()
        await t.ask("/set temperature off")
        await t.until(lambda: "temperature 1.1" not in t.screen)
        await t.ask("/prompts")
        await t.until_shown("Chats with the same prompt share its pages")
        await t.press("enter")
        await t.until_shown("temperature 1.1")


@pytest.mark.usefixtures("kept")
async def test_the_chats_prompt_is_saved_under_the_name_that_is_typed(
    terminal: Open, server: FakeServer
) -> None:
    async with terminal() as t:
        await t.ask("/system Be brief.")
        await t.ask("/set seed 5")
        await t.until_shown("seed 5")
        await t.ask("/prompts")
        await t.until(lambda: isinstance(t.app.screen, PromptsDialog))
        await t.type("Brief one")
        await t.until_shown("save as Brief one")
        await t.press("enter")
        await t.until_shown("are saved as Brief one.")
    assert server.requests == [
        {"name": "Brief one", "system": "Be brief.", "sampling": {"seed": 5}}
    ]


async def test_what_cannot_be_used_is_said(terminal: Open, server: FakeServer) -> None:
    async with terminal() as t:
        await t.ask("/prompts")
        await t.until_shown("keeps no prompts; mlxserve does.")
        server.engine[PROMPTS] = {"data": []}
        await t.ask("/prompts Nobody")
        await t.until_shown("No saved prompt is named Nobody. None is saved yet.")
        server.engine[PROMPTS] = {"data": [{**RHYME, "sampling": {"temperature": 9}}]}
        await t.ask("/prompts Nobody")
        await t.until_shown("There are: Rhyme.")
        await t.ask("/prompts Rhyme")
        await t.until_shown("Rhyme: temperature is a number from 0 to 2")
