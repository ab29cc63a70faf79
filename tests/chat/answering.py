"""Answers of a chat, asked for outside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from mlxserve.chat.text_model import TextModel
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.text.deltas import Delta

T = TypeVar("T")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def collect(chat: TextModel, prompt: Sequence[int], params: SamplingParams) -> list[Delta]:
    return [delta async for delta in await chat.writer.submit(prompt, params)]
