"""How far a request is, until its answer begins: asked of the server, where it can say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.stats_text import seconds_words
from tui.talk.engine_state import Progress, RequestStage
from tui.talk.errors import ChatError

if TYPE_CHECKING:
    from tui.talk.engine_client import (
        EngineClient,
    )  # with httpx, which the first picture has no time for

_POLL_SECONDS = 0.25


async def watch_progress(engine: EngineClient, answer: LiveAnswer) -> None:
    """Keep `answer.progress` up to date until the first piece, or until it is cancelled."""
    while answer.phase is AnswerPhase.WAITING:
        await asyncio.sleep(_POLL_SECONDS)  # first: most prompts are read by then
        if answer.request_id is None:
            continue
        try:
            live = await engine.requests()
        except ChatError:
            # A server that cannot say; whether the answer itself fails is for its stream to tell.
            return
        answer.progress = next((p for p in live if p.request_id == answer.request_id), None)


_STAGES = {
    RequestStage.QUEUED: "Waiting in the queue",
    RequestStage.LOADING: "Loading what is cached from disk",
    RequestStage.PREFILLING: "Reading the prompt",
    RequestStage.DECODING: "Writing the first words",
}


def stage_words(progress: Progress | None) -> str:
    """What an answer without a word yet is waiting for."""
    return _STAGES[RequestStage.PREFILLING if progress is None else progress.stage]


def waiting_words(progress: Progress | None, seconds: float) -> str:
    """The same with how far that is, and for how long it has been waiting."""
    parts = [stage_words(progress)]
    if (
        progress is not None
        and progress.stage is RequestStage.QUEUED
        and progress.position is not None
    ):
        parts.append(f"number {progress.position}")
    if progress is not None and progress.stage is RequestStage.PREFILLING:
        parts.append(f"{progress.num_computed:,} of {progress.num_to_compute:,} tokens")
    parts.append(seconds_words(seconds) if seconds >= 60 else f"{seconds:.0f} s")
    return ", ".join(parts)
