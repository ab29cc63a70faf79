"""The peak memory of a step, estimated from a model's sizes to list models without loading them.

A server measures this peak (`model/step_peak.py`). On Metal the estimate follows the rules by which
a server bounds and plans a step, and counts from the sizes what a row leaves in a layer;
`tests/hub/test_step_estimate.py` compares it with replays of MLX's command buffers. It has not been
compared on a Mac.
"""

from __future__ import annotations

from dataclasses import dataclass

from metal_kernels.limits import COPIED_DIMS, MIN_COPIED_ROWS, SHARE_COPIED, positions_in, room_for
from mlxserve.core.step_rows import layers_under_way

# The rows and positions of the step that `model/step_peak.py` measures, and its factor for the
# peak.
_MAX_ROWS, _MAX_POSITIONS, _MARGIN = 2048, 8192, 1.25
# Bytes of a value on Metal, and of a row's logits with what is sampled from them: one array of such
# values and four of float32.
_VALUE, _LOGIT = 2, 18


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a model that decide how large a step's arrays are.

    width: hidden size
    inner: intermediate size; for experts, the sum over those active for a token
    num_heads: query heads of a layer
    vocabulary: tokens; 0 if that is not known
    copied: keys and values of a token in the largest layer whose pages a long chunk copies; 0 for
        none
    """

    width: int = 0
    inner: int = 0
    num_heads: int = 0
    vocabulary: int = 0
    copied: int = 0


def copied_values(kv_heads: int, head_dim: int) -> int:
    """Keys and values of a token in a layer, if long chunks copy its pages; otherwise 0."""
    return 2 * kv_heads * head_dim if head_dim in COPIED_DIMS else 0


def step_on_metal(
    sizes: StepSizes, *, num_rows: int, num_seqs: int, longest: int, total: int
) -> int:
    """Bytes that a server on a Mac plans for a step, beside weights and cache.

    num_rows: rows of the step
    num_seqs: requests in it, one of them a chunk
    longest: positions of a sequence
    total: bytes of the Mac's memory
    """
    rows = min(num_rows, _MAX_ROWS)
    row = _VALUE * (7 * sizes.width + 2 * sizes.inner)
    logits = _LOGIT * num_seqs * sizes.vocabulary
    copied = _positions_copied(sizes, rows - num_seqs + 1, longest, total)
    seen = min(copied, _MAX_POSITIONS)
    before = layers_under_way(rows, seen, total)
    peak = before * (rows * row + seen * _VALUE * sizes.copied) + logits
    if copied > seen:
        after = layers_under_way(rows, copied, total)
        peak = peak * after // before + after * copied * _VALUE * sizes.copied
    return int(peak * num_rows // rows * _MARGIN)


def _positions_copied(sizes: StepSizes, rows: int, longest: int, total: int) -> int:
    """Maximum room of the copies for a chunk of these rows."""
    if not sizes.copied or rows < MIN_COPIED_ROWS:
        return 0
    max_copied = positions_in(total // SHARE_COPIED // (_VALUE * sizes.copied))
    return room_for(max(rows, min(max_copied, longest)))


def step_on_a_cpu(sizes: StepSizes, *, num_rows: int) -> int:
    """Bytes that a step takes without Metal, in float32.

    A rule of thumb fitted to what is measured for Llama and Qwen3 geometries: 7 values per hidden
    unit and per intermediate one, and float32 scores of 64 rows at a time in ten arrays, of one row
    in 256. For the included model and that of 100M it is within a tenth of the planned peak.
    """
    values = 7 * (sizes.width + sizes.inner)
    return num_rows * 4 * (values + 10 * 64 * sizes.num_heads)
