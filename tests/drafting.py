"""Draft models for tests: copies of a model whose weights are changed a little, so that they guess well, not always."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve import LLM, SamplingParams
from mlxserve.model.drafting import drafter as drafter_file
from mlxserve.model.drafting.drafter import Drafter
from mlxserve.request import Chunk


def similar_model(folder: Path, like: Path, *, noise: float = 0.0, bits: int | None = None) -> Path:
    """Write the model in `like` with random noise on its matrices, or rounded to some bits."""
    shutil.copytree(like, folder, dirs_exist_ok=True)
    mx.random.seed(11)
    changed = {}
    weights: Any = mx.load(str(like / "model.safetensors"))
    for name, array in weights.items():
        if array.ndim == 2 and noise:
            scale = 1 + noise * mx.random.normal(array.shape)
            changed[name] = (array * scale).astype(array.dtype)
        elif array.ndim == 2 and bits is not None:
            packed = mx.quantize(array.astype(mx.float32), 64, bits)
            changed[name] = mx.dequantize(*packed, 64, bits).astype(array.dtype)
        else:
            changed[name] = array
    mx.save_safetensors(str(folder / "model.safetensors"), changed, metadata={"format": "mlx"})
    return folder


@contextmanager
def spoiled_pages(value: float | None, *, every: int) -> Iterator[list[int]]:
    """Fill the drafter's pages with `value`, or random numbers if it is None, before every n-th step.

    The list that it yields gets an entry each time.
    """
    num_steps, times = 0, []
    begin = Drafter.begin
    draw = np.random.default_rng(3)

    def spoil(drafter: Drafter, chunks: tuple[Chunk, ...]) -> None:
        nonlocal num_steps
        num_steps += 1
        begin(drafter, chunks)
        if num_steps % every:
            return
        assert drafter.pages is not None
        kv = drafter.pages.kv
        size = kv.nbytes_of(1) // 4
        numbers = draw.normal(size=size) * 3 if value is None else np.full(size, value)
        pages = range(kv.num_backed)
        kv.write_units(pages, [numbers.astype(np.float32).tobytes()] * len(pages))
        times.append(num_steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "begin", spoil)
        yield times


def accepted_share(
    model: str | None,
    prompts: Sequence[Any],
    params: SamplingParams,
    draft: Path,
    *,
    shares_noise: bool = True,
    **options: Any,
) -> tuple[float, list[list[int]]]:
    """(accepted tokens of those drafted, one in a step; the answers).

    shares_noise: draw guesses with the noise of the model's own draws; otherwise with another
    """
    with pytest.MonkeyPatch.context() as patch:
        if not shares_noise:
            patch.setattr(drafter_file, "seed_of", lambda _request, _seed: 77)
        config = {"num_pages": 80, "page_size": 16, "disable_log_stats": True, **options}
        with LLM(model, draft_model=str(draft), speculative_tokens=1, **config) as llm:
            outputs = llm.generate(list(prompts), params, use_tqdm=False)
            count = llm.stats().scheduler
    return count.accepted_tokens / count.drafted_tokens, [
        list(output.token_ids) for output in outputs
    ]


def total_variation(
    first: Path, second: Path, texts: Sequence[Sequence[int]], temperature: float
) -> float:
    """Mean distance of the distributions that both models have after each token of the texts."""
    models = [load_model(folder)[0] for folder in (first, second)]
    distances = []
    for text in texts:
        one, other = (
            mx.softmax(model(mx.array([list(text)])).astype(mx.float32) / temperature, axis=-1)
            for model in models
        )
        distances.append(0.5 * float(np.array(mx.abs(one - other).sum(axis=-1).mean())))
    return sum(distances) / len(distances)
