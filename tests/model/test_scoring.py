"""A text's tokens are scored as one dense forward would, in pieces of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.scoring import Scoring
from mlxserve.request import TokenLogprob

TEXT = [5, 9, 2, 7, 7, 3, 11, 4] * 3
BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]


def score(loaded: LoadedModel, text: list[int], num_top: int, size: int) -> list[TokenLogprob]:
    scoring = Scoring(loaded.model, text, num_top)
    while (scored := scoring.advance(size)) is None:
        pass
    scoring.release()
    return scored


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "gemma2"])
def test_each_token_but_the_first_is_scored_by_the_ones_before(
    build_model: BuildModel, kind: str
) -> None:
    loaded = prepare(*build_model(kind), kind)
    logits = mx.array(loaded.model(mx.array([TEXT])))[0].astype(mx.float32)
    wanted = np.array(nn.log_softmax(logits, axis=-1))
    for size in (1, 7, 23, 100):
        scored = score(loaded, TEXT, 3, size)
        assert [one.token_id for one in scored] == TEXT[1:]
        for row, one in enumerate(scored):
            assert one.logprob == pytest.approx(wanted[row, one.token_id], abs=1e-3)
            assert len(one.top) == 3
            for token_id, logprob in one.top:
                assert logprob == pytest.approx(wanted[row, token_id], abs=1e-3)
            assert one.top[0][1] == pytest.approx(wanted[row].max(), abs=1e-3)


def test_no_alternatives_are_given_where_none_are_wanted(build_model: BuildModel) -> None:
    loaded = prepare(*build_model("llama"), "llama")
    assert all(one.top == () for one in score(loaded, TEXT, 0, 100))


def test_a_text_of_one_token_has_nothing_to_score(build_model: BuildModel) -> None:
    loaded = prepare(*build_model("llama"), "llama")
    assert score(loaded, [5], 2, 10) == []
