"""NamedPrefixes: computed once, found by name, and there again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxserve.build import build_text_model
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import PrefixQuotaExceeded, UnknownPrefix
from mlxserve.engine.output_stream import OutputStream
from mlxserve.request import Request
from mlxserve.text.deltas import Delta, Usage
from tests.chat.answering import GREEDY, collect, run
from tests.waiting import until


async def submit_named(chat: TextModel, name: str, prompt: Sequence[int]) -> Delta:
    answer = await chat.writer.submit(prompt, GREEDY, RequestOptions(prefix_name=name))
    return [delta async for delta in answer][-1]


def test_a_named_prefix_is_computed_once_and_found_by_name(chat: TextModel) -> None:
    prefix = list(range(300, 364))
    run(chat.writer.prefixes.add("terms", prefix))
    assert chat.writer.prefixes.sizes() == {"terms": 64}
    usage = run(submit_named(chat, "terms", [9, 9])).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (66, 64)
    usage = run(collect(chat, [*prefix, 9, 9], GREEDY))[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 64
    chat.writer.prefixes.remove("terms")
    with pytest.raises(UnknownPrefix, match=r"terms.*none"):
        run(submit_named(chat, "terms", [9, 9]))


def test_a_named_prefix_is_still_cached_when_everything_else_was_evicted(chat: TextModel) -> None:
    run(chat.writer.prefixes.add("law", list(range(100, 150)), cache_salt="a key's"))
    for number in range(10):
        run(collect(chat, [number] * 400, GREEDY))
    usage = run(submit_named(chat, "law", [1, 2, 3])).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (53, 50)
    assert chat.engine.stats().pool.num_pinned == 4  # the one that it ends in is copied
    run(chat.writer.prefixes.add("law", list(range(16))))  # replaces it
    assert chat.writer.prefixes.sizes() == {"law": 16}
    chat.writer.prefixes.remove("law")
    run(chat.engine.check())
    with pytest.raises(UnknownPrefix, match="law"):
        run(submit_named(chat, "law", [1]))
    run(collect(chat, [1], GREEDY))
    assert chat.engine.stats().pool.num_pinned == 0


def test_a_prefix_beyond_its_share_of_the_cache_is_refused(chat: TextModel) -> None:
    run(chat.writer.prefixes.add("half", list(range(256))))
    with pytest.raises(PrefixQuotaExceeded, match=r"17 more pages.*16 of the 32.*max_pinned_frac"):
        run(chat.writer.prefixes.add("and more", list(range(1, 273))))
    assert chat.writer.prefixes.sizes() == {"half": 256}
    chat.writer.prefixes.remove("half")


def test_a_prefix_whose_caller_is_cancelled_is_not_kept(chat: TextModel) -> None:
    async def scenario() -> None:
        adding = asyncio.create_task(chat.writer.prefixes.add("gone", list(range(300))))
        await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        await collect(chat, [1], GREEDY)

    run(scenario())
    assert chat.writer.prefixes.sizes() == {}
    assert chat.engine.stats().pool.num_pinned == 0


def test_a_prefix_that_was_computed_before_its_caller_left_is_not_kept(
    chat: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may end a request before its caller, who is cancelled, hears that it was queued."""
    submit = chat.engine.submit

    async def late(requests: Sequence[Request]) -> OutputStream:
        stream = await submit(requests)
        await until(lambda: chat.engine.stats().pool.num_pinned > 0)
        stream.close()
        raise asyncio.CancelledError

    async def scenario() -> None:
        monkeypatch.setattr(chat.engine, "submit", late)
        with pytest.raises(asyncio.CancelledError):
            await chat.writer.prefixes.add("gone", list(range(300)))
        monkeypatch.undo()
        await collect(chat, [1], GREEDY)

    run(scenario())
    assert chat.writer.prefixes.sizes() == {}
    assert chat.engine.stats().pool.num_pinned == 0


@pytest.fixture
def build_again(
    model_folder: Callable[[str], Path], tmp_path: Path, unhurried_disk: None
) -> Iterator[Callable[..., TextModel]]:
    """Chats that follow each other over one disk cache."""
    built: list[TextModel] = []

    def build(**options: Any) -> TextModel:
        for before in built:
            before.close()
        defaults = {"model": str(model_folder("llama")), "num_pages": 64, "page_size": 16}
        disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path), "disable_log_stats": True}
        built.append(
            build_text_model(EngineConfig().with_options(**{**defaults, **disk, **options}))
        )
        return built[-1]

    yield build
    for one in built:
        one.close()


LAW = list(range(100, 150))


def test_a_prefix_of_before_the_start_is_known_at_once_and_pinned_later(
    build_again: Callable[..., TextModel],
) -> None:
    run(build_again().writer.prefixes.add("law", LAW, cache_salt="mine"))
    chat = build_again()
    assert chat.writer.prefixes.sizes() == {"law": 50}
    assert chat.engine.stats().pool.num_pinned == 0

    async def ask() -> Usage:
        stream = await chat.writer.submit([7, 8], GREEDY, RequestOptions(prefix_name="law"))
        [output] = await stream.whole()
        return output.usage

    assert run(ask()).cached_tokens == 48  # read from disk, and not pinned yet
    run(chat.writer.prefixes.restore())
    run(chat.engine.check())
    assert chat.engine.stats().pool.num_pinned == 4
    assert run(ask()).cached_tokens == 50  # and its last page, which is not full
    run(chat.writer.prefixes.restore())  # there is nothing left to do
    chat.writer.prefixes.remove("law")
    run(chat.engine.check())
    assert chat.engine.stats().pool.num_pinned == 0
    assert build_again().writer.prefixes.sizes() == {}


@pytest.mark.slow
def test_a_prefix_of_an_unknown_client_waits_for_a_server_that_knows_it(
    build_again: Callable[..., TextModel],
) -> None:
    chat = build_again()
    for number, client in enumerate(("here", "gone")):
        run(chat.writer.prefixes.add(f"{client}/law", [number, *LAW], client=client))
    chat = build_again()
    run(chat.writer.prefixes.restore(lambda client: client == "here"))
    run(chat.engine.check())  # and the stats are those after it
    assert chat.engine.stats().pool.num_pinned == 4
    chat = build_again()
    run(chat.writer.prefixes.restore())
    run(chat.engine.check())
    assert chat.engine.stats().pool.num_pinned == 8


@pytest.mark.slow
def test_a_prefix_that_does_not_fit_any_more_keeps_its_name(
    build_again: Callable[..., TextModel], caplog: pytest.LogCaptureFixture
) -> None:
    run(build_again().writer.prefixes.add("law", LAW))
    chat = build_again(max_pinned_fraction=0)
    run(chat.writer.prefixes.restore())
    assert chat.writer.prefixes.sizes() == {"law": 50}
    assert "'law' is not kept in memory" in caplog.text
    chat = build_again()
    run(chat.writer.prefixes.restore())
    run(chat.engine.check())
    assert chat.engine.stats().pool.num_pinned == 4
