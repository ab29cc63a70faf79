"""Random keys: whatever is pressed, the terminal keeps working."""

import random
from collections.abc import Callable

import pytest

from mlxserve.history.messages import State
from mlxserve.history.store import Store
from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tui.commands import COMMANDS
from tui.home import Home

KEYS = [
    *(
        key
        for command in COMMANDS
        for key in command.keys
        if command.name not in ("quit", "editor")
    ),
    *("enter", "enter", "enter", "escape", "tab", "shift+tab", "up", "down", "left", "right"),
    *("pageup", "pagedown", "ctrl+j", "backspace", "ctrl+d", "ctrl+p", "slash", "space", "home"),
    *"abertye",
]


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(1)),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10)),
    ],
)
async def test_the_terminal_works_after_random_keys(
    terminal: Callable[..., None],
    server: FakeServer,
    home: "Home",
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setattr("tui.actions.clipboard.shutil.which", lambda name: None)
    chance = random.Random(seed)
    for _ in range(40):
        server.script(
            *chance.choice(
                [
                    (scripts.think("hm"), scripts.say("- a\n" * 20)),
                    (scripts.say("half"), scripts.hang_up),
                    (scripts.refuse(500, "oops"),),
                    (scripts.say("```py\n" + "x = 1\n" * 60), scripts.Gate()),
                ]
            )
        )

    async with terminal() as t:
        for _ in range(100):
            await t.press(chance.choice(KEYS))
        while len(t.app.screen_stack) > 1:
            t.app.pop_screen()
        for _ in range(4):
            await t.press("escape")
        await t.press("ctrl+n")
        await t.until(lambda: not t.app.answering.is_busy and t.messages == [])
        server.clear_scripts()
        await t.talk("are you well?")
    store = Store.open(home.chats)
    for chat in store.chats():
        assert all(m.state is not State.WRITING for m in store.path(chat.leaf_id))
    store.close()
