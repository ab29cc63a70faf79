"""Sampling on the device: from the logits of the rows that sample to one token id each.

Rows are grouped by their own parameters alone, so a request's tokens never depend on its
neighbours: greedy rows (an argmax), plain rows (temperature and min-p) and filtered rows, which
need sorted tokens: the best few for top-k, the whole vocabulary for top-p alone. Sorting dominates
the cost of sampling (16 rows of 26,000 tokens: 47 of 71 ms on a 2-core x86 machine; the best 64 of
them: 5 ms), and top-p has no bound that is known before the device has computed the logits.
Searching for its threshold instead of sorting was no better there: 22-24 ms for 15 bisections,
which is not exact, 40-83 ms for the 30 that are, 37 ms for sorting values without their tokens.

Random numbers come from a key made of the request's seed and the position, one for each token id of
the vocabulary, so a seeded answer is the same alone, in a batch, and after a preemption. Numbers for
the ranks of sorted tokens instead gave another answer where rounding swapped two neighbours: with an
error of 0.01 in the logits 61 of 3,200 draws changed with top-p 0.95 and 35 with top-k 30, and 7 and
8 by token id. They cost as much as those of unfiltered rows: for the best 64 of 26,000 tokens, 16
rows, 15 ms instead of 9 on that machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.reading import evaluate, read
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import LiveRequest, Request, Sampled, TokenLogprob

_MASK64 = (1 << 64) - 1
# How many of the best tokens are sorted: the smallest that covers the top-k.
_BEST = (64, 1024)
# A logit that loses against every other, and still leaves room for a temperature.
_NEVER = -1e30
# Any lower temperature always draws the best token; float32 underflows at 1e-38.
_COLDEST = 1e-6


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: its request, seed and position.

    `lazy_index` is the row of the previous step whose token belongs to this request's history but
    has not been read yet; None if the whole history is known.
    `num_drafted` tokens of a draft belong to the history as well: those that the rows sampled before
    this one, and this one, were computed from.
    """

    request: LiveRequest
    seed: int
    position: int
    lazy_index: int | None = None
    num_drafted: int = 0


_Choose: TypeAlias = Callable[[mx.array, Sequence[Draw], int], mx.array]


@dataclass(frozen=True, slots=True)
class PendingSample:
    """Sampled tokens as device arrays that have not been read yet."""

    ids: mx.array  # (rows,) int32
    logprob_rows: tuple[int, ...]
    chosen: mx.array | None  # (len(logprob_rows),) float32
    top_ids: mx.array | None  # (len(logprob_rows), k), best first
    top_logprobs: mx.array | None

    def arrays(self) -> list[mx.array]:
        return [
            a for a in (self.ids, self.chosen, self.top_ids, self.top_logprobs) if a is not None
        ]

    def read(self, draws: Sequence[Draw]) -> list[Sampled]:
        """Wait for the device; one Sampled per row. Raises DeviceError."""
        evaluate(*self.arrays())
        ids: list[int] = read(self.ids).tolist()
        logprobs = self._logprobs(draws, ids)
        return [Sampled(token, logprobs.get(row)) for row, token in enumerate(ids)]

    def _logprobs(self, draws: Sequence[Draw], ids: Sequence[int]) -> dict[int, TokenLogprob]:
        if self.chosen is None or self.top_ids is None or self.top_logprobs is None:
            return {}
        chosen = read(self.chosen).tolist()
        top_ids = read(self.top_ids).tolist()
        top_logprobs = read(self.top_logprobs).tolist()
        by_row = {}
        for at, row in enumerate(self.logprob_rows):
            count = draws[row].request.asked.params.logprobs or 0
            top = tuple(zip(top_ids[at][:count], top_logprobs[at][:count], strict=True))
            by_row[row] = TokenLogprob(ids[row], chosen[at], top)
        return by_row


def sample(
    logits: mx.array,
    draws: Sequence[Draw],
    pending_ids: mx.array | None = None,
    inputs: mx.array | None = None,
) -> PendingSample:
    """Choose a token for each row; nothing is evaluated yet.

    logits: (rows, vocabulary), any float type; draws: one per row
    pending_ids: the previous step's ids, for draws with a lazy_index
    inputs: (rows,) int32, the tokens that the rows were computed from, if there are drafts
    """
    logits = raw = logits.astype(mx.float32)
    if any(_is_steered(draw.request.asked) for draw in draws):
        logits = _with_bias(_with_penalties(raw, draws, pending_ids, inputs), draws)
        logits = _guided(_without_early_ends(logits, draws), draws)
    ids = _choose(logits, draws)
    wanting = tuple(
        i for i, draw in enumerate(draws) if draw.request.asked.params.logprobs is not None
    )
    if not wanting:
        return PendingSample(ids, (), None, None, None)
    return PendingSample(ids, wanting, *_logprobs_of(raw, ids, draws, wanting))


