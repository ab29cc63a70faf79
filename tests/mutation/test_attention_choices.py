"""Which kernel runs, over what, and how it is judged: each wrong choice that still answers is found by a test.

Those of the kernels' texts are in `test_kernels.py`, indices of 32 bits in `tests/strict/test_index_widths.py`.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_kernels import (
    cooperative_tiles,
    cooperative_trial,
    gathered_attention,
    long_chunks,
    metal,
)
from metal_kernels.chunk_trial import ChunkTimes
from metal_kernels.dispatches import Dispatches
from metal_kernels.long_chunks import CopiedChunks
from metal_kernels.speeds import TimedAttention
from mlxserve.model import fused_qkv, step_peak
from tests import memory_table
from tests.doctor import test_attention_speeds
from tests.geometries import QWEN3_8B
from tests.metal_kernels import (
    test_chunk_trial,
    test_cooperative_tiles,
    test_long_chunks,
    test_msl_latents,
    test_plans,
    test_rounding,
    test_unfused_attention,
)
from tests.metal_kernels.test_chunk_trial import no_times as no_times
from tests.metal_kernels.test_cooperative_tiles import accelerators as accelerators
from tests.metal_kernels.test_cooperative_tiles import take as take
from tests.metal_kernels.test_long_chunks import mac as mac
from tests.metal_kernels.test_unfused_attention import calls as calls
from tests.metal_kernels.test_unfused_attention import choose as choose
from tests.model import test_chunk_choice, test_fused_layers, test_step_memory, test_step_peak
from tests.model.test_chunk_choice import file as file
from tests.model.test_chunk_choice import loaded as loaded
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "bind whole pools": Bug(
        memory_table,
        "first_page",
        "view = pool[:1]",
        "view = pool",
        test_step_memory.test_a_step_of_decodes_is_five_command_buffers_at_most_over_a_whole_pool,
        {"memory": 512, "model": QWEN3_8B},
    ),
    "copy as much on every machine": Bug(
        test_long_chunks,
        "longest_copied",
        "(total_memory() if memory is None else memory)",
        "(16 << 30)",
        test_long_chunks.test_copies_take_a_share_of_the_machines_memory,
    ),
    "copy long prompts into new memory": Bug(
        test_long_chunks,
        "room_for",
        "-(-positions // _ROOM) * _ROOM",
        "positions",
        test_long_chunks.test_copies_of_a_long_prompt_use_the_memory_of_earlier_chunks_again,
    ),
    "let copies exceed their share": Bug(
        test_long_chunks,
        "longest_copied",
        "positions_in(most // each)",
        "most // each",
        test_long_chunks.test_copies_with_their_room_take_at_most_their_share,
    ),
    "attend over the room that is left": Bug(
        long_chunks.Gathered,
        "from_tables",
        "room = room_for(num_seen)",
        "room = num_seen = room_for(num_seen)",
        test_long_chunks.test_copies_are_right_however_much_of_their_room_is_left,
        {"before": 255, "window": None},
    ),
    "begin a window one position late": Bug(
        long_chunks,
        "_first_position",
        "- window + 1",
        "- window + 2",
        test_long_chunks.test_a_long_chunk_sees_all_of_its_window_and_nothing_before_it,
        {"options": {"window": 64}},
    ),
    "force the fused kernel where MLX computes unfused": Bug(
        long_chunks,
        "is_fast",
        "if not is_fused(head_dim, dtype):\n        return False",
        "return is_fused(head_dim, dtype)",
        test_long_chunks.test_head_dimension_rows_and_accelerators_decide,
        {"dtype": mx.bfloat16},
    ),
    "take neural accelerators for a fused kernel": Bug(
        long_chunks,
        "is_fast",
        "if not is_fused(head_dim, dtype):",
        "if False:",
        test_long_chunks.test_a_kernel_that_mlx_does_not_have_is_not_chosen,
    ),
    "copy few rows because more are faster": Bug(
        ChunkTimes,
        "choice",
        "break",
        "continue",
        test_chunk_trial.test_copies_begin_where_they_are_faster_for_all_more_rows,
        {"copies": (0.9, 0.9, 1.1, 0.9), "first": 256},
    ),
    "compute unfused whatever was timed": Bug(
        ChunkTimes,
        "_is_unfused",
        " and (fused is None or unfused < fused)",
        "",
        test_chunk_trial.test_of_mlxs_two_attentions_the_one_for_most_rows_takes_all_copies,
        {
            "fused": (1.1, 1.1, 1.1, 0.9),
            "unfused": (0.4, 0.4, 0.4, 1.1),
            "chosen": CopiedChunks(256),
        },
    ),
    "choose by the fewest rows": Bug(
        ChunkTimes,
        "_is_unfused",
        "max(self.by_rows)",
        "min(self.by_rows)",
        test_chunk_trial.test_of_mlxs_two_attentions_the_one_for_most_rows_takes_all_copies,
        {
            "fused": (0.5, 0.5, 0.5, 0.9),
            "unfused": (0.8, 0.8, 0.8, 0.8),
            "chosen": CopiedChunks(32, unfused_heads=16),
        },
    ),
    "plan for no scores": Bug(
        test_unfused_attention,
        "longest_copied",
        " + how.score_bytes(rows, dtype)",
        "",
        test_unfused_attention.test_copies_and_scores_have_the_share_of_memory_together,
    ),
    "plan for the scores of one query head": Bug(
        CopiedChunks,
        "score_bytes",
        "self.unfused_heads * dtype.size",
        "dtype.size",
        test_unfused_attention.test_copies_and_scores_have_the_share_of_memory_together,
    ),
    "leave scores out of a step's peak": Bug(
        step_peak,
        "_bytes_of",
        "return room * (each + scores)",
        "return room * each",
        test_step_peak.test_scores_of_unfused_attention_are_planned_for,
    ),
    "count no scores as rows under way": Bug(
        test_unfused_attention,
        "counted_copies",
        "return counted_positions(rows, room, head_dim, dtype)",
        "return room",
        test_unfused_attention.test_scores_count_as_positions_of_as_many_bytes,
    ),
    "compute unfused for any number of heads": Bug(
        metal,
        "can_copy",
        " and num_heads <= how.unfused_heads",
        "",
        test_unfused_attention.test_a_chunk_that_is_not_planned_for_is_right_by_tiles,
        {"options": {"group": 3}, "without": frozenset()},
    ),
    "append sinks to another copy of the scores": Bug(
        metal,
        "can_copy",
        "not has_sinks and ",
        "",
        test_unfused_attention.test_a_chunk_that_is_not_planned_for_is_right_by_tiles,
        {"options": {"has_sinks": True}, "without": frozenset()},
    ),
    "let a block see all positions": Bug(
        gathered_attention,
        "attention_in_blocks",
        "stop = seen - num_rows + end",
        "stop = seen",
        test_unfused_attention.test_a_chunk_in_blocks_is_right,
        {"options": test_unfused_attention.OPTIONS[0], "before": 37},
    ),
    "begin a block's window one position late": Bug(
        gathered_attention,
        "attention_in_blocks",
        "first - window + 1",
        "first - window + 2",
        test_unfused_attention.test_a_chunk_in_blocks_is_right,
        {"options": {"window": 21}, "before": 37},
    ),
    "compute all rows in one block": Bug(
        metal,
        "runs_of",
        "else BLOCK_BYTES",
        "else 1 << 40",
        test_unfused_attention.test_a_chunk_in_blocks_is_right,
        {"options": {}, "before": 0},
    ),
    "take cooperative tensors without a trial": Bug(
        test_chunk_choice,
        "choose_chunks",
        "cooperative_tiles.refuse(what.head_dim, what.dtype)",
        "pass",
        test_chunk_choice.test_cooperative_tensors_are_timed_after_their_trial_which_each_load_repeats,
    ),
    "take what differs for equal": Bug(
        test_cooperative_tiles,
        "why_not_cooperative",
        "if not error <= 2 * TOLERANCES[what.dtype]:",
        "if False:",
        test_cooperative_tiles.test_the_trial_fails_where_lanes_are_others_and_where_the_text_is_refused,
    ),
    "take a text that failed for a later model": Bug(
        cooperative_tiles,
        "refuse",
        "timed_rows[head_dim, dtype] = None",
        "timed_rows.setdefault((head_dim, dtype), None)",
        test_chunk_choice.test_a_text_that_fails_for_a_later_model_is_used_for_none,
    ),
    "try no text of images": Bug(
        cooperative_trial,
        "difference",
        "if has_ends else [tables]",
        "if False else [tables]",
        test_cooperative_tiles.test_the_text_for_images_is_tried_where_a_model_may_need_it,
        {"is_refused": True},
    ),
    "try the text of images with rows of text": Bug(
        cooperative_trial,
        "_with_image",
        "ends[_IMAGE] = ends[_IMAGE][-1]",
        "pass",
        test_cooperative_tiles.test_the_text_for_images_is_tried_where_a_model_may_need_it,
        {"is_refused": False},
    ),
    "know no images of a model": Bug(
        test_chunk_choice,
        "choose_chunks",
        "and loaded.vision.bidirectional is not None",
        "and False",
        test_chunk_choice.test_images_that_attend_in_both_directions_are_tried,
    ),
    "take cooperative tensors for any number of rows": Bug(
        metal,
        "runs_of",
        "first is not None and rows >= first",
        "first is not None",
        test_cooperative_tiles.test_chunks_of_fewer_rows_keep_the_other_kernel_and_answers_are_alike,
    ),
    "compare copies with the slower tiles": Bug(
        ChunkTimes,
        "choice",
        "copies >= times.without_copies",
        "copies >= times.tiles",
        test_cooperative_tiles.test_cooperative_tensors_begin_where_they_are_faster_and_copies_must_beat_them,
    ),
    "let the last model choose for all": Bug(
        test_chunk_trial,
        "use_timed",
        "timed_choices.setdefault((head_dim, dtype), chosen)",
        "timed_choices[head_dim, dtype] = chosen",
        test_chunk_trial.test_what_was_timed_replaces_the_rule_and_the_first_model_decides,
    ),
    "decode large groups one head after the other": Bug(
        Dispatches,
        "decode",
        "if self._uses_matrices and",
        "if False and",
        test_attention_speeds.test_the_kernel_that_is_named_is_the_one_that_is_timed,
        {"what": TimedAttention(75, kv_heads=1, head_dim=64, group=8), "kernel": "grouped_decode"},
    ),
    "share one tile where two fit": Bug(
        test_plans,
        "num_tiles",
        "return 2 if",
        "return 1 if",
        test_plans.test_keys_and_values_have_tiles_of_their_own_where_both_fit,
    ),
    "leave half of a core to no latents": Bug(
        test_msl_latents,
        "tile_keys",
        "60 << 10",
        "32 << 10",
        test_msl_latents.test_a_tile_fits_in_threadgroup_memory_and_partitions_are_whole_tiles,
        {"dtype": mx.float16, "dims": (512, 64)},
    ),
    "fuse layers whose keys a later one reads": Bug(
        fused_qkv,
        "_may_be_attention",
        " and not is_read",
        "",
        test_fused_layers.test_a_layer_whose_keys_a_later_one_reads_keeps_its_own_kernels,
    ),
    "fuse norms of values as if there were none": Bug(
        fused_qkv,
        "_norms_of",
        "pair[1].eps, of_values.eps",
        "pair[1].eps",
        test_fused_layers.test_norms_of_values_are_part_of_the_kernel,
        {"changes": test_fused_layers.GEMMA_4[0]},
    ),
    "divide errors by the largest number of all rows": Bug(
        test_rounding,
        "row_error",
        "np.abs(right).max(axis=-1)",
        "np.abs(right).max()",
        test_rounding.test_an_error_is_measured_by_its_own_row,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_test_finds_the_wrong_choice(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(request, (AssertionError,))
