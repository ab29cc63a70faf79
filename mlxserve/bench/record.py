"""A short mixed load on the real engine, recorded: what the simulator's cost model is fitted to."""

from __future__ import annotations

import random
from pathlib import Path

from mlxserve.bench.costs import Fit, fit, read_trace
from mlxserve.bench.trace import StepTrace, record_steps
from mlxserve.build import build_engine
from mlxserve.config import EngineConfig
from mlxserve.engine.engine import Engine
from mlxserve.hub.files import find_model
from mlxserve.request import Request, SamplingParams

PAGE_SIZE = 32
_WARM_UP = 3  # steps
_SHORT = 64  # tokens of the prompts that only decode
_VOCABULARY = 1000


def record(
    model: str, out: Path, *, max_context: int, max_num_seqs: int, max_num_batched_tokens: int
) -> Fit:
    """Run the load, write one line per step to `out`, and fit it.

    Contexts up to `max_context` tokens, up to `max_num_seqs` decodes in a step, and prompts of all
    lengths alone and beside decodes, so that no two of the model's five terms always go together.
    """
    num_pages = 2 * max_context // PAGE_SIZE + 4 * max_num_seqs
    config = EngineConfig(
        model=model,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine, _, vocab_size = build_engine(config, find_model(config.model, config.revision))
    draw = random.Random(0)
    with out.open("w", encoding="utf-8") as file:
        record_steps(engine, StepTrace(file), skip=_WARM_UP)
        for number, (lengths, tokens) in enumerate(_waves(max_context, max_num_seqs)):
            for index, length in enumerate(lengths):
                name = f"record-{number}-{index}"
                engine.add(_request(name, draw, length, tokens, min(_VOCABULARY, vocab_size)))
            _drain(engine)
    return fit(read_trace(out))


def _waves(max_context: int, max_num_seqs: int) -> list[tuple[list[int], int]]:
    """(prompt lengths, tokens of each answer) of requests that arrive together."""
    waves: list[tuple[list[int], int]] = [([_SHORT], 8)]
    context = 128
    while context <= max_context:
        waves.append(([context], 8))  # alone: a prompt's time by its length
        waves.append(([_SHORT] * 3 + [context], 24))  # beside decodes
        context *= 2
    count = 2
    while count <= max_num_seqs:
        waves.append(([_SHORT] * count, 12))  # decodes by their number
        waves.append(([max_context // count] * count, 12))  # and by their contexts
        count *= 2
    return waves


def _request(
    name: str, draw: random.Random, length: int, max_tokens: int, vocab_size: int
) -> Request:
    token_ids = [draw.randrange(vocab_size) for _ in range(length)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(name, token_ids, params)


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
