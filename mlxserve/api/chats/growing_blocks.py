"""GrowingBlocks: the parsed blocks of a text that grows, and how they change for followers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mlxserve.api.chats.patches import patches
from mlxserve.api.errors import encode_json
from mlxserve.api.page.highlighting import Node
from mlxserve.api.page.rendering import Renderer
from mlxserve.helpers.work import RunFairly, Work

_COMPARED_PER_SECOND = 2_000_000  # characters
# Characters of an end whose code is highlighted each time; a longer one once it is finished.
_MAX_HIGHLIGHTED = 8_000
# A definition of a link, which may be far below the link.
_DEFINITION = re.compile(r"^ {0,3}\[[^\]\n]{1,999}\]:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class BlocksChange:
    """Patches as JSON, empty for none.

    place, text: the path and the number of the text that grows, and what it grows by, if that is all
    """

    patches: bytes
    place: tuple[object, ...] | None = None
    text: str = ""


class GrowingBlocks:
    """Parses each finished block once, and only the end of the text again."""

    def __init__(self, renderer: Renderer) -> None:
        self.shown: list[Node] = []  # what the followers have
        self._renderer = renderer
        self._finished: list[Node] = []
        self._at = 0  # characters of the finished blocks

    async def advance(
        self, text: str, fairly: RunFairly, *, is_whole: bool = False
    ) -> BlocksChange:
        """Parse the text, and return the change since the last call.

        is_whole: the text has ended, so that its last block is finished, too

        Raises the errors of `fairly`.
        """
        end = text[self._at :]
        nodes, num_finished, size = await self._renderer.growing(end, fairly)
        finished = nodes if is_whole else nodes[:num_finished]
        is_short = len(end) <= _MAX_HIGHLIGHTED
        await self._renderer.highlight(nodes if is_short else finished, fairly)
        after = [*self._finished, *nodes]
        if is_whole and _DEFINITION.search(text):
            [after] = await self._renderer.nodes([text], fairly)
        comparing: Work[BlocksChange] = Work(
            len(end) / _COMPARED_PER_SECOND, partial(_change, self.shown, after)
        )
        change = await fairly(comparing)
        self.shown = after
        self._finished += finished
        self._at += len(end) if is_whole else size
        return change


def _change(before: Sequence[Node], after: Sequence[Node]) -> BlocksChange:
    found = patches(before, after)
    if not found:
        return BlocksChange(b"")
    last = found[-1]
    if len(found) > 1 or "add" in last:
        return BlocksChange(encode_json(found))
    return BlocksChange(encode_json(found), (*last["path"], last["keep"]), last["grow"])
