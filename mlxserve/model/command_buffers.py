"""Commits: bounds the part of a step that MLX has encoded but not computed, on Metal.

MLX keeps what an operation reads until its command buffer completes. A command buffer has a third
of a step of decodes or more (machine.py), since each of them costs the device a pause; in a step
with a prompt it would keep the activations of a dozen layers. So such a step is evaluated while its
layers are called:

    keys of layer 0 | layer 0 ... keys of layer 1 | layer 1 ... keys of layer 2 | ...
                    ^ a command buffer ends here  ^ and here; if too many rows are under way, the host
                                                    waits for the oldest
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from metal_kernels.reading import evaluate
from mlxserve.core.step_rows import rows_kept

# Rows of a command buffer, over its layers: a pause of some 10 us is small beside them.
ROWS_OF_A_COMMIT = 256


class Commits:
    """Command buffers of all steps over one pool. Lives on the engine's thread."""

    def __init__(self, max_under_way: int) -> None:
        """Bound the work under way to `most` rows times layers."""
        self._most = max_under_way
        # Rows of layers since the last commit.
        self._num_waiting = 0
        self._num_under_way = 0
        self._under_way: deque[tuple[mx.array, int]] = deque()

    def of_step(
        self, num_rows: int, num_decodes: int, positions: int, copied: int = 0
    ) -> Callable[[mx.array], None] | None:
        """Return the function to call with each layer's keys; None if the step needs no commits.

        Arguments as in `rows_kept`.
        """
        kept = rows_kept(num_rows, num_decodes, positions, copied)
        # The end of a step is evaluated.
        self._num_waiting = 0
        return partial(self._after_layer, kept) if kept else None

    def _after_layer(self, num_rows: int, keys: mx.array) -> None:
        """Raises DeviceError."""
        self._num_waiting += num_rows
        if self._num_waiting < ROWS_OF_A_COMMIT:
            return
        mx.async_eval(keys)  # type: ignore[no-untyped-call]
        self._under_way.append((keys, self._num_waiting))
        self._num_under_way += self._num_waiting
        self._num_waiting = 0
        while self._num_under_way > self._most:
            oldest, rows = self._under_way.popleft()
            self._num_under_way -= rows
            try:
                evaluate(oldest)
            except Exception:
                self._under_way.clear()  # both steps under way failed as well
                self._num_under_way = 0
                raise
