"""Highlights code with Pygments, in a process that can be killed.

    spans = await highlighter().spans([("python", code), ...], run_fairly)

A lexer may work for hours between two tokens, and holds the interpreter's lock: only killing its
process ends it (`mlxserve.helpers.piecewise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.helpers.piecewise import Piecewise
from mlxserve.helpers.work import RunFairly

Node: TypeAlias = "str | list[Any]"
Block: TypeAlias = tuple[str, str]  # (lexer, code)
Spans: TypeAlias = list[Node] | None

MAX_CHARACTERS = 50_000  # of a block; a longer one is not coloured
MAX_SECONDS = 2.0  # of a processor, for all blocks of a request; what is left then is not coloured
BLOCK_SECONDS = 1.0  # of a processor, for one; 50,000 characters take 0.1 to 0.4
_MEMORY = 256 << 20  # bytes
_CHARACTERS_PER_SECOND = 400_000  # on two busy cores of an x86 server


def new_helper() -> Helper:
    return Helper(
        "mlxserve.api.page.highlight_worker:HighlightWorker",
        name="code",
        memory=_MEMORY,
        niceness=BEHIND_THE_ENGINE,
    )


class Highlighter:
    """The helper process, started with the first code."""

    def __init__(self, helper: Helper | None = None) -> None:
        self._helper = helper or new_helper()

    async def spans(self, blocks: Sequence[Block], run_fairly: RunFairly) -> list[Spans]:
        """Return the nodes of each block; None for one that was not highlighted in time.

        Raises the errors of `run_fairly`.
        """
        seconds = sum(len(code) for _, code in blocks) / _CHARACTERS_PER_SECOND
        pieces = Piecewise(self._helper, "runs", BLOCK_SECONDS, MAX_SECONDS)
        runs = await pieces.results(blocks, run_fairly, seconds=seconds)
        return [each and _spans(code, each) for (_, code), each in zip(blocks, runs, strict=True)]


def _spans(code: str, runs: Sequence[tuple[str | None, int]]) -> list[Node]:
    """Split the code into elements for its highlighted runs, and texts."""
    nodes: list[Node] = []
    at = 0
    for name, length in runs:
        text = code[at : at + length]
        nodes.append(["span", {"class": name}, text] if name else text)
        at += length
    return [*nodes, code[at:]] if at < len(code) else nodes


@cache
def highlighter() -> Highlighter:
    """Return the highlighter of this process."""
    return Highlighter()
