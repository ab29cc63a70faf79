"""Answers do not change while the cache is resized, and the memory follows its size."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve import (
    LLM,
    AsyncLLM,
    InvalidParameter,
    OutOfMemory,
    PagesPromised,
    PrefixQuotaExceeded,
    PromptTooLong,
    SamplingParams,
)
from mlxserve.build import build_engine, build_text_model
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.hub.files import find_model
from mlxserve.model import attention
from mlxserve.request import Request
from mlxserve.system import machine
from mlxserve.system.device_memory import DeviceMemory
from tests.emulated import emulated_backend

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
QUESTIONS = [
    "What is 17 + 25?",
    "Tell me a short story about a small boat and a lighthouse.",
    "Count from one to ten, please.",
]
OPTIONS: Any = {"num_pages": 64, "page_size": 16, "disable_log_stats": True}


async def answers(llm: AsyncLLM, sizes: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Tokens of three concurrent answers, while the cache is resized to each of `sizes`."""
    # Token ids: texts are encoded elsewhere first, and might not arrive together.
    streams = [llm.stream(list(question.encode()[:50]), GREEDY) for question in QUESTIONS]
    tokens: list[list[int]] = [[] for _ in streams]
    changes = iter(sizes)

    async def collect(number: int) -> None:
        async for delta in streams[number]:
            tokens[number].extend(delta.token_ids)
            if number == 0 and (size := next(changes, None)) is not None:
                resized = await llm.resize_cache(size)
                assert (resized.num_pages, llm.stats().pool.num_pages) == (size, size)
                await llm.check()

    await asyncio.gather(*(collect(number) for number in range(len(streams))))
    assert next(changes, None) is None
    return [tuple(one) for one in tokens]


@pytest.mark.usefixtures("unhurried_disk")
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
def test_answers_are_the_same_while_the_cache_grows_and_shrinks(mode: str, tmp_path: Any) -> None:
    swap: dict[str, Any] = {"preemption_mode": mode, "disk_cache_dir": str(tmp_path)}

    async def scenario() -> None:
        llm = AsyncLLM(**OPTIONS, **swap)
        wanted = await answers(llm)
        await llm.add_prefix("rules", "You answer in one word. " * 12)
        await llm.resize_cache(64)  # no change, but it brings the stats up to date
        num_pinned = llm.stats().pool.num_pinned
        assert num_pinned > 2
        few = 2 * num_pinned
        assert await answers(llm, [30, 100, few, 64, few + 1, 24, few, 22, 40] * 2) == wanted
        assert llm.stats().scheduler.num_preemptions > 0, (
            "there was too little room for all of them"
        )
        assert (llm.stats().disk.num_written > 0) == (mode == "swap")
        await llm.resize_cache(few)
        one = await llm.generate("Yes or no?", GREEDY, prefix_name="rules")
        assert one.usage.cached_tokens >= 16 * (num_pinned - 1), "it was computed again before"
        assert llm.stats().pool.num_pinned == num_pinned
        await llm.check()
        llm.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_emulated_kernels_continue_in_resized_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(sizes: Sequence[int]) -> list[tuple[int, ...]]:
        llm = AsyncLLM(**OPTIONS)
        try:
            return await answers(llm, sizes)
        finally:
            llm.close()

    wanted = asyncio.run(scenario(()))
    monkeypatch.setattr(
        attention, "select_backends", lambda _name, layers: [emulated_backend()] * len(layers)
    )
    assert asyncio.run(scenario((20, 100, 9, 64, 10, 30, 9, 22))) == wanted


def test_the_context_follows_the_cache_and_what_cannot_be_changes_nothing() -> None:
    with LLM(**{**OPTIONS, "num_pages": 8}) as llm:
        assert llm.max_model_len == 128
        with pytest.raises(PromptTooLong):
            llm.generate([list(range(5, 150))], GREEDY, use_tqdm=False)
        assert llm.resize_cache(32).max_model_len == llm.max_model_len == 512
        (long,) = llm.generate([list(range(5, 150))], GREEDY, use_tqdm=False)
        assert len(long.token_ids) == 40
        llm.add_prefix("p", [5] * 64)
        for num_pages, error in (
            (1, InvalidParameter),
            (True, InvalidParameter),
            ("64", InvalidParameter),
            (10**400, InvalidParameter),
            (4, PrefixQuotaExceeded),
        ):
            with pytest.raises(error):
                llm.resize_cache(num_pages)  # type: ignore[arg-type]
        gib = 512 if machine.is_metal() else 1024  # weights stay in bfloat16, or become float32
        with pytest.raises(
            OutOfMemory, match=rf"16777216 pages need {gib}.00 GiB.*Ask for at most "
        ):
            llm.resize_cache(1 << 24)
        assert (llm.max_model_len, llm.stats().pool.num_pages) == (512, 32)
        llm.check()
        (again,) = llm.generate([list(range(5, 150))], GREEDY, use_tqdm=False)
        assert again.token_ids == long.token_ids


