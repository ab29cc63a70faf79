"""Adapters of other rows and pages of other adapters: each is found when the model is loaded, or by a test."""

from __future__ import annotations

import pytest

from mlxserve import build
from mlxserve.chat.view import View
from mlxserve.core.errors import UnsupportedModel
from mlxserve.model import adapter_shares, step_graphs
from mlxserve.model.adapted_layers import AdaptedEmbedding, AdapterRows
from mlxserve.model.adapters import Adapters
from tests import test_adapters
from tests.model import test_adapter_shares, test_step_graphs
from tests.mutation.bug import Bug
from tests.test_adapters import load as load
from tests.test_adapters import tuned as tuned

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "take the inputs of a layer for its outputs": Bug(
        adapter_shares,
        "shares_of",
        "Share(inputs=numbers) if is_input",
        "Share(inputs=numbers) if not is_input",
        test_adapter_shares.test_shares_are_what_shard_has_left,
        {"kind": "llama", "size": 2, "rank": 1},
    ),
    "take the part of another rank": Bug(
        adapter_shares,
        "shares_of",
        "numbers = left[path].weight.flatten()",
        "numbers = left[path].weight.flatten()[::-1]",
        test_adapter_shares.test_shares_are_what_shard_has_left,
        {"kind": "qwen3_5", "size": 2, "rank": 1},
    ),
    "give rows the adapters of others": Bug(
        Adapters,
        "_of",
        "mx.array(index)",
        "mx.array(index[::-1])",
        test_adapters.test_an_adapter_answers_as_mlx_lm_alone_cached_and_beside_others,
    ),
    "scale as another adapter": Bug(
        Adapters,
        "_of",
        "self.scales[number]",
        "self.scales[0]",
        test_adapters.test_an_adapter_answers_as_mlx_lm_alone_cached_and_beside_others,
    ),
    "count a chunk as one row": Bug(
        Adapters,
        "of_chunks",
        "range(chunk.length)",
        "range(1)",
        test_adapters.test_an_adapter_answers_as_mlx_lm_alone_cached_and_beside_others,
    ),
    "adapt a tied head as the embedding": Bug(
        AdaptedEmbedding,
        "as_linear",
        "(chosen := self._rows.of_head) is None",
        "True",
        test_adapters.test_an_adapter_answers_as_mlx_lm_alone_cached_and_beside_others,
    ),
    "share a page across adapters": Bug(
        View,
        "with_adapter",
        'f"{self.salt}/{digest}"',
        "self.salt",
        test_adapters.test_pages_are_shared_within_an_adapter_and_not_across,
    ),
    "know an adapter by its name": Bug(
        View,
        "with_adapter",
        'f"{self.salt}/{digest}"',
        'f"{self.salt}/{name}"',
        test_adapters.test_pages_of_adapters_are_found_on_disk_after_a_restart,
    ),
    "name prefixes for all adapters": Bug(
        build,
        "language_model",
        'prefix_file.with_stem(f"{prefix_file.stem}-{digest}")',
        "prefix_file",
        test_adapters.test_a_named_prefix_belongs_to_its_adapter,
    ),
    "give recurrent layers the first rows' adapters": Bug(
        AdapterRows,
        "narrow",
        "number[rows], scale[rows]",
        "number[: rows.stop - rows.start], scale[: rows.stop - rows.start]",
        test_adapters.test_adapters_of_every_kind_of_layer_answer_as_mlx_lm,
        {"kind": "qwen3_next"},
    ),
    "forget that experts are sorted": Bug(
        AdapterRows,
        "of_experts",
        "mx.argsort(self._experts.flatten())",
        "mx.arange(self._experts.size)",
        test_adapters.test_adapters_of_every_kind_of_layer_answer_as_mlx_lm,
        {"kind": "qwen3_moe"},
    ),
    "record a step without adapters": Bug(
        step_graphs,
        "_recording",
        "layout = replace(layout, adapters=(adapters[0], adapters[1]))",
        "pass",
        test_step_graphs.test_a_recorded_step_has_the_adapters_of_its_own_rows,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_load_or_a_test_finds_the_bug_of_adapters(
    name: str, request: pytest.FixtureRequest
) -> None:
    FOUND[name].check_found(request, (AssertionError, UnsupportedModel))
