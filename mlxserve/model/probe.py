"""The load-time probe: a model is served only if its paged logits equal its dense ones.

An architecture can be silently wrong on the paged path (its attention ignores the cache, a layer
reads neighbouring rows, it builds its own mask). So some 40 tokens of two sequences run once
through mlx-lm's dense path and once, in mixed chunks over scattered pages, through the paged path.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels import Backend
from metal_kernels.reading import read
from mlxserve.cache.kv import KVPool
from mlxserve.errors import UnsupportedModel, in_one_line
from mlxserve.hub.files import text_config
from mlxserve.model.batch import Batch
from mlxserve.model.load import LoadedModel
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.sampling_params import SamplingParams

_LENGTH = 20  # tokens of each of two sequences: two pages of 16
# A sliding window only matters in a context longer than the window. Windows up to this length are
# probed; longer ones would cost seconds of start-up on a CPU.
_LONGEST = 264
# Relative to the largest dense logit. A wrong page, mask or position causes differences of the same
# order as the logits. Rows-as-batch and dense differ by up to 2e-5 in float32 over some 60
# architectures; half precisions round each layer's output differently for different shapes.
_TOLERANCES = {mx.float32: 2e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}


def probe(loaded: LoadedModel, backend: Backend, page_size: int = 16) -> float:
    """The largest difference relative to the largest logit. Raises UnsupportedModel."""
    kind = loaded.config.get("model_type")
    try:
        difference = _difference(loaded, backend, page_size)
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{loaded.name}: {kind} models do not work with a paged cache: {in_one_line(error)}"
        ) from error
    tolerance = _TOLERANCES.get(loaded.layers[0].dtype, 1e-1)
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"{loaded.name}: this {kind} model computes different logits with a paged cache (by "
            f"{difference:.1e} of the largest logit; {tolerance:.0e} is allowed), so it cannot be "
            "served."
        )
    return difference


def _difference(loaded: LoadedModel, backend: Backend, page_size: int) -> float:
    draw = random.Random(0)
    length = _length(loaded)
    sequences = [[draw.randrange(loaded.vocab_size) for _ in range(length)] for _ in range(2)]
    differences = []
    dense = [_dense(loaded, sequence) for sequence in sequences]
    for sequence, start, paged in _paged(loaded, backend, page_size, sequences):
        expected = dense[sequence][start : start + len(paged)]
        differences.append(np.abs(paged - expected).max() / np.abs(expected).max())
    return float(np.max(differences))  # unlike max(), NaN if any of them is NaN


def _length(loaded: LoadedModel) -> int:
    """Length of each sequence: slightly longer than the smallest window, if that is short."""
    windows = [spec.window for spec in loaded.layers if spec.window is not None]
    of_config = text_config(loaded.config).get("sliding_window")
    if isinstance(of_config, int):
        windows.append(of_config)
    beyond = min(windows, default=0) + 8
    return beyond if _LENGTH < beyond <= _LONGEST else _LENGTH


def _steps(length: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """(sequence, start, end) of each step's chunks, decodes first: a chunk alone, a single token
    next to a chunk, and chunks that start and end in the middle of a page."""
    return (
        ((0, 0, 5),),
        ((0, 5, 6), (1, 0, 7)),
        ((1, 7, 8), (0, 6, length - 1)),
        ((0, length - 1, length), (1, 8, length)),
    )


def _dense(loaded: LoadedModel, token_ids: Sequence[int]) -> np.ndarray:
    logits = loaded.model(mx.array([token_ids]), cache=make_prompt_cache(loaded.model))
    return read(logits[0].astype(mx.float32))


def _paged(
    loaded: LoadedModel, backend: Backend, page_size: int, sequences: Sequence[list[int]]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(sequence, first position, logits of its rows) of each chunk."""
    length = len(sequences[0])
    each = -(-length // page_size)
    kv = KVPool(loaded.layers, num_pages=2 * each, page_size=page_size, backend=backend)
    runner = ModelRunner(loaded.model, loaded.selector, kv)
    orders = range(2 * each - 1, 0, -2), range(0, 2 * each, 2)
    pages = [as_page_table(order) for order in orders]
    params = SamplingParams(temperature=0)
    requests = [LiveRequest(Request(str(i), ids, params)) for i, ids in enumerate(sequences)]
    for step in _steps(length):
        chunks = [
            Chunk(requests[s], start, end - start, pages[s], samples=end == length)
            for s, start, end in step
        ]
        batch = Batch.of(chunks, page_size)
        logits = runner.logits(batch, mx.array(batch.tokens), all_rows=True)
        rows = read(logits.astype(mx.float32))
        first = 0
        for sequence, start, end in step:
            yield sequence, start, rows[first : first + end - start]
            first += end - start
