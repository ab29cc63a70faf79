"""The load-time probe: a model is served only if its paged logits equal its dense ones.

An architecture can be silently wrong on the paged path (its attention ignores the cache, a layer
reads neighbouring rows, it builds its own mask). So some 40 tokens of two sequences run once
through mlx-lm's dense path and once, in mixed chunks over scattered pages, through the paged path. Of
a model with recurrent states a third one begins with a page of the first, and with the state that
this one had there, in the middle of a chunk.

In float32 every row must agree. In half precision the two paths round differently, and where two
experts of a router have almost the same score they may choose different ones: a row that is right on
both may differ by much. Most rows must agree there, as closely as two dense runs in different chunks.

Keys and values in 8 bits change every logit a little, by an amount that depends on the model. So such a
model is probed twice: with keys and values in its own dtype, which shows a wrong page, mask or position
as usual, and with those in 8 bits, which must only be near.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels.reading import read
from mlxserve.cache.kv import Backends, KVPool
from mlxserve.core.errors import UnsupportedModel
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.files import text_config
from mlxserve.model.batch import Batch
from mlxserve.model.caches import MODEL_ERRORS, MODELS_PAGE
from mlxserve.model.load import LoadedModel
from mlxserve.model.refusals import compiler_failure
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, StatePlan, as_page_table

log = logging.getLogger("mlxserve.probe")

_LENGTH = 20  # tokens of each of two sequences: two pages of 16
# A sliding window only matters in a context longer than the window. Windows up to this length are
# probed; longer ones would cost seconds of start-up on a CPU.
_LONGEST = 264
# Relative to the largest dense logit. A wrong page, mask or position causes differences of the same
# order as the logits. Rows-as-batch and dense differ by up to 2e-5 in float32 over some 60
# architectures; half precisions round each layer's output differently for different shapes.
TOLERANCES = {mx.float32: 2e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}
# In half precision: the share of rows that must agree, of decodes and of chunks, and the tolerance as
# a multiple of the dense path's own noise. No noise allows what a wrong page would cause.
MAX_ROWS = 0.75
_NOISE_FACTOR = 2
_HIGHEST_TOLERANCE = 0.25
# With keys and values in 8 bits, for most rows. Rounding, by up to 1/254 of a row's largest number, makes
# differences of 0.001 to 0.03 in most rows of 14 architectures with random weights, and 0.15 in Gemma 4; the
# scale of a neighbouring slot or head, or none, makes 0.27 to 1.4 in all but one of them.
_QUANTISED_TOLERANCE = 0.2
_OTHER_CHUNKS = (3, 4, 1, 6, 2)  # lengths of the dense run that shows the noise
# Single tokens of each sequence, so that most of them means something.
_HALF_DECODES = 8

_SHARED = 16  # tokens that the third sequence has from the first
_STATE_DECODES = 3
_SNAPSHOT = 1  # its id

Numbers = Sequence[int | None]  # the adapter of each sequence
# (sequence, start, end) of its chunks, decodes first.
Step = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The distance of paged logits from dense ones, relative to the largest logit.

    share: of the rows within the tolerance, for decodes or for chunks, whichever is lower
    """

    largest: float
    tolerance: float
    share: float

    @property
    def is_close(self) -> bool:
        return isfinite(self.largest) and self.share >= MAX_ROWS


def probe(loaded: LoadedModel, backends: Backends, page_size: int = 16) -> float:
    """Return the largest difference relative to the largest logit. Raises UnsupportedModel.

    With keys and values in 8 bits it only shows that they are near: probe the model in its own
    dtype, too.
    """
    kind = loaded.config.get("model_type")
    compare = _compare_8_bits if loaded.is_quantised else _compare
    try:
        agreement = compare(loaded, backends, page_size)
    except MODEL_ERRORS as error:
        log.info("%s fails with a paged cache", loaded.name, exc_info=error)
        raise UnsupportedModel(
            compiler_failure(loaded.name, error)
            or f"{loaded.name}: the attention of this {kind} model cannot be computed over pages, so it "
            f"cannot be served. Models that work: {MODELS_PAGE}."
        ) from error
    if not agreement.is_close:
        raise UnsupportedModel(
            f"{loaded.name}: this {kind} model computes different logits with a paged cache (by "
            f"{agreement.largest:.1e} of the largest logit; {agreement.tolerance:.0e} is allowed), so it "
            f"cannot be served. Models that work: {MODELS_PAGE}."
        )
    return agreement.largest


