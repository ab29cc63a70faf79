"""Batch-1 decode in one process, beside mlx-lm's own `stream_generate` on the same weights."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from mlxserve import LLM, SamplingParams
from mlxserve.bench.report import Figure, Report, ratios
from mlxserve.model.files import find_model


def bench_decode(model: str, *, pairs: int, context: int, tokens: int) -> Report:
    """Tokens per second after the first, in interleaved pairs; the first pair warms up."""
    from mlx_lm.generate import stream_generate
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.utils import load_model

    path = find_model(model).path
    dense, _ = load_model(path)
    tokenizer = load_tokenizer(path)
    tokenizer._eos_token_ids = set()  # both sides run to the last token
    draw = random.Random(0)
    ours: list[float] = []
    theirs: list[float] = []
    pages = 2 + 2 * (context + tokens) // 32
    with LLM(
        str(path), num_pages=pages, enable_prefix_caching=False, disable_log_stats=True
    ) as llm:
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
