"""Planted bugs in reading GGUF files, each found by a test."""

from __future__ import annotations

import pytest

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf import actions, completions, config, grids, slots, tokenizer, weights
from tests.hub.gguf import test_blocks, test_judged, test_tokenizer
from tests.hub.gguf.test_judged import cache_fixture
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

__all__ = ["cache_fixture"]  # a fixture of the claims

JUDGED = test_judged.test_a_small_file_is_answered_as_llama_cpp_answers_it
BUGS = {
    "value heads stay tiles": Bug(
        actions.GroupHeads,
        "apply",
        ".swapaxes(axis, axis + 1)",
        "",
        JUDGED,
        {"case": "qwen35"},
    ),
    "pairs of values are swapped too": Bug(
        actions.SwapPairs,
        "apply",
        "[:rows]",
        "",
        JUDGED,
        {"case": "internlm2"},
    ),
    "the decay of a recurrent layer is read as it is": Bug(
        actions.NegativeLog,
        "apply",
        "mx.log(-array.astype(mx.float32))",
        "array",
        JUDGED,
        {"case": "qwen35"},
    ),
    "gate and up are the same rows": Bug(
        actions.TensorPart,
        "apply",
        "[self.number]",
        "[0]",
        JUDGED,
        {"case": "gemma4/experts"},
    ),
    "actions on packed tensors are left out": Bug(
        weights,
        "_joined",
        "for action in slot.actions:",
        "for action in ():",
        test_judged.test_actions_leave_quantised_tensors_packed,
        {"case": "qwen35", "parts": ("in_proj_qkv",)},
    ),
    "blocks of a drafting head are layers": Bug(
        config,
        "_config",
        'int(values.get("nextn_predict_layers", 0))',
        "0",
        test_judged.test_blocks_of_a_drafting_head_are_not_layers,
    ),
    "a bias of experts is taken for the router's": Bug(
        slots,
        "_own_names",
        '((inner, ""), (module, f".{leaf}"))',
        '((module, f".{leaf}"), (inner, ""))',
        JUDGED,
        {"case": "nemotron_h_moe"},
    ),
    "layers with a window attend to everything": Bug(
        completions,
        "_windows",
        "if is_window else",
        "if not is_window else",
        JUDGED,
        {"case": "gemma4/experts"},
    ),
    "a space is put before the first part only": Bug(
        tokenizer,
        "_set_prefix",
        "if has_prefix:",
        "if has_prefix: return\n    if has_prefix:",
        test_tokenizer.test_a_space_is_put_before_each_part_between_control_tokens,
    ),
    "the scale of a block of a table is read elsewhere": Bug(
        grids,
        "_scale",
        "raw[:, :2]",
        "raw[:, 2:4]",
        test_blocks.test_random_blocks_have_the_values_of_llama_cpp,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, request: pytest.FixtureRequest) -> None:
    BUGS[name].check_found(request, (AssertionError, ValueError, UnsupportedModel))
