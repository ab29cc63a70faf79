"""Chooses at load whether a model computes all rows of drafts in one call of each recurrent layer.

A trial runs steps with drafts both ways. Rows together are taken if each row's output and state have the bits that
the definition's own recurrence computes for that row alone, with the model's own numbers in every layer; if the
logits are as near as a paged model's are to a dense one's, also where the step after begins within a draft; and if
a step with a draft is faster then.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from metal_kernels.choice import select_backend
from metal_kernels.metal import MetalBackend
from metal_kernels.reading import read
from metal_kernels.replay import ReplayOps
from mlxserve.cache.kv import Backends, KVPool
from mlxserve.core.errors import in_one_line
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.batch import Batch
from mlxserve.model.caches import MODEL_ERRORS
from mlxserve.model.draft_rows import comparing, use_draft_rows
from mlxserve.model.load import LoadedModel
from mlxserve.model.probe import MAX_ROWS, TOLERANCES, relative
from mlxserve.model.row_speeds import seconds_of_draft
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

log = logging.getLogger("mlxserve.replay")

Seconds: TypeAlias = Callable[[LoadedModel, Backends, int], float]
# (start, tokens, drafted ones of them) of two sequences in each step: drafts of other lengths, of which one token, all
# and none are right, and decodes after them.
_STEPS = (
    ((0, 3, 0), (0, 2, 0)),
    ((3, 4, 3), (2, 2, 1)),
    ((5, 3, 2), (4, 2, 1)),
    ((6, 1, 0), (5, 1, 0)),
)


def with_replay(
    loaded: LoadedModel, backends: Backends, page_size: int, seconds: Seconds = seconds_of_draft
) -> LoadedModel:
    """Return the model with rows of drafts together, if that has the same bits and is faster here.

    The log says which, and why. Nothing is tried without Metal kernels, among ranks, and for models that are called for
    one sequence after the other.

    seconds: of a step with a draft
    """
    ops = _kernels(loaded, backends)
    if ops is None:
        return loaded
    use_draft_rows(loaded.model)
    together = replace(loaded, replay=ops)
    try:
        reason = why_not_together(loaded, together, backends, page_size)
        if reason is None:
            alone, all_rows = (seconds(each, backends, page_size) for each in (loaded, together))
            times = f"{1e3 * all_rows:.1f} instead of {1e3 * alone:.1f} ms"
            if all_rows >= alone:
                reason = f"a step would take {times}"
    except MODEL_ERRORS as error:  # a definition's code, called in an unusual way, raises anything
        reason = in_one_line(error)
    mx.synchronize()
    mx.clear_cache()
    if reason is not None:
        log.info("%s: rows of a draft are a call each of recurrent layers: %s", loaded.name, reason)
        return loaded
    log.info("%s: rows of drafts are one call of recurrent layers: %s", loaded.name, times)
    return together


def why_not_together(
    loaded: LoadedModel, together: LoadedModel, backends: Backends, page_size: int
) -> str | None:
    """Return why rows of drafts may not be computed together; None if tokens stay the same."""
    expected = _logits(loaded, backends, page_size)
    with comparing() as compared:
        found = _logits(together, backends, page_size)
    if not all(bool(read(each)) for each in compared):
        return "a row has other bits than alone"
    distances = relative(found, expected)
    share = float(np.mean(distances <= TOLERANCES.get(loaded.dtype, 1e-1)))
    needed = 1.0 if loaded.dtype == mx.float32 else MAX_ROWS
    if not np.isfinite(distances).all() or share < needed:
        return f"logits differ by {np.max(distances):.1e} of the largest"
    return None


def _kernels(loaded: LoadedModel, backends: Backends) -> ReplayOps | None:
    """Return the kernels, if all layers are on Metal and in one process."""
    if not loaded.has_states or loaded.by_sequence or loaded.group is not None:
        return None
    if not isinstance(backends, Sequence):
        backends = [backends]
    chosen = [*backends] or [select_backend("auto")]  # a model without attention has none
    metal = [each for each in chosen if isinstance(each, MetalBackend)]
    return metal[0].replay if len(metal) == len(chosen) else None


def _logits(loaded: LoadedModel, backends: Backends, page_size: int) -> np.ndarray:
    """Return the logits of all rows of all steps of the trial."""
    draw, length = random.Random(0), 8
    pages = -(-length // page_size)
    runner = ModelRunner(loaded, KVPool(loaded.layers, 2 * pages, page_size, backends))
    params = SamplingParams(temperature=0)
    requests = [
        LiveRequest(
            Request(str(at), [draw.randrange(loaded.vocab_size) for _ in range(length)], params)
        )
        for at in range(2)
    ]
    rows = [_rows(runner, requests, step, pages, page_size) for step in _STEPS]
    return read(mx.concatenate(rows).astype(mx.float32))


def _rows(
    runner: ModelRunner,
    requests: Sequence[LiveRequest],
    step: Sequence[tuple[int, int, int]],
    pages: int,
    page_size: int,
) -> mx.array:
    chunks = [
        Chunk(
            request,
            start,
            length,
            as_page_table(range(at * pages, (at + 1) * pages)),
            samples=True,
            draft=tuple(request.token_ids[start + length - drafted : start + length]),
        )
        for at, (request, (start, length, drafted)) in enumerate(zip(requests, step, strict=True))
    ]
    batch = Batch.from_chunks(chunks, page_size)
    logits = runner.logits(batch, mx.array(batch.tokens), all_rows=True)
    runner.compute([logits])
    return logits