def probe_adapters(loaded: LoadedModel, backends: Backends, page_size: int = 16) -> None:
    """Probe adapters in pairs in the same steps, and the last beside rows without one.

    Raises UnsupportedModel.
    """
    assert loaded.adapters is not None
    names = loaded.adapters.names
    for first in range(0, len(names), 2):
        pair = (first, first + 1 if first + 1 < len(names) else None)
        who = " and ".join(names[number] for number in pair if number is not None)
        try:
            agreement = _compare(loaded, backends, page_size, pair)
        except MODEL_ERRORS as error:
            log.info("%s fails with adapters", loaded.name, exc_info=error)
            raise UnsupportedModel(
                f"{loaded.name}: the adapters {who} cannot be computed beside other rows in this "
                f"{loaded.config.get('model_type')} model. `mlx_lm.fuse` makes a model of each."
            ) from error
        if not agreement.is_close:
            raise UnsupportedModel(
                f"{loaded.name}: the adapters {who} compute different logits beside other rows (by "
                f"{agreement.largest:.1e} of the largest logit; {agreement.tolerance:.0e} is allowed), so they "
                "cannot be served with it. `mlx_lm.fuse` makes a model of each."
            )


def _compare(
    loaded: LoadedModel, backends: Backends, page_size: int, adapters: Numbers = (None, None)
) -> Agreement:
    dtype = loaded.dtype
    tolerance = TOLERANCES.get(dtype, 1e-1)
    sequences = _sequences(loaded)
    numbers = (*adapters, adapters[0])[: len(sequences)]
    models = [_with_adapter(loaded, number) for number in numbers]
    dense = [_dense(model, ids) for model, ids in zip(models, sequences, strict=True)]
    kinds = _differences(loaded, backends, page_size, sequences, dense, numbers)
    # NaN if any of them is NaN.
    largest = float(np.max([rows.max() for rows in kinds]))
    if adapters[0] is not None and loaded.group is not None:
        # Without a head the others see no difference, and the runs below are those of all ranks.
        largest = loaded.group.all_max_float(largest)
    if largest <= tolerance:
        return Agreement(largest, tolerance, 1.0)
    if dtype == mx.float32:
        return Agreement(largest, tolerance, 0.0)
    noise = [
        relative(_dense(model, ids, _OTHER_CHUNKS), expected)
        for model, ids, expected in zip(models, sequences, dense, strict=True)
    ]
    tolerance = _beyond_noise(np.concatenate(noise), tolerance)
    share = min(float(np.mean(rows <= tolerance)) for rows in kinds)
    log.info(
        "%s: at least %.0f %% of tokens agree within %.1e of the largest logit, and all within %.1e; "
        "two dense runs within %.1e",
        loaded.name,
        100 * share,
        tolerance,
        largest,
        np.max(noise),
    )
    return Agreement(largest, tolerance, share)


def _compare_8_bits(loaded: LoadedModel, backends: Backends, page_size: int) -> Agreement:
    sequences = _sequences(loaded)
    dense = [_dense(loaded.model, ids) for ids in sequences]
    kinds = _differences(loaded, backends, page_size, sequences, dense, (None,) * len(sequences))
    share = min(float(np.mean(rows <= _QUANTISED_TOLERANCE)) for rows in kinds)
    largest = float(np.max([rows.max() for rows in kinds]))
    log.info("%s: with keys and values in 8 bits, logits differ by %.1e", loaded.name, largest)
    return Agreement(largest, _QUANTISED_TOLERANCE, share)


def _beyond_noise(noise: np.ndarray, tolerance: float) -> float:
    """Return the tolerance, raised if two dense runs differ by more in most rows."""
    usual = float(np.quantile(noise, MAX_ROWS))
    return max(tolerance, min(_HIGHEST_TOLERANCE, _NOISE_FACTOR * usual))


def _sequences(loaded: LoadedModel) -> list[list[int]]:
    draw = random.Random(0)
    length = _length(loaded)
    sequences = [[draw.randrange(loaded.vocab_size) for _ in range(length)] for _ in range(2)]
    if loaded.has_states:
        sequences.append(sequences[0][:_SHARED] + sequences[1][_SHARED:])
    return sequences


