"""Grammars without end beside other answers, with a real engine and random weights."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxserve.build import build_text_model
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import GrammarFailed, HelperUnavailable, InvalidParameter
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.text.deltas import Delta
from tests.text.guidance.call_formats import LATE
from tests.text.guidance.test_grammars import HOSTILE
from tests.waiting import until

pytestmark = pytest.mark.slow

EARLY = (StructureKind.REGEX, "(a{1000}){1000}")  # too large, and refused before the 2 s
FIRST = [*HOSTILE, EARLY]


@pytest.fixture
def chat(write_model: Callable[..., Path], tmp_path: Any) -> Iterator[TextModel]:
    built = build_text_model(
        EngineConfig().with_options(
            model=str(write_model(tmp_path, "llama")),
            num_pages=256,
            page_size=16,
            disable_log_stats=True,
        )
    )
    yield built
    built.close()


async def ask(
    chat: TextModel,
    structure: Structure | None = None,
    *,
    seen: list[float] | None = None,
    **params: Any,
) -> tuple[int, ...]:
    sampling = SamplingParams(**{"max_tokens": 60, "seed": 1, **params}, structure=structure)
    deltas: list[Delta] = []
    async for delta in await chat.writer.submit(chat.codec.encode("Hello there"), sampling):
        deltas.append(delta)
        if seen is not None:
            seen.append(time.monotonic())
    return tuple(token for delta in deltas for token in delta.token_ids)


@asynccontextmanager
async def plain_stream(chat: TextModel) -> AsyncIterator[list[float]]:
    """The times of the tokens of an unguided client that asks again and again."""
    seen: list[float] = []

    async def go() -> None:
        while True:
            await ask(chat, seen=seen, max_tokens=300, ignore_eos=True)

    task = asyncio.create_task(go())
    await until(lambda: len(seen) >= 20)
    yield seen
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def seconds_of_children() -> float:
    """CPU time of the processes that compile grammars and compute masks."""
    return sum(child.cpu_times().user for child in psutil.Process().children())


def seconds_of_ended(work: Callable[[], object]) -> float:
    """CPU time of the processes that end while it works, from their start."""
    before = os.times()
    work()
    return os.times().children_user - before.children_user


async def fail(chat: TextModel, kind: StructureKind, source: str) -> Exception:
    for _ in range(_MAX_TRIES):
        try:
            await ask(chat, Structure(kind, source, "structured_outputs"))
        except HelperUnavailable:
            continue  # its compiler got no processor on a busy machine: "send the request again"
        except (InvalidParameter, GrammarFailed) as error:
            return error
        raise AssertionError("it was followed to its end")
    raise AssertionError("its compiler never got a processor")


_MAX_TRIES = 5
NAMES = Structure(StructureKind.REGEX, "([A-C][a-f]{2,5},){20}")


@pytest.mark.long
def test_a_mask_without_end_fails_its_answer_and_no_other_waits_or_changes(chat: TextModel) -> None:
    async def scenario() -> None:
        alone = await ask(chat, NAMES)
        async with plain_stream(chat) as seen:
            before = len(seen)
            bad = asyncio.create_task(fail(chat, StructureKind.GRAMMAR, LATE))
            neighbour = asyncio.create_task(ask(chat, NAMES))
            error = await bad
            assert isinstance(error, GrammarFailed)
            assert "took longer than 2 s" in str(error)
            # It blocked the process of the masks for 2 s; these are the steps meanwhile. A blocked
            # stream has at most the two steps that were under way.
            assert len(seen) - before > 5
            assert await neighbour == alone
        assert await ask(chat, NAMES) == alone
        with pytest.raises(InvalidParameter, match="took longer than 2 s"):  # and not again
            await ask(chat, Structure(StructureKind.GRAMMAR, LATE, "structured_outputs"))

    asyncio.run(scenario())


@pytest.mark.long
def test_an_answer_can_be_aborted_while_its_mask_is_computed(chat: TextModel) -> None:
    async def scenario() -> None:
        async with plain_stream(chat):
            task = asyncio.create_task(fail(chat, StructureKind.GRAMMAR, LATE))
            await until(lambda: chat.engine.stats().scheduler.num_running == 2)
            num_steps = chat.engine.stats().engine.num_steps
            await until(lambda: chat.engine.stats().engine.num_steps > num_steps + 20)
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: chat.engine.stats().scheduler.num_running <= 1)
        assert await ask(chat, NAMES)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        pytest.param(
            *source,
            marks=() if name == "schema" else pytest.mark.long,
            id=name,
        )
        for name, source in zip(("grammar", "schema", "other", "regex"), FIRST, strict=True)
    ],
)
def test_a_source_without_end_is_refused_while_the_others_go_on(
    chat: TextModel, kind: StructureKind, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a processor that the stream leaves to others: 2 s of it took half a minute.
    monkeypatch.setattr("mlxserve.text.guidance.grammars.TRIES", (0.02, 0.2, 0.5))

    async def scenario() -> None:
        alone = await ask(chat, NAMES)
        async with plain_stream(chat) as seen:
            neighbour = asyncio.create_task(ask(chat, NAMES))
            for number in range(_MAX_TRIES):
                before = len(seen)
                error = await fail(chat, kind, source + " " * number)
                assert isinstance(error, InvalidParameter)
                assert error.name == "structured_outputs"
                if len(seen) - before > 5:
                    break
            else:
                raise AssertionError("a blocked stream has the two steps that were under way")
            assert await neighbour == alone
            other = Structure(StructureKind.REGEX, "[a-f]{3}", "structured_outputs")
            assert await ask(chat, other)

    asyncio.run(scenario())


@pytest.mark.long
def test_closing_does_not_wait_for_a_grammar(chat: TextModel) -> None:
    async def scenario() -> None:
        before = seconds_of_children()
        tasks = [asyncio.create_task(fail(chat, kind, source)) for kind, source in HOSTILE]
        tasks.append(asyncio.create_task(fail(chat, StructureKind.GRAMMAR, LATE)))
        await until(lambda: seconds_of_children() > before + 0.2)
        of_children = await asyncio.to_thread(seconds_of_ended, chat.close)
        assert of_children < 6, "four of them in line would take 2 s each"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_plain_stream_beside_hostile_grammars_has_no_long_gap(chat: TextModel) -> None:
    """A source that blocked the stream would hold it for its 2 s."""

    async def scenario() -> None:
        await ask(chat, NAMES)
        longest = []
        async with plain_stream(chat) as seen:
            for kind, source in (*FIRST, (StructureKind.GRAMMAR, LATE)):
                before = len(seen) - 1
                await fail(chat, kind, source)
                longest.append(max(b - a for a, b in pairwise([*seen[before:], time.monotonic()])))
        print("longest gaps, s:", longest)
        assert max(longest) < 1

    asyncio.run(scenario())
