"""Patches of growing texts: whoever applies them has the blocks of the whole text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest

from mlxserve.api.chats.growing_blocks import GrowingBlocks
from mlxserve.api.chats.patches import patches
from mlxserve.api.page.markdown import Markdown
from mlxserve.helpers.fair_executor import FairExecutor
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


class InThisProcess:
    """In the place of a Renderer. Colours are tested with the page."""

    def __init__(self) -> None:
        self.num_parsed = 0  # characters
        self._parser = Markdown()

    async def growing(self, text: str, _fairly: Any) -> Any:
        self.num_parsed += len(text)
        return self._parser.growing(text, 60.0)

    async def nodes(self, texts: list[str], _fairly: Any) -> Any:
        return [self._parser.nodes(text, 60.0) for text in texts]

    async def highlight(self, nodes: Any, _fairly: Any) -> None:
        assert isinstance(nodes, list)


@dataclass
class Grown:
    """What a follower has, and how many characters were parsed for it."""

    shown: list[Any]
    num_parsed: int


def grown(texts: Iterable[str], whole: str | None = None) -> Grown:
    """Let a text grow, and end as `whole`."""
    renderer, shown = InThisProcess(), list[Any]()

    async def grow(executor: FairExecutor) -> None:
        blocks = GrowingBlocks(renderer)  # type: ignore[arg-type]
        fairly = partial(executor.run, "")
        for text in texts:
            change = await blocks.advance(text, fairly)
            apply(shown, json.loads(change.patches or b"[]"))
        if whole is not None:
            change = await blocks.advance(whole, fairly, is_whole=True)
            apply(shown, json.loads(change.patches or b"[]"))

    with closing(FairExecutor()) as executor:
        asyncio.run(grow(executor))
    return Grown(shown, renderer.num_parsed)


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_a_growing_text_ends_as_the_whole_one(size: int) -> None:
    ends = range(size, len(TEXT) + size, size)
    found = grown((TEXT[:end] for end in ends), TEXT)
    assert found.shown == json.loads(json.dumps(Markdown().nodes(TEXT, 60.0)))


def test_a_definition_far_below_still_makes_a_link() -> None:
    text = "See [this].\n\nMore.\n\n[this]: https://example.org"
    found = grown([text[:20]], text)
    assert found.shown[0][3:4] == [["a", {"href": "https://example.org"}, "this"]]


def test_finished_blocks_are_not_parsed_again() -> None:
    text = "A paragraph of forty characters, or so.\n\n" * 100
    found = grown(text[:end] for end in range(0, len(text), 40))
    assert found.num_parsed < 4 * len(text)
