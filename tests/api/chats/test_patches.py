"""Patches of growing texts: whoever applies them has the blocks of the whole text."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from mlxserve.api.chats.growing_blocks import GrowingBlocks
from mlxserve.api.chats.patches import patches
from mlxserve.api.page.markdown import Markdown
from mlxserve.api.page.rendering import Renderer
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import Work
from tests.api.chats.following import apply

TEXT = """# Title

A paragraph with **bold** words
over two lines, and $x^2$.

- one
- two
  - three

  still two
1. first
2. second

```python
def f():
    return 1

x = 2
```
> quoted
lazily

| a | b |
|---|---|
| 1 | 2 |

$$
x = y
$$
---
Setext
======

The end, see https://example.org/x.
"""


def node(random: Random, depth: int = 3) -> Any:
    if depth == 0 or random.random() < 0.4:
        return "ab"[: random.randrange(3)]
    tag = random.choice(("p", "li"))
    return [tag, {}, *(node(random, depth - 1) for _ in range(random.randrange(4)))]


def test_any_tree_becomes_any_other() -> None:
    random = Random(5)
    for _ in range(2_000):
        before, after = ([node(random) for _ in range(random.randrange(4))] for _ in range(2))
        shown = json.loads(json.dumps(before))
        apply(shown, patches(before, after))
        assert shown == after
    assert patches(before, json.loads(json.dumps(before))) == []


def test_a_text_that_grows_is_sent_as_it_grows() -> None:
    before: list[Any] = [["p", {}, "done"], ["p", {}, "a ", ["em", {}, "b"], " and"]]
    after: list[Any] = [["p", {}, "done"], ["p", {}, "a ", ["em", {}, "b"], " and more"]]
    assert patches(before, after) == [{"path": [1], "keep": 3, "grow": " more"}]
    assert patches(before, [*after, "x"])[1:] == [{"path": [], "keep": 2, "add": ["x"]}]


class Parsed:
    """Blocks of a text that grows, with the parser in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_parsed = 0
        self.shown: list[Any] = []
        renderer = Renderer.__new__(Renderer)
        monkeypatch.setattr(renderer, "growing", self._growing, raising=False)
        monkeypatch.setattr(renderer, "nodes", self._nodes, raising=False)
        monkeypatch.setattr(renderer, "highlight", self._highlight, raising=False)
        self._blocks = GrowingBlocks(renderer)
        self._parser = Markdown()
        self._executor = FairExecutor()

    async def grow(self, text: str, *, is_whole: bool = False) -> None:
        patched = await self._blocks.advance(text, self._fairly, is_whole=is_whole)
        apply(self.shown, json.loads(patched or b"[]"))

    async def _fairly(self, work: Work[Any]) -> Any:
        return await self._executor.run("", work)

    async def _growing(self, text: str, _fairly: Any) -> Any:
        self.num_parsed += len(text)
        return self._parser.growing(text, 60.0)

    async def _nodes(self, texts: list[str], _fairly: Any) -> Any:
        return [self._parser.nodes(text, 60.0) for text in texts]

    async def _highlight(self, nodes: Any, _fairly: Any) -> None:
        """Colours are tested with the page."""

    def close(self) -> None:
        self._executor.close()


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_a_growing_text_ends_as_the_whole_one(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    async def grow(parsed: Parsed) -> None:
        for end in range(size, len(TEXT) + size, size):
            await parsed.grow(TEXT[:end])
        await parsed.grow(TEXT, is_whole=True)

    parsed = Parsed(monkeypatch)
    asyncio.run(grow(parsed))
    parsed.close()
    assert parsed.shown == json.loads(json.dumps(Markdown().nodes(TEXT, 60.0)))


def test_a_definition_far_below_still_makes_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "See [this].\n\nMore.\n\n[this]: https://example.org"

    async def grow(parsed: Parsed) -> None:
        await parsed.grow(text[:20])
        await parsed.grow(text, is_whole=True)

    parsed = Parsed(monkeypatch)
    asyncio.run(grow(parsed))
    parsed.close()
    assert parsed.shown[0][3] == ["a", {"href": "https://example.org"}, "this"]


def test_finished_blocks_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "A paragraph of forty characters, or so.\n\n" * 100

    async def grow(parsed: Parsed) -> None:
        for end in range(0, len(text), 40):
            await parsed.grow(text[:end])

    parsed = Parsed(monkeypatch)
    asyncio.run(grow(parsed))
    parsed.close()
    assert parsed.num_parsed < 4 * len(text)
