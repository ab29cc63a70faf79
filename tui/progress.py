"""How far a request is, until its answer begins: asked of the server, where it can say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tui.answer import Answer, Phase
from tui.engine import Progress, Stage
from tui.events import ChatError
from tui.figures import seconds_words

if TYPE_CHECKING:
    from tui.engine_client import (
        EngineClient,
    )  # with httpx, which the first picture has no time for

_POLL_SECONDS = 0.25


async def watch_progress(engine: EngineClient, answer: Answer) -> None:
    """Keep `answer.progress` up to date until the first piece, or until it is cancelled."""
    while answer.phase is Phase.WAITING:
        await asyncio.sleep(_POLL_SECONDS)  # first: most prompts are read by then
        if answer.request_id is None:
            continue
        try:
            live = await engine.requests()
        except ChatError:
            # A server that cannot say; whether the answer itself fails is for its stream to tell.
            return
        answer.progress = next((p for p in live if p.request_id == answer.request_id), None)


def waiting_words(progress: Progress | None, seconds: float) -> str:
    """What an answer without a word yet is waiting for."""
    took = seconds_words(seconds) if seconds >= 60 else f"{seconds:.0f} s"
    if progress is None:
        return f"Reading the prompt, {took}"
    match progress.stage:
        case Stage.QUEUED:
            place = "" if progress.place is None else f", number {progress.place}"
            return f"Waiting in the queue{place}, {took}"
        case Stage.LOADING:
            return f"Loading what is cached from disk, {took}"
        case Stage.PREFILLING:
            counts = f"{progress.num_computed:,} of {progress.num_to_compute:,} tokens"
            return f"Reading the prompt, {counts}, {took}"
        case Stage.DECODING:
            return f"Writing the first words, {took}"
