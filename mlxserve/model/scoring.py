"""Scoring: the log-probability of each token of a text.

Computed without the pages: cached tokens are not computed again, and have no logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.reading import evaluate, read
from mlxserve.model.dense_text import DenseText
from mlxserve.model.sampler import best_tokens
from mlxserve.model.workers import Workers
from mlxserve.request import TokenLogprob


class Scoring(DenseText[list[TokenLogprob]]):
    """Log-probabilities of a text's tokens, except the first, which has no context."""

    def __init__(
        self,
        model: nn.Module,
        token_ids: Sequence[int],
        num_top: int,
        workers: Workers | None = None,
    ) -> None:
        """`num_top`: number of alternatives reported beside each token of the text."""
        super().__init__(model, token_ids, workers)
        self._num_top = num_top
        self._scored: list[TokenLogprob] = []

    def _compute(self, start: int, end: int) -> None:
        following = list(self._token_ids[start + 1 : end + 1])
        if not following:
            # A text of one token, or a piece that is only its last.
            return
        logits = self._logits(start, end)[0, : len(following)].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, mx.array(following, mx.int32)[:, None], axis=-1)
        top = best_tokens(logprobs, min(max(self._num_top, 1), logprobs.shape[-1]))
        values = mx.take_along_axis(logprobs, top, axis=-1)
        evaluate(chosen, top, values)
        rows = zip(
            following,
            read(chosen[:, 0]).tolist(),
            read(top).tolist(),
            read(values).tolist(),
            strict=True,
        )
        for token_id, logprob, ids, numbers in rows:
            best = zip(ids[: self._num_top], numbers[: self._num_top], strict=True)
            self._scored.append(TokenLogprob(token_id, logprob, tuple(best)))

    def _result(self) -> list[TokenLogprob]:
        return self._scored
