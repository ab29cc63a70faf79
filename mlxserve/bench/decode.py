"""Decode speed in one process next to mlx-lm's own loops on the same weights.

These are `stream_generate` for one answer, and `BatchGenerator` for several with a shared prefix.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlxserve import LLM, SamplingParams
from mlxserve.bench.report import Figure, Report, ratios
from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.engine.engine import Engine
from mlxserve.hub.files import find_model
from mlxserve.request import Request
from mlxserve.system import machine

_PAGE_SIZE = 32
Seconds = tuple[float, float]  # wall time, and CPU time of this process


def bench_decode(model: str, *, pairs: int, context: int, tokens: int) -> Report:
    """Tokens per second after the first, in interleaved pairs; the first pair warms up."""
    from mlx_lm.generate import stream_generate
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    from mlxserve.model.load import read_model

    files = find_model(model)
    dense, _ = read_model(files, is_metal=machine.is_metal())
    tokenizer = load_tokenizer(files.path)
    # Both sides run to the last token.
    tokenizer.eos_token_ids = set()
    draw = random.Random(0)
    ours: list[float] = []
    theirs: list[float] = []
    pages = 2 + 2 * (context + tokens) // 32
    with LLM(model, num_pages=pages, enable_prefix_caching=False, disable_log_stats=True) as llm:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        for _ in range(pairs + 1):
            prompt = [draw.randrange(1000) for _ in range(context)]
            ours.append(_rate(lambda p=prompt: llm.stream(p, params)))  # type: ignore[misc]
            theirs.append(
                _rate(lambda p=prompt: stream_generate(dense, tokenizer, p, max_tokens=tokens))  # type: ignore[misc]
            )
    ours, theirs = ours[1:], theirs[1:]
    return Report(
        "decode --library",
        {"model": model, "context": context, "tokens": tokens, "pairs": pairs},
        (
            Figure("mlxserve", "tokens/s", tuple(ours)),
            Figure("mlx_lm.stream_generate", "tokens/s", tuple(theirs)),
            Figure("ratio", "", ratios(ours, theirs)),
        ),
    )


def _rate(stream: Callable[[], Iterable[object]]) -> float:
    times = [time.perf_counter() for _ in stream()]
    return (len(times) - 1) / (times[-1] - times[0])


def bench_batch_decode(
    model: str, *, pairs: int, batch: int, shared: int, own: int, tokens: int
) -> Report:
    """Tokens per second of `batch` answers after all of them have their first token.

    The prompts share a prefix of `shared` tokens and have `own` more each. Pairs are interleaved,
    and the first one warms up.
    """
    from mlxserve.model.load import read_model

    files = find_model(model)
    dense, _ = read_model(files, is_metal=machine.is_metal())
    pages = (shared + batch * (own + tokens + 2 * _PAGE_SIZE)) // _PAGE_SIZE
    config = EngineConfig().with_options(
        model=model,
        num_pages=pages,
        page_size=_PAGE_SIZE,
        max_num_seqs=batch,
        disable_log_stats=True,
    )
    engine, _ = build_engine(config, files)
    draw = random.Random(0)
    runs: list[tuple[Seconds, Seconds]] = []
    for _ in range(pairs + 1):
        beginning = [draw.randrange(1000) for _ in range(shared)]
        prompts = [beginning + [draw.randrange(1000) for _ in range(own)] for _ in range(batch)]
        runs.append((_ours(engine, prompts, tokens), _theirs(dense, prompts, tokens)))
    engine.close()
    count = batch * (tokens - 1)
    ours, theirs = zip(*runs[1:], strict=True)
    figures = []
    for at, unit in enumerate(("tokens/s", "tokens/s of CPU")):
        rates = [tuple(count / seconds[at] for seconds in side) for side in (ours, theirs)]
        figures += [
            Figure("mlxserve", unit, rates[0]),
            Figure("mlx-lm's BatchGenerator", unit, rates[1]),
            Figure("ratio", "", ratios(*rates)),
        ]
    settings = {"batch": batch, "shared": shared, "own": own, "tokens": tokens, "pairs": pairs}
    return Report("decode --library", {"model": files.name, **settings}, tuple(figures))


def _ours(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> Seconds:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, params))
    first: set[str] = set()
    while len(first) < len(prompts):
        first |= {output.request_id for output in engine.step() if output.token_ids}
    began = _now()
    while engine.has_work:
        engine.step()
    return _since(began)


def _theirs(model: Any, prompts: Sequence[list[int]], tokens: int) -> Seconds:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, stop_tokens=[], max_tokens=tokens)
    try:
        generator.insert(list(prompts), [tokens] * len(prompts))
        first: set[int] = set()
        while len(first) < len(prompts):
            first |= {response.uid for response in generator.next_generated()}
        began = _now()
        while generator.next_generated():
            pass
        return _since(began)
    finally:
        generator.close()


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


def _since(began: Seconds) -> Seconds:
    clock, cpu = _now()
    return clock - began[0], cpu - began[1]