def seed_of(request: LiveRequest, engine_seed: int) -> int:
    """The request's seed, or one derived from the engine's seed and the order of arrival."""
    seed = request.asked.params.seed
    if seed is None:
        return (engine_seed * 0x9E3779B97F4A7C15 + request.arrival + 1) & _MASK64
    return seed & _MASK64


def _is_steered(request: Request) -> bool:
    """True if the request changes logits in other ways than by its temperature."""
    params = request.params
    return bool(request.guide or params.is_penalised or params.logit_bias or params.min_tokens)


def _choose(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    groups: dict[tuple[_Choose, int], list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_group(draw.request.asked.params, logits.shape[-1]), []).append(row)
    if len(groups) == 1:
        ((choose, size),) = groups
        return choose(logits, draws, size).astype(mx.int32)
    ids = mx.zeros(len(draws), mx.int32)
    for (choose, size), rows in groups.items():
        where = mx.array(rows)
        ids[where] = choose(logits[where], [draws[row] for row in rows], size).astype(mx.int32)
    return ids


def _group(params: SamplingParams, vocabulary: int) -> tuple[_Choose, int]:
    """(how a row is sampled, how many of its best tokens are needed)."""
    if params.temperature == 0:
        return _greedy, 1
    if params.top_k:
        return _filtered, next((n for n in _BEST if params.top_k <= n < vocabulary), vocabulary)
    return (_filtered if params.top_p < 1 else _plain), vocabulary


def _greedy(logits: mx.array, _draws: Sequence[Draw], _size: int) -> mx.array:
    return mx.argmax(logits, axis=-1)


def _plain(logits: mx.array, draws: Sequence[Draw], size: int) -> mx.array:
    tempered = _tempered(logits, draws)
    floors = [
        math.log(p) if (p := draw.request.asked.params.min_p) else -math.inf for draw in draws
    ]
    if any(floor > -math.inf for floor in floors):
        tempered = mx.where(tempered >= _column(floors), tempered, -mx.inf)
    return mx.argmax(tempered + _gumbel(draws, size), axis=-1)


def _filtered(logits: mx.array, draws: Sequence[Draw], size: int) -> mx.array:
    """Top-k, then top-p and min-p on the remaining tokens, over the best `size`, best first."""
    params = [draw.request.asked.params for draw in draws]
    order = best_tokens(logits, size)
    ranked = mx.take_along_axis(_tempered(logits, draws), order, axis=-1)
    top_k = _column([min(p.top_k or size, size) for p in params], mx.int32)
    ranked = mx.where(mx.arange(size)[None] < top_k, ranked, -mx.inf)
    probabilities = mx.softmax(ranked, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < _column([p.top_p for p in params])) & (
        probabilities >= probabilities[:, :1] * _column([p.min_p for p in params])
    )
    # Rounding must never exclude every token.
    kept = kept | (mx.arange(size)[None] == 0)
    noise = mx.take_along_axis(_gumbel(draws, logits.shape[-1]), order, axis=-1)
    rank = mx.argmax(mx.where(kept, ranked, -mx.inf) + noise, axis=-1, keepdims=True)
    return mx.take_along_axis(order, rank, axis=-1)[:, 0]


def best_tokens(logits: mx.array, size: int) -> mx.array:
    """(rows, size): the tokens with the largest logits, best first."""
    if size == logits.shape[-1]:
        return mx.argsort(-logits, axis=-1)
    best = mx.argpartition(-logits, size - 1, axis=-1)[:, :size]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


def _tempered(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Logits by temperature, relative to the largest: a low temperature must not overflow.

    Nor may it drown the noise.
    """
    temperatures = [max(draw.request.asked.params.temperature, _COLDEST) for draw in draws]
    return (logits - mx.max(logits, axis=-1, keepdims=True)) / _column(temperatures)


def _column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype)[:, None]


def _gumbel(draws: Sequence[Draw], size: int) -> mx.array:
    """Return (rows, size) Gumbel noise by token id, each row from its own key.

    An argmax over logits + noise is a draw from their softmax (Gumbel-max trick).
    """
    keys = mx.array(np.stack([key_of(draw.seed, draw.position) for draw in draws]))
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def key_of(seed: int, position: int) -> npt.NDArray[np.uint32]:
    """A key for mlx's counter-based generator, mixed as in SplitMix64 (Steele et al., 2014)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    mixed ^= mixed >> 31
    return np.array([mixed >> 32, mixed & 0xFFFFFFFF], np.uint32)


def _with_penalties(
    logits: mx.array,
    draws: Sequence[Draw],
    pending_ids: mx.array | None,
    inputs: mx.array | None,
) -> mx.array:
    rows = [i for i, draw in enumerate(draws) if draw.request.asked.params.is_penalised]
    if not rows:
        return logits
    picked = [draws[row] for row in rows]
    vocabulary = logits.shape[-1]
    counts = mx.array(np.stack([_output_counts(draw.request, vocabulary) for draw in picked]))
    in_prompt = mx.array(np.stack([_prompt_mask(draw.request, vocabulary) for draw in picked]))
    lazy = [(i, draw.lazy_index) for i, draw in enumerate(picked) if draw.lazy_index is not None]
    if lazy and pending_ids is not None:
        at = mx.array([i for i, _ in lazy])
        tokens = pending_ids[mx.array([index for _, index in lazy])]
        counts = counts.at[at, tokens].add(1.0)
    drafted = [
        (i, row - before) for i, row in enumerate(rows) for before in range(draws[row].num_drafted)
    ]
    if drafted:
        assert inputs is not None, "a draft's tokens are inputs of the step"
        at, sources = (mx.array(indices) for indices in zip(*drafted, strict=True))
        counts = counts.at[at, inputs[sources]].add(1.0)
    params = [draw.request.asked.params for draw in picked]
    where = mx.array(rows)
    some = logits[where]
    repetition = _column([p.repetition_penalty for p in params])
    scaled = mx.where(some > 0, some / repetition, some * repetition)
    some = mx.where(in_prompt | (counts > 0), scaled, some)
    some = some - _column([p.frequency_penalty for p in params]) * counts
    some = some - _column([p.presence_penalty for p in params]) * (counts > 0)
    changed = logits + 0
    changed[where] = some
    return changed


def _output_counts(request: LiveRequest, vocabulary: int) -> npt.NDArray[np.float32]:
    outputs = request.token_ids[request.num_prompt :]
    return np.bincount(np.frombuffer(outputs, np.int32), minlength=vocabulary).astype(np.float32)


def _prompt_mask(request: LiveRequest, vocabulary: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(vocabulary, np.bool_)
    prompt = np.frombuffer(request.token_ids[: request.num_prompt], np.int32)
    mask[prompt[prompt >= 0]] = True  # without rows of images
    return mask


def _with_bias(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    entries = [
        (row, token, bias)
        for row, draw in enumerate(draws)
        for token, bias in draw.request.asked.params.logit_bias.items()
    ]
    if not entries:
        return logits
    rows, tokens, biases = zip(*entries, strict=True)
    return logits.at[mx.array(rows), mx.array(tokens)].add(mx.array(biases, mx.float32))


def _without_early_ends(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Keep an answer from ending before its `min_tokens`.

    The penalty is finite: where a guide allows nothing but the end, that is still the best token.
    """
    entries = [
        (row, token)
        for row, draw in enumerate(draws)
        if draw.position - draw.request.num_prompt < draw.request.asked.params.min_tokens
        for token in draw.request.ends_on
        if token < logits.shape[-1]
    ]
    if not entries:
        return logits
    rows, tokens = zip(*entries, strict=True)
    ends = mx.zeros(logits.shape, mx.bool_)
    ends[mx.array(rows), mx.array(tokens)] = True
    return mx.where(ends, _NEVER, logits)


def _guided(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Mask tokens that the rows' guides forbid. A lazy row's guide cannot constrain it."""
    masks = {
        row: mask
        for row, draw in enumerate(draws)
        if draw.lazy_index is None
        and (guide := draw.request.feed_guide()) is not None
        and (mask := guide.mask(draw.num_drafted)) is not None
    }
    if not masks:
        return logits
    words = np.frombuffer(b"".join(masks.values()), np.uint32).reshape(len(masks), -1)
    where = mx.array(list(masks))
    some = mx.where(_bits(mx.array(words), logits.shape[-1]), logits[where], -mx.inf)
    if len(masks) == len(draws):
        return some
    changed = logits + 0
    changed[where] = some
    return changed


def _bits(words: mx.array, size: int) -> mx.array:
    """Expand (rows, words) uint32 to (rows, size) booleans; tokens without a bit are masked."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    bits = bits.reshape(words.shape[0], -1)[:, :size]
    missing = size - bits.shape[1]
    return mx.pad(bits, [(0, 0), (0, missing)]).astype(mx.bool_)


def _logprobs_of(
    raw: mx.array, ids: mx.array, draws: Sequence[Draw], rows: Sequence[int]
) -> tuple[mx.array, mx.array, mx.array]:
    """Return (chosen, top ids, top logprobs) of some rows, from the unmodified distribution."""
    where = mx.array(list(rows))
    some = raw[where]
    logprobs = some - mx.logsumexp(some, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, ids[where][:, None], axis=-1)[:, 0]
    num_top = max(draws[row].request.asked.params.logprobs or 0 for row in rows)
    top = best_tokens(logprobs, min(max(num_top, 1), logprobs.shape[-1]))
    return chosen, top, mx.take_along_axis(logprobs, top, axis=-1)
