"""What the engine's thread does between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.request import FinishReason, Output, Request
from mlxserve.sampling_params import SamplingParams
from mlxserve.stats import Stats


class Waiting:
    """An engine of one request, whose every step is only begun when its reader has an output."""

    max_model_len = 4

    def __init__(self) -> None:
        self.tokens_left = 3
        self.live: list[Request] = []
        self.read = threading.Semaphore(0)
        self.in_time: list[bool] = []

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add_all(self, requests: Sequence[Request]) -> None:
        self.live += requests

    def step(self) -> list[Output]:
        self.tokens_left -= 1
        reason = None if self.tokens_left else FinishReason.LENGTH
        outputs = [Output(request.id, (7,), reason, 1, 0, None, ()) for request in self.live]
        if reason is not None:
            self.live.clear()
        return outputs

    def start(self) -> None:
        self.in_time.append(self.read.acquire(timeout=10))

    def stats(self) -> Stats:
        return Stats()

    def abort_all(self) -> list[Output]:
        return []

    def close(self) -> None:
        pass


def test_outputs_are_delivered_before_the_next_step_starts() -> None:
    async def scenario() -> None:
        stand_in: Any = Waiting()
        engine = AsyncEngine(lambda: stand_in)
        stream = await engine.submit(Request("a", [1], SamplingParams(max_tokens=3)))
        tokens = 0
        async for output in stream:
            tokens += len(output.token_ids)
            stand_in.read.release()
        engine.close()
        assert tokens == 3
        assert stand_in.in_time == [True] * 3

    asyncio.run(scenario())
