"""Answers and vectors of a model with adapters on ranks.

python -m tests.ranks.adapted FOLDER ADAPTERS PROMPTS OPTIONS
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxserve import SamplingParams
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.request import Pooling
from mlxserve.system import machine
from tests.ranks.child import print_found, run_child

NUM_TOKENS = 10
_PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)

Found = dict[str, Any]


async def _answers(
    config: EngineConfig, names: Sequence[str | None], prompts: list[list[int]]
) -> Found:
    from mlxserve.ranks.run import build_text_model_of_ranks

    chat = build_text_model_of_ranks(config)
    try:
        return await _asked(chat, names, prompts)
    finally:
        chat.close()


async def _asked(chat: TextModel, names: Sequence[str | None], prompts: list[list[int]]) -> Found:
    asked = [(name, prompt) for prompt in prompts for name in names]

    async def ask(name: str | None, prompt: list[int]) -> list[int]:
        stream = await chat.with_adapter(name).require_writer().submit_all([prompt], _PARAMS)
        [output] = await stream.whole()
        return list(output.token_ids)

    found: Found = {"alone": [await ask(*one) for one in asked]}
    assert await chat.engine.reset_prefix_cache()
    found["together"] = await asyncio.gather(*(ask(*one) for one in asked))
    await chat.engine.check()
    found["vectors"] = []
    for name in names:
        vectors = chat.with_adapter(name).vectors
        assert vectors is not None
        [vector] = await vectors.embed([prompts[-1]], pooling=Pooling.MEAN)
        found["vectors"].append([round(number, 4) for number in vector[:16]])
    return found


def adapted(
    folder: Path, adapters: Mapping[str, str], prompts: list[list[int]], **options: Any
) -> Found:
    """In this process, which must be the only rank, or be a process of its own."""
    given: dict[str, Any] = {
        "num_pages": 60,
        "page_size": 16,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "disable_log_stats": True,
    }
    machine.import_mlx_lm()
    chosen = tuple(f"{name}={place}" for name, place in adapters.items())
    config = EngineConfig().with_options(model=str(folder), adapter=chosen, **given, **options)
    return asyncio.run(_answers(config, [None, *adapters], prompts))


def adapted_on_ranks(
    folder: Path, adapters: Mapping[str, str], prompts: list[list[int]], **options: Any
) -> Found:
    """In processes of their own."""
    arguments = str(folder), dict(adapters), prompts, options
    found: Found = run_child("tests.ranks.adapted", *arguments)
    return found


if __name__ == "__main__":
    folder, adapters, prompts, options = map(json.loads, sys.argv[1:])
    print_found(adapted(Path(folder), adapters, prompts, **options))
