"""What keys and values in 8 bits cost in quality, and save in memory: perplexity, greedy answers, bytes.

Both dtypes read the same texts: a file's, or what the model itself writes at temperature 1, which any
model has, one of random weights included. Every token is predicted from all tokens before it in pages of
that dtype.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.reading import read
from mlxserve import LLM, SamplingParams
from mlxserve.bench.report import Figure, Report
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.engine_part import EnginePart, build_part
from mlxserve.hub.files import find_model
from mlxserve.model.batch import Batch
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, StatePlan, as_page_table

DTYPES = ("auto", "q8")
_PAGE_SIZE = 32
_ROWS = 256  # of a forward, whose logits are in memory at once
_GIB = 1 << 30
_OPENINGS = (
    "Write a long story about a small boat, a lighthouse and a storm.",
    "Explain step by step how bread is made.",
    "List twenty animals, each with a fact about it.",
    "Tell me about the history of a town by the sea.",
)


class Predictions(NamedTuple):
    """Of every token of a text but the first."""

    losses: npt.NDArray[np.float64]  # -log of its probability
    best: npt.NDArray[np.int64]  # the token that was most probable instead


def bench_kv_dtype(
    model: str,
    *,
    text: Path | None,
    num_texts: int,
    context: int,
    tokens: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """`num_texts` texts of `context` tokens, and greedy answers of `tokens` to the first half of each.

    Raises InvalidConfig.
    """
    progress("texts")
    texts = _texts(model, text, num_texts, context)
    layers, predictions, answers, speeds = {}, {}, {}, {}
    for dtype in DTYPES:
        config = config_of(model, dtype, context + tokens)
        progress(f"{dtype}: perplexity")
        part = build_part(config, find_model(model), None)
        layers[dtype] = part.kv.specs
        predictions[dtype] = [predict(part, ids) for ids in texts]
        del part  # one model at a time is in memory
        progress(f"{dtype}: greedy answers")
        answers[dtype], speeds[dtype] = _answers(config, texts, tokens)
    figures = [
        *(_perplexity(dtype, predictions[dtype]) for dtype in DTYPES),
        Figure("perplexity, q8 above auto", "%", _perplexity_change(predictions)),
        Figure("same most probable token", "%", _agreement(predictions)),
        Figure("greedy tokens until they differ", "", _until_different(answers)),
        *(Figure(f"greedy decode, {d}", "tokens/s", tuple(speeds[d])) for d in DTYPES),
        *_memory(layers["auto"], layers["q8"]),
    ]
    settings = {
        "model": model,
        "text": text or "its own",
        "texts": num_texts,
        "context": context,
        "tokens": tokens,
        "auto is": str(layers["auto"][0].dtype).removeprefix("mlx.core."),
    }
    return Report("kv-dtype", settings, tuple(figures))


def config_of(model: str, dtype: str, num_tokens: int) -> EngineConfig:
    return EngineConfig().with_options(
        model=model,
        kv_cache_dtype=dtype,
        page_size=_PAGE_SIZE,
        num_pages=2 + num_tokens // _PAGE_SIZE,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def _texts(model: str, file: Path | None, num_texts: int, context: int) -> list[list[int]]:
    """Raises InvalidConfig for a file that is too short."""
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    tokenizer = load_tokenizer(find_model(model).path)
    if file is None:
        with LLM(config=config_of(model, "auto", context)) as llm:
            openings = [tokenizer.encode(opening)[: context // 2] for opening in _OPENINGS]
            return [
                _own_text(llm, openings[number % len(openings)], number, context)
                for number in range(num_texts)
            ]
    found: list[int] = tokenizer.encode(file.read_text(encoding="utf-8"))
    if len(found) < num_texts * context:
        raise InvalidConfig(
            f"{file} has {len(found)} tokens; {num_texts} texts of {context} need "
            f"{num_texts * context}. Lower --texts or --context."
        )
    return [found[number * context :][:context] for number in range(num_texts)]


def _own_text(llm: LLM, prompt: list[int], seed: int, context: int) -> list[int]:
    params = SamplingParams(
        max_tokens=context - len(prompt), temperature=1, seed=seed, ignore_eos=True
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return [*prompt, *output.token_ids]


def predict(part: EnginePart, ids: list[int]) -> Predictions:
    """In forwards of a few rows, each of which attends over the pages before it."""
    runner = ModelRunner(part.loaded, part.kv)
    request = LiveRequest(Request("text", list(ids), SamplingParams(temperature=0)))
    pages = as_page_table(range(-(-len(ids) // _PAGE_SIZE)))
    losses, best = [], []
    for start in range(0, len(ids), _ROWS):
        length = min(_ROWS, len(ids) - start)
        state = StatePlan(None, ()) if part.loaded.has_states else None
        chunk = Chunk(
            request, start, length, pages, samples=start + length == len(ids), state=state
        )
        batch = Batch.from_chunks([chunk], _PAGE_SIZE)
        logits = runner.logits(batch, mx.array(batch.tokens), all_rows=True).astype(mx.float32)
        following = ids[start + 1 : start + length + 1]
        logits = logits[: len(following)]  # nothing follows the last token
        of_next = mx.take_along_axis(logits, mx.array([following]).T, axis=1)[:, 0]
        losses.append(read(mx.logsumexp(logits, axis=1) - of_next))
        best.append(read(mx.argmax(logits, axis=1)))
    return Predictions(
        np.concatenate(losses).astype(np.float64), np.concatenate(best).astype(np.int64)
    )


def _answers(
    config: EngineConfig, texts: Sequence[list[int]], tokens: int
) -> tuple[list[tuple[int, ...]], list[float]]:
    """(tokens, tokens per second after the first) of each."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    answers, speeds = [], []
    with LLM(config=config) as llm:
        for ids in texts:
            times: list[float] = []
            found: list[int] = []
            for delta in llm.stream(ids[: len(ids) // 2], params):
                times.append(time.perf_counter())
                found.extend(delta.token_ids)
            answers.append(tuple(found))
            speeds.append((len(times) - 1) / (times[-1] - times[0]))
    return answers, speeds


def _perplexity(dtype: str, found: Sequence[Predictions]) -> Figure:
    values = tuple(math.exp(one.losses.mean()) for one in found)
    return Figure(f"perplexity, {dtype}", "", values)


def _perplexity_change(found: dict[str, list[Predictions]]) -> tuple[float, ...]:
    pairs = zip(found["q8"], found["auto"], strict=True)
    return tuple(100 * math.expm1(q8.losses.mean() - auto.losses.mean()) for q8, auto in pairs)


def _agreement(found: dict[str, list[Predictions]]) -> tuple[float, ...]:
    pairs = zip(found["q8"], found["auto"], strict=True)
    return tuple(100 * float((q8.best == auto.best).mean()) for q8, auto in pairs)


def _until_different(answers: dict[str, list[tuple[int, ...]]]) -> tuple[float, ...]:
    """The whole length where they do not differ."""
    pairs = zip(answers["q8"], answers["auto"], strict=True)
    return tuple(
        float(len(list(takewhile(lambda both: both[0] == both[1], zip(q8, auto, strict=True)))))
        for q8, auto in pairs
    )


def _memory(auto: Sequence[LayerSpec], q8: Sequence[LayerSpec]) -> Iterator[Figure]:
    """KiB of a token's keys and values, and how many tokens a GiB holds; in 16 bits as well, since on a
    CPU a model's own dtype is float32."""
    values = sum(spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in auto)
    own, in_8_bits = (sum(spec.bytes_per_token() for spec in layers) for layers in (auto, q8))
    sizes = {"auto": own, "16 bits": 2 * values, "q8": in_8_bits}
    for name, size in sizes.items():
        yield Figure(f"a token's memory, {name}", "KiB", (size / 1024,))
    for name, size in sizes.items():
        yield Figure(f"tokens in 1 GiB, {name}", "thousand", (_GIB / size / 1000,))
