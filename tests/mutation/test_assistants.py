"""Bugs planted into assistants: each is found by a test of what they compute."""

from __future__ import annotations

import pytest

from mlxserve.core.errors import MlxServeError
from mlxserve.model.drafting import assistant as assistant_file
from mlxserve.model.drafting.assistant import Assistant
from mlxserve.model.drafting.assistant_model import AssistantModel, ClusteredHead
from tests import test_assistants as computed
from tests.model.drafting import test_assistant_model as definition
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation


unprobed = computed.unprobed
target = computed.target
assistant = computed.assistant


ONE = {"options": {"num_pages": 40}}
LAST = computed.test_logits_are_those_over_whole_texts
CLUSTERS = definition.test_tokens_outside_the_chosen_clusters_lose_in_each_row_of_its_own
LIKE_MLX_VLM = definition.test_a_draft_is_that_of_mlx_vlm

FOUND: dict[str, Bug] = {
    "read the pages of the first layer of a type": Bug(
        assistant_file,
        "last_layers",
        "for at, spec in enumerate(layers)",
        "for at, spec in reversed(list(enumerate(layers)))",
        LAST,
        ONE,
    ),
    "shift the position by one": Bug(
        Assistant, "batch", "_row(chunk, chunk.start - 1)", "_row(chunk, chunk.start)", LAST, ONE
    ),
    "carry the hidden state of the row before": Bug(
        Assistant,
        "_index_before",
        "chunk.start - 1 - kept.start",
        "max(0, chunk.start - 2 - kept.start)",
        LAST,
        ONE,
    ),
    "keep the hidden states of the first rows of a step": Bug(
        Assistant,
        "follow",
        "rows += range(end - 1 - len(chunk.draft), end)",
        "rows += range(1 + len(chunk.draft))",
        LAST,
        ONE,
    ),
    "give the second call the hidden state of another request": Bug(
        Assistant, "_next", "carried[:num])", "carried[::-1][:num])", LAST, ONE
    ),
    "give the second call the token before": Bug(
        Assistant,
        "_next",
        "self.batch(chunks), ids[:num]",
        "self.batch(chunks), ids[:num] * 0",
        LAST,
        ONE,
    ),
    "see all positions in layers with a window": Bug(
        assistant_file,
        "_place",
        "(windows.kv if has_window else kv), index, has_window",
        "(windows.kv if has_window else kv), index, False",
        LAST,
        {"options": {"num_pages": 100, "num_window_pages": 30}},
    ),
    "put the hidden state before the token": Bug(
        AssistantModel,
        "__call__",
        "mx.concatenate([embedded, hidden], axis=-1)",
        "mx.concatenate([hidden, embedded], axis=-1)",
        LIKE_MLX_VLM,
        {"length": 9, "changes": {}},
    ),
    "let the other tokens tie with the worst one": Bug(
        ClusteredHead, "__call__", "keepdims=True) - 1", "keepdims=True)", CLUSTERS
    ),
    "choose the farthest clusters": Bug(
        ClusteredHead,
        "__call__",
        "mx.argpartition(-scores",
        "mx.argpartition(scores",
        LIKE_MLX_VLM,
        {"length": 9, "changes": definition.CLUSTERED},
    ),
    "take the lowest logit of all rows": Bug(
        ClusteredHead,
        "__call__",
        "logits.min(axis=-1, keepdims=True)",
        "mx.broadcast_to(logits.min(), (num_rows, 1))",
        CLUSTERS,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_of_assistants_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError, IndexError, ValueError, MlxServeError))
