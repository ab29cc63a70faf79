"""What an engine of several ranks, or of one, finds on disk after a restart, and after one rank lost a part.

`python -m tests.ranks.on_disk FOLDER PLAN OPTIONS` prints what it found. A plan is a list of acts, of which
each that asks adds [tokens, tokens found in the cache, read from disk, from the store] of every prompt:

    ask          all prompts, one after the other
    forget       what is in memory
    settle       until all that is cached is on disk
    lose RANK    every second record of a rank
    damage RANK  the same, cut off
    name, named  a prefix; prompts that begin with it
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxserve import SamplingParams
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.engine.engine import Engine
from mlxserve.model.dense_text import TextWork
from mlxserve.system import machine
from tests.ranks.child import print_found, run_child

PAGE = 16
NUM_TOKENS = 8
PREFIX = "prefix"

Found = list[list[Any]]


def prompts() -> list[list[int]]:
    """Three prompts, of which two share four pages."""
    draw = random.Random(3)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(500) for _ in range(length)]

    shared = tokens(4 * PAGE)
    return [shared + tokens(2 * PAGE + 5), shared + tokens(PAGE), tokens(5 * PAGE + 1)]


class Session:
    """One engine that acts."""

    def __init__(self, chat: TextModel, base: Path) -> None:
        self._chat = chat
        self._base = base
        self.found: Found = []

    async def act(self, name: str) -> None:
        what, _, rank = name.partition(" ")
        match what:
            case "ask":
                self.found.append([await self._ask(prompt) for prompt in prompts()])
            case "named":
                self.found.append([await self._ask(prompt, PREFIX) for prompt in prompts()[:2]])
            case "name":
                await self._chat.require_writer().prefixes.add(PREFIX, prompts()[2][: 2 * PAGE])
            case "forget":
                assert await self._chat.engine.reset_prefix_cache()
            case "settle":
                await self._settle()
            case "lose" | "damage":
                for file in (await self._records(int(rank)))[::2]:
                    if what == "lose":
                        file.unlink()
                    else:
                        file.write_bytes(file.read_bytes()[:-3])
        await self._chat.engine.check()

    async def _ask(self, prompt: Sequence[int], prefix: str | None = None) -> list[Any]:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        options = RequestOptions(prefix_name=prefix)
        stream = await self._chat.require_writer().submit_all([prompt], params, options)
        [output] = await stream.whole()
        cache = output.usage.cache
        assert cache is not None
        counts = cache.num_tokens, cache.num_from_disk, cache.num_from_store
        return [list(output.token_ids), *counts]

    async def _records(self, rank: int) -> list[Path]:
        """The records of a rank, in the order of their names."""
        own = await on_engine_thread(self._chat, lambda engine: engine.disk_folder)
        files = self._base.glob("*/*/*.page")
        return sorted(file for file in files if (file.parent.parent == own) == (rank == 0))

    async def _settle(self) -> None:
        """Write what is cached, until every rank has its part."""

        def write(engine: Engine) -> bool:
            while engine.idle():
                pass
            [disk] = _disks
            return all(tier.flush(60) for tier in (disk.disk, disk.store) if tier is not None)

        assert await on_engine_thread(self._chat, write)


class _Told(TextWork[list[Any]]):
    """Work that is done as soon as it begins."""

    def __init__(self, result: Any) -> None:
        self._result = [result]

    def advance(self, num_tokens: int) -> list[Any]:
        return self._result

    def release(self) -> None:
        """Nothing is held."""


async def on_engine_thread(chat: TextModel, work: Callable[[Engine], Any]) -> Any:
    [result] = await chat.engine.compute("", 1, lambda engine: _Told(work(engine)))
    return result


_disks: list[DiskCache] = []  # of this process's engine


def _notice_disks() -> None:
    """Keep every disk cache that is opened from now on in `_disks`."""
    begin = DiskCache.__init__

    def noticed(self: DiskCache, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        _disks.append(self)

    setattr(DiskCache, "__init__", noticed)  # noqa: B010


async def _run(config: EngineConfig, plan: Sequence[str]) -> Found:
    from mlxserve.ranks.run import build_text_model_of_ranks

    chat = build_text_model_of_ranks(config)
    try:
        session = Session(chat, Path(config.disk_cache_dir or ""))
        await chat.require_writer().prefixes.restore()
        for name in plan:
            await session.act(name)
        return session.found
    finally:
        chat.close()


def found_on_disk(folder: Path, plan: Sequence[str], **options: Any) -> Found:
    """In this process, which must be the only rank, or be a process of its own."""
    machine.import_mlx_lm()
    _notice_disks()
    # What is read is not what this machine happens to read faster than it computes.
    setattr(DiskCache, "pays", lambda *_: True)  # noqa: B010
    setattr(DiskCache, "patience", lambda *_: 60.0)  # noqa: B010
    config = EngineConfig().with_options(
        **{
            "model": str(folder),
            "num_pages": 64,
            "page_size": PAGE,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "disk_cache_size": 1.0,
            "disable_log_stats": True,
            "distributed_timeout_seconds": 120.0,
            **options,
        }
    )
    return asyncio.run(_run(config, plan))


def found_by_ranks(folder: Path, plan: Sequence[str], **options: Any) -> Found:
    """In processes of their own."""
    found: Found = run_child("tests.ranks.on_disk", str(folder), list(plan), options)
    return found


if __name__ == "__main__":
    folder, plan, options = map(json.loads, sys.argv[1:])
    print_found(found_on_disk(Path(folder), plan, **options))