def _differences(
    loaded: LoadedModel,
    backends: Backends,
    page_size: int,
    sequences: Sequence[list[int]],
    dense: Sequence[np.ndarray],
    adapters: Numbers,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the differences of decode rows, and of chunk rows."""
    decodes: list[np.ndarray] = []
    chunks: list[np.ndarray] = []
    for sequence, start, paged in _paged(loaded, backends, page_size, sequences, adapters):
        expected = dense[sequence][start : start + len(paged)]
        (decodes if len(paged) == 1 else chunks).append(relative(paged, expected))
    return np.concatenate(decodes), np.concatenate(chunks)


def relative(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The largest difference in each row, relative to the largest logit of all rows.

    A model may give tokens that it never chooses a logit of minus infinity (Phi 3 small).
    """
    excluded = np.isneginf(actual) & np.isneginf(expected)
    apart = np.abs(np.where(excluded, 0, actual) - np.where(excluded, 0, expected))
    rows: np.ndarray = apart.max(axis=1) / np.abs(np.where(excluded, 0, expected)).max()
    return rows


def _length(loaded: LoadedModel) -> int:
    """Length of each sequence: slightly more than the smallest window, if that is short."""
    windows = loaded.caches.windows
    of_config = text_config(loaded.config).get("sliding_window")
    if isinstance(of_config, int):
        windows.append(of_config)
    beyond = min(windows, default=0) + 8
    shortest = _LENGTH + _num_decodes(loaded) - 1
    return beyond if shortest < beyond <= _LONGEST else shortest


def _num_decodes(loaded: LoadedModel) -> int:
    """Tokens at the end of each sequence that are decoded one by one."""
    if loaded.dtype != mx.float32:
        return _HALF_DECODES
    return _STATE_DECODES if loaded.has_states else 1


def _steps(length: int, num_decodes: int, num_sequences: int) -> list[Step]:
    """Plan the steps of the probe.

    A chunk alone, a single token next to a chunk, and chunks that start and end in the middle of a
    page; then the last tokens one by one, of all sequences, and the very last of only one.
    """
    tail = length - num_decodes
    third = ((2, _SHARED, tail + 1),) if num_sequences > 2 else ()
    mixed: list[Step] = [
        ((0, 0, 5),),
        ((0, 5, 6), (1, 0, 7)),
        ((1, 7, 8), (0, 6, tail)),
        ((0, tail, tail + 1), (1, 8, tail + 1), *third),
    ]
    decodes: list[Step] = [
        tuple((sequence, at, at + 1) for sequence in range(num_sequences))
        for at in range(tail + 1, length)
    ]
    return mixed + (decodes if num_sequences == 2 else [*decodes[:-1], decodes[-1][1:2]])


def _with_adapter(loaded: LoadedModel, number: int | None) -> Any:
    """Return the model to call with whole texts and this adapter."""
    if number is None:
        return loaded.model
    assert loaded.adapters is not None
    return loaded.adapters.applied(loaded.model, number)


def _dense(model: Any, token_ids: Sequence[int], chunks: Sequence[int] = ()) -> np.ndarray:
    """Return (rows, vocabulary), computed at once, or first in `chunks` of these lengths."""
    cache = make_prompt_cache(model)
    cuts = [0, *accumulate(chunks), len(token_ids)]
    pieces = [
        model(mx.array([token_ids[start:end]]), cache=cache)[0].astype(mx.float32)
        for start, end in pairwise(cuts)
    ]
    return read(mx.concatenate(pieces))


def _paged(
    loaded: LoadedModel,
    backends: Backends,
    page_size: int,
    sequences: Sequence[list[int]],
    adapters: Numbers,
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (sequence, first position, logits of its rows) of each chunk."""
    length = len(sequences[0])
    each = -(-length // page_size)
    kv = KVPool(loaded.layers, len(sequences) * each, page_size, backends)
    runner = ModelRunner(loaded, kv)
    orders = [[*range(2 * each - 1, 0, -2)], [*range(0, 2 * each, 2)]]
    orders += [[orders[0][0], *range(2 * each + 1, 3 * each)]] * (len(sequences) - 2)
    pages = [as_page_table(order) for order in orders]
    params = SamplingParams(temperature=0)
    requests = [
        LiveRequest(Request(str(i), ids, params, adapter=number))
        for i, (ids, number) in enumerate(zip(sequences, adapters, strict=True))
    ]
    for step in _steps(length, _num_decodes(loaded), len(sequences)):
        chunks = [
            Chunk(
                requests[s],
                start,
                end - start,
                pages[s],
                samples=end == length,
                state=_state_plan(s, start, end) if loaded.has_states else None,
            )
            for s, start, end in step
        ]
        batch = Batch.from_chunks(chunks, page_size)
        logits = runner.logits(batch, mx.array(batch.tokens), all_rows=True)
        rows = read(logits.astype(mx.float32))
        first = 0
        for sequence, start, end in step:
            yield sequence, start, rows[first : first + end - start]
            first += end - start


def _state_plan(sequence: int, start: int, end: int) -> StatePlan:
    """Plan the third sequence's start from the first one's state after their shared tokens."""
    if sequence == 2 and start == _SHARED:
        return StatePlan(_SNAPSHOT, ())
    is_kept = sequence == 0 and start < _SHARED < end
    return StatePlan(None, ((_SHARED, _SNAPSHOT),) if is_kept else ())
