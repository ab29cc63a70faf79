"""GreedyReference: what a model answers, by mlx-lm's dense path: one sequence, one cache, no pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


class GreedyReference:
    """Answers of `max_tokens` tokens, each computed once."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._model, _ = load_model(folder)
        self._model.set_dtype(mx.float32)
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...]:
        key = tuple(prompt)
        if key not in self._answers:
            self._answers[key] = self._compute(key)
        return self._answers[key]

    def _compute(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        cache, ids, answer = make_prompt_cache(self._model), mx.array([prompt]), list[int]()
        while len(answer) < self._max_tokens:
            logits = self._model(ids, cache=cache)[0, -1].astype(mx.float32)
            answer.append(int(mx.argmax(logits)))
            ids = mx.array([answer[-1:]])
        return tuple(answer)
