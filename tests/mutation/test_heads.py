"""Bugs planted into heads: each is found by a test of their formulas, rows, guesses, or of the probe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.model import paged
from mlxserve.model.drafting import head_weights, load
from mlxserve.model.drafting.head import MtpHead
from mlxserve.model.drafting.head_model import HeadInput, HeadNorm
from mlxserve.model.drafting.paged_drafter import PagedDrafter
from tests.model.drafting import test_heads as claims
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda kind: claims.write_noisy(tmp_path_factory.mktemp(kind), kind)


FOUND: dict[str, Bug] = {
    "read the hidden state before the one that belongs to a row": Bug(
        MtpHead,
        "_hidden_before",
        "np.arange(source, source + end - start)",
        "np.maximum(np.arange(source, source + end - start) - 1, 1)",
        claims.test_each_guess_is_made_of_the_hidden_state_before_its_token,
        {"from_the_start": True},
    ),
    "carry the hidden state of another row": Bug(
        MtpHead,
        "_logits",
        "self._head.carried[mx.array(rows)]",
        "self._head.carried[: len(rows)]",
        claims.test_each_guess_is_made_of_the_hidden_state_before_its_token,
        {"from_the_start": True},
    ),
    "store rows one position late": Bug(
        MtpHead,
        "_compute",
        "part = Chunk(chunk.request, start, length, chunk.page_table, samples=False)",
        "part = Chunk(chunk.request, max(0, start - 1), length, chunk.page_table, samples=False)",
        claims.test_a_row_is_a_function_of_the_tokens_up_to_it,
        {"kind": "mimo", "max_tokens": 3},
    ),
    "keep the rows of guesses as those of the text": Bug(
        PagedDrafter,
        "_parts",
        "if is_complete and self.keeps_guesses else 0",
        "if is_complete else 0",
        claims.test_a_row_is_a_function_of_the_tokens_up_to_it,
        {"kind": "mimo", "max_tokens": 3},
    ),
    "leave full pages without their rows": Bug(
        MtpHead,
        "_due",
        "return self.pages.num_leading(chunk, certain), full",
        "return 0, 0",
        claims.test_a_row_is_a_function_of_the_tokens_up_to_it,
        {"kind": "mimo", "max_tokens": 0},
    ),
    "forget the hidden states of steps without drafts": Bug(
        MtpHead,
        "_drop_computed",
        "kept = [each for each in before if each.end >= missing]",
        "kept = []",
        claims.test_a_row_is_a_function_of_the_tokens_up_to_it,
        {"kind": "mimo", "max_tokens": 0},
    ),
    "join embedding and hidden state in the other order": Bug(
        HeadInput,
        "__call__",
        "halves.reverse()",
        "pass",
        claims.test_a_head_computes_the_published_formula,
        {"kind": "mimo"},
    ),
    "exchange the norms of embedding and hidden state": Bug(
        HeadInput,
        "__call__",
        "[self.embedding_norm(embedded), self.hidden_norm(hidden)]",
        "[self.hidden_norm(embedded), self.embedding_norm(hidden)]",
        claims.test_a_head_computes_the_published_formula,
        {"kind": "mimo"},
    ),
    "take norms as they are stored": Bug(
        head_weights,
        "_placed",
        "if is_minus_one:",
        "if False:",
        claims.test_a_head_computes_the_published_formula,
        {"kind": "qwen3_next"},
    ),
    "hand on the hidden state after the last norm": Bug(
        HeadNorm,
        "__call__",
        "normed if self._carries_normed else hidden",
        "normed",
        claims.test_a_head_computes_the_published_formula,
        {"kind": "deepseek_v3"},
    ),
    "show the hidden state after the last norm": Bug(
        paged.ShownNorm,
        "__call__",
        "self._selector.show_unnormed(hidden)",
        "self._selector.show_unnormed(self.norm(hidden))",
        claims.test_a_head_computes_the_published_formula,
        {"kind": "step3p5"},
    ),
    "let every head pass the probe": Bug(
        load,
        "_load_head",
        "if accepted >= MIN_SHARE:",
        "if True:",
        claims.test_a_head_of_another_model_is_refused,
        {"kind": "mimo"},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_of_heads_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, pytest.fail.Exception))
