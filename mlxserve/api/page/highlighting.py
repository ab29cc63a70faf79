"""Highlights code with Pygments, in a process that can be killed.

    spans = await highlighter().spans([("python", code), ...], run_fairly)

A lexer may work for hours between two tokens, and holds the interpreter's lock: only killing its
process ends it. So code is first highlighted among other short work
(`mlxserve.helpers.fair_executor`) if the process is idle, and among longer jobs if it has to be
started or is busy: short work never waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

from mlxserve.helpers.errors import HelperKilled, JobFailed
from mlxserve.helpers.fair_executor import MEDIUM_SECONDS, SHORT_SECONDS, Lane, RunFairly, lane_of
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.helpers.job import Job

log = logging.getLogger(__name__)

Node: TypeAlias = "str | list[Any]"
Block: TypeAlias = tuple[str, str]  # (lexer, code)
Spans: TypeAlias = list[Node] | None

MAX_CHARACTERS = 50_000  # of a block; a longer one is not coloured
MAX_SECONDS = 2.0  # of a processor, for all blocks of a request; what is left then is not coloured
BLOCK_SECONDS = 1.0  # of a processor, for one; 50,000 characters take 0.1 to 0.4
_MEMORY = 256 << 20  # bytes
_CHARACTERS_PER_SECOND = 400_000  # on two busy cores of an x86 server
_MAX_TRIES = 2  # for blocks after one that had the process ended


def new_helper() -> Helper:
    return Helper(
        "mlxserve.api.page.highlight_worker:HighlightWorker",
        MAX_SECONDS,
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
        done: list[Spans] = []
        seconds = sum(len(code) for _, code in blocks) / _CHARACTERS_PER_SECOND
        if blocks and lane_of(seconds) is Lane.SHORT:
            await run_fairly(seconds, partial(self._try_now, blocks, done))
        for _ in range(_MAX_TRIES):
            if len(done) < len(blocks):
                expected = min(max(seconds, 1.01 * SHORT_SECONDS), MEDIUM_SECONDS)
                await run_fairly(expected, partial(self._wait, blocks, done))
        return [*done, *[None] * (len(blocks) - len(done))]

    def _try_now(self, blocks: Sequence[Block], done: list[Spans]) -> None:
        """Highlight the blocks if the process is running and idle."""
        if self._helper.is_running:
            self._colour(self._helper.begin_if_idle, blocks, done)

    def _wait(self, blocks: Sequence[Block], done: list[Spans]) -> None:
        self._colour(self._helper.begin_in_turn, blocks, done)

    def _colour(
        self, begin: Callable[..., Job | None], blocks: Sequence[Block], done: list[Spans]
    ) -> None:
        """Append the spans of the remaining blocks, up to one that fails."""
        try:
            job = begin("runs", blocks[len(done) :], seconds=BLOCK_SECONDS)
            while job is not None and not job.is_done:
                for runs in job.receive(BLOCK_SECONDS):
                    done.append(runs and _spans(blocks[len(done)][1], runs))
        except (HelperKilled, JobFailed) as error:
            lexer, _ = blocks[len(done)]
            log.info("Code in %s is not coloured: that %s", lexer, error)
            done.append(None)


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