def test_pages_that_an_answer_was_promised_are_not_taken_from_it() -> None:
    async def scenario() -> None:
        llm = AsyncLLM(**OPTIONS)
        stream = llm.stream("x" * 40, SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        with pytest.raises(PagesPromised, match=r"12 pages would leave 192 tokens for a request"):
            await llm.resize_cache(12)
        await stream.aclose()
        llm.close()

    asyncio.run(scenario())


def test_a_resize_that_the_share_of_a_key_refuses_loses_no_answer_and_no_prefix() -> None:
    """A prefix of a key is pinned and another one is computed, beside three answers."""
    rules, more = [5 + n % 200 for n in range(144)], [7 + n % 150 for n in range(100)]
    of_key: Any = {"client": "key", "max_share": 0.5}
    options = {**OPTIONS, "num_pages": 90, "max_num_batched_tokens": 16, "max_num_seqs": 8}

    async def answer(chat: TextModel, prompt: list[int]) -> Any:
        [found] = await (await chat.writer.submit(prompt, GREEDY)).whole()
        return found

    async def scenario(chat: TextModel) -> None:
        prompts = [[30 + number] * 20 for number in range(3)]
        wanted = [(await answer(chat, prompt)).token_ids for prompt in prompts]
        await chat.writer.prefixes.add("rules", rules, **of_key)
        others = [asyncio.create_task(answer(chat, prompt)) for prompt in prompts]
        adding = asyncio.create_task(chat.writer.prefixes.add("more", more, **of_key))
        while not any(r.num_prompt == 100 for r in (await chat.engine.snapshot()).requests):
            assert not adding.done()
        with pytest.raises(
            PrefixQuotaExceeded, match="of 16 pages, but of 36 pages it may have only 9"
        ):
            await chat.engine.resize_cache(36)
        await chat.engine.check()
        await adding
        assert [(await one).token_ids for one in others] == wanted
        pool = (await chat.engine.snapshot()).stats.pool
        assert (pool.num_pages, pool.num_pinned) == (90, 16)
        await chat.engine.resize_cache(64)
        while (snapshot := await chat.engine.snapshot()).requests:
            pass  # they compute the prefixes again
        assert snapshot.stats.pool.num_pinned == 16

    chat = build_text_model(EngineConfig().with_options(**options))
    try:
        asyncio.run(asyncio.wait_for(scenario(chat), 60))
    finally:
        chat.close()


@pytest.mark.parametrize("num_pages", [256, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_smaller_cache_frees_memory(num_pages: int) -> None:
    def active() -> int:
        return mx.get_active_memory() + mx.get_cache_memory()

    async def scenario(chat: TextModel) -> None:
        gc.collect()  # what earlier tests left
        whole = (await chat.engine.snapshot()).memory.kv_cache
        answer = await chat.writer.submit(chat.codec.encode("Hello"), GREEDY)
        assert [delta async for delta in answer]
        before = active()
        await chat.engine.resize_cache(num_pages // 4)
        smaller = active()
        assert smaller <= before - 0.74 * whole, f"{whole=} {before=} {smaller=}"
        await chat.engine.resize_cache(num_pages)
        await chat.engine.resize_cache(num_pages // 4)
        assert active() == pytest.approx(smaller, abs=1 << 16)
        assert (await chat.engine.snapshot()).memory.kv_cache == whole // 4

    chat = build_text_model(EngineConfig().with_options(**{**OPTIONS, "num_pages": num_pages}))
    try:
        asyncio.run(scenario(chat))
    finally:
        chat.close()


def test_windows_stay_in_the_memory_of_a_smaller_cache(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share it with the other pages: an idle model that makes room gives up both."""
    monkeypatch.setattr(machine, "memory", lambda: DeviceMemory(8 << 30, 16 << 20))
    config = EngineConfig(attention_backend="cpu").with_options(
        max_num_seqs=64, max_num_batched_tokens=64
    )
    engine, _ = build_engine(config, find_model(str(model_folder("gemma3_text")), None))
    whole = engine.monitor.snapshot().memory.kv_cache
    engine.resize_cache(20)
    planned = engine.monitor.stats().planned.pool
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.add_all([Request(str(n), [n + 5] * 60, params) for n in range(20)])
    sizes = {engine.monitor.snapshot().memory.kv_cache}
    while engine.has_work:
        engine.step()
        sizes.add(engine.monitor.snapshot().memory.kv_cache)
    assert engine.monitor.stats().windows.num_evicted > 0, "windows were used"
    assert max(sizes) <= planned < whole
