"""Polls the progress of a request until its first piece, if the server reports it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxserve.history.calls import CallState, ToolRound
from mlxserve.system.terminal_text import one_line
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.stats_text import format_seconds
from tui.talk.engine_state import Progress, RequestStage
from tui.talk.errors import ChatError

if TYPE_CHECKING:
    # Imports httpx, which takes longer than the first picture may.
    from tui.talk.engine_client import EngineClient

_POLL_SECONDS = 0.25


async def watch_progress(engine: EngineClient, answer: LiveAnswer) -> None:
    """Update `answer.progress` until the first piece arrives, or until cancelled."""
    while answer.phase is AnswerPhase.WAITING:
        # Most prompts are computed by then.
        await asyncio.sleep(_POLL_SECONDS)
        if answer.request_id is None:
            continue
        try:
            live = await engine.requests()
        except ChatError:
            # The server does not report progress. A failure of the answer shows in its stream.
            return
        answer.progress = next((p for p in live if p.request_id == answer.request_id), None)


_STAGES = {
    RequestStage.QUEUED: "Waiting in the queue",
    RequestStage.LOADING: "Loading cached pages from disk",
    RequestStage.PREFILLING: "Reading the prompt",
    RequestStage.DECODING: "Starting the answer",
}


def describe_stage(progress: Progress | None) -> str:
    """Describe what an answer without text is waiting for."""
    return _STAGES[RequestStage.PREFILLING if progress is None else progress.stage]


def describe_waiting(progress: Progress | None, seconds: float) -> str:
    """Describe it with its progress and the time waited."""
    parts = [describe_stage(progress)]
    if (
        progress is not None
        and progress.stage is RequestStage.QUEUED
        and progress.position is not None
    ):
        parts.append(f"position {progress.position}")
    if progress is not None and progress.stage is RequestStage.PREFILLING:
        parts.append(f"{progress.num_computed:,} of {progress.num_to_compute:,} tokens")
    parts.append(format_seconds(seconds) if seconds >= 60 else f"{seconds:.0f} s")
    return ", ".join(parts)


def describe_calls(rounds: Sequence[ToolRound]) -> str:
    """Name the tool that is running, or waiting for confirmation."""
    calls = rounds[-1].calls if rounds else ()
    call = next((call for call in calls if call.is_open), None)
    if call is None:
        return "Calling"
    words = "Calling" if call.state is CallState.RUNNING else "May it call"
    return f"{words} {one_line(call.name, 50)}{'' if call.state is CallState.RUNNING else '?'}"
