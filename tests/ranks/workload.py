"""What an engine of one rank or several answers: everything that a rank could get wrong, in order.

`python -m tests.ranks.workload FOLDER OPTIONS` prints the answers. Started by a launcher as another rank than 0, it
follows.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mlxserve import SamplingParams
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.ranks.environment import own_rank
from mlxserve.request import Pooling
from mlxserve.system import machine
from mlxserve.system.machine import free_ports
from tests.assistants import always_drafting
from tests.ranks.child import print_found, run_child

PAGES = 40  # of 16 tokens: too few for all requests at once
_NUM_TOKENS = 12

Answers = dict[str, Any]


def _prompts(vocabulary: int) -> list[list[int]]:
    """Six prompts, of which three share two pages and a half."""
    draw = random.Random(11)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    shared = tokens(40)
    return [shared + tokens(n) for n in (3, 9, 24)] + [tokens(n) for n in (1, 33, 70)]


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, **options)


async def _answers(config: EngineConfig, vocabulary: int) -> Answers:
    from mlxserve.ranks.run import build_text_model_of_ranks

    chat = build_text_model_of_ranks(config)

    async def ask(prompt: Sequence[int], params: SamplingParams) -> list[Any]:
        stream = await chat.writer.submit_all([prompt], params)
        outputs = await stream.whole()
        return [
            [list(one.token_ids), [round(item.logprob, 3) for item in one.logprobs or ()]]
            for one in outputs
        ]

    prompts = _prompts(vocabulary)
    greedy = _params(temperature=0)
    seeded = _params(temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.2)
    guided = SamplingParams(
        max_tokens=_NUM_TOKENS,
        temperature=0,
        structure=Structure(StructureKind.REGEX, "[a-c]{4,9}"),
    )
    found: Answers = {}
    try:
        found["alone"] = await ask(prompts[0], greedy)
        found["together"] = await asyncio.gather(*(ask(prompt, greedy) for prompt in prompts))
        found["from the cache"] = await ask(prompts[2], greedy)
        found["seeded"] = await asyncio.gather(*(ask(prompt, seeded) for prompt in prompts))
        found["two answers"] = await ask(prompts[5], _params(temperature=0.7, seed=3, n=2))
        found["logprobs"] = await ask(prompts[4], _params(temperature=0, logprobs=2))
        found["guided"] = await ask(prompts[3], guided)
        [vector] = await chat.vectors.embed([prompts[5]], pooling=Pooling.MEAN)
        found["embedding"] = [round(number, 4) for number in vector[:16]]
        running = asyncio.gather(
            *(ask(prompt, _params(temperature=0, seed=1)) for prompt in prompts),
            ask(prompts[0], seeded),
        )
        await asyncio.sleep(0)
        await chat.engine.resize_cache(PAGES + 24)
        await chat.engine.resize_cache(PAGES - 12)
        found["resized"] = await running
        long = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
        found["preempted"] = await asyncio.gather(*(ask(prompt, long) for prompt in prompts))
        await chat.engine.check()
        stats = chat.engine.stats()
        found["num_preemptions"] = stats.scheduler.num_preemptions
        found["ranks"] = sorted(stats.ranks.num_frames)
        found["window_pages"] = [stats.windows.num_pages]
        found["num_swapped"] = stats.scheduler.swapped_tokens
        found["drafts"] = [stats.scheduler.drafted_tokens, stats.scheduler.accepted_tokens]
    finally:
        chat.close()
    return found


def answers(
    folder: Path,
    *,
    emulated: bool = False,
    drafted: bool = False,
    swapped: bool = False,
    vocabulary: int = 500,
    **options: Any,
) -> Answers:
    """In this process, which must be the only rank, or be a process of its own.

    `emulated`: by the Metal kernels in the emulator, which write in place
    `drafted`: with as many drafted tokens in each step as there is room for
    `vocabulary`: number of tokens to choose prompts from
    `swapped`: what is on disk is read, whether or not computing it is faster
    """
    machine.import_mlx_lm()
    if emulated:
        _use_emulator()
    if swapped:
        setattr(DiskCache, "pays", lambda *_: True)  # noqa: B010
    config = EngineConfig().with_options(
        **{
            "model": str(folder),
            "num_pages": PAGES,
            "page_size": 16,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 48,
            "disable_log_stats": True,
            "distributed_timeout_seconds": 120.0,
            **options,
        }
    )
    if own_rank():
        from mlxserve.ranks.run import run_worker

        run_worker(config)
    with always_drafting() if drafted else nullcontext():
        return asyncio.run(_answers(config, vocabulary))


def _use_emulator() -> None:
    """For the life of this process."""
    from mlxserve.model import attention
    from tests.emulated import emulated_backend

    backend = emulated_backend()
    setattr(attention, "select_backends", lambda _name, shapes: (backend,) * len(shapes))  # noqa: B010


def answers_of_ranks(folder: Path, launcher: Sequence[str] = (), **options: Any) -> Answers:
    """In processes of their own: rank 0 starts the others, or `launcher` starts all."""
    found: Answers = run_child("tests.ranks.workload", str(folder), options, launcher=launcher)
    return found


def launcher(size: int) -> list[str]:
    """mlx.launch for ranks on this machine."""
    program = Path(sys.executable).with_name("mlx.launch")
    return [str(program), "-n", str(size), "-p", str(free_ports(1)[0]), "--backend", "ring", "--"]


if __name__ == "__main__":
    folder, options = map(json.loads, sys.argv[1:])
    print_found(answers(Path(folder), **options))
