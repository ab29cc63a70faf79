"""How long the screen is held up while an answer comes: the reason for painting only its end.

Measured on two busy cores at 100 pieces a second, 95th percentile: 17 ms in prose, 80 ms in a
long fence, 64 ms in a long list. Textual's own Markdown took 283 ms and 856 ms on the last two.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import pytest

from tui.connection import Connection, Connector, Wanted
from tui.events import Finish, Piece, TextPiece
from tui.home import Home

if TYPE_CHECKING:
    from conftest import Terminal

PIECES_PER_SECOND = 100
SECONDS = 6.0
TEXTS = {
    "prose": ("Some words of *ordinary* prose with `code`. " * 5 + "\n\n") * 60,
    "fence": "```python\n" + "    x = foo(bar, [1, 2, 3], 'abc')  # words\n" * 600,
    "list": "".join(f"- item **{n}** with some words and `code`\n" for n in range(600)),
}


class Client:
    """Says a text at the speed of a fast model, all but its last part at once."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def stream(self, *_: object, **__: object) -> AsyncGenerator[Piece, None]:
        rest = int(PIECES_PER_SECOND * SECONDS) * 4
        yield TextPiece(self._text[:-rest])
        for at in range(len(self._text) - rest, len(self._text), 4):
            yield TextPiece(self._text[at : at + 4])
            await asyncio.sleep(1 / PIECES_PER_SECOND)
        yield Finish("stop")

    async def close(self) -> None:
        """Nothing to close."""


class Ready(Connector):
    def __init__(self, client: Client, home: Home) -> None:
        super().__init__(Wanted(url="http://127.0.0.1:1"), home)
        self._client = client

    async def connect(self, report: object) -> Connection:
        return Connection(self._client, ["m"], "m")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_the_screen_is_never_held_up_for_long(
    play: Callable[..., None], home: Home, name: str
) -> None:
    stalls: list[float] = []

    async def story(t: "Terminal") -> None:
        await t.until_ready()
        await t.ask("go")
        await t.until(lambda: "Writing" in t.status)
        while "Writing" in t.status:
            started = time.perf_counter()
            await asyncio.sleep(0.01)
            stalls.append(time.perf_counter() - started - 0.01)

    play(story, Ready(Client(TEXTS[name]), home), size=(120, 50))
    stalls.sort()
    assert len(stalls) > 50
    assert stalls[int(len(stalls) * 0.95)] < 0.2
