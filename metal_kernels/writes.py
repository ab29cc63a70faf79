"""Writes: the kernels that write the rows of a step, made once for the layers of a shape.

They are kept where the caller keeps the step's slots, in `Plans`: a model with several pools of one backend has
slots for each, and its layers take turns.
"""

from __future__ import annotations

import mlx.core as mx

from metal_kernels import kernels
from metal_kernels.dispatches import Dispatches
from metal_kernels.kernels import Dispatch, Kernels
from metal_kernels.ops import Heads, Norms, Projected, Slots, check_write
from metal_kernels.plans import WritePlan
from metal_kernels.refusals import check_pools
from metal_kernels.rotary import RotatedWrites
from metal_kernels.tables import Plans

_ROWS = "rows"


class Writes:
    """The write kernels of one backend."""

    def __init__(self, kernels: Kernels, dispatches: Dispatches) -> None:
        self._dispatches = dispatches
        self._rotated = RotatedWrites(kernels)

    def of_rows(
        self,
        keys: mx.array,
        values: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: Slots,
        plans: Plans,
    ) -> tuple[Dispatch, ...]:
        """Dispatch the writes of whole pages, and of the rows outside them.

        Raises ValueError for inconsistent arguments.
        """
        check_write(without_length(keys), without_length(values), k_pool, v_pool, slots)
        check_pools(k_pool, v_pool, may_be_latent=True)
        if keys.dtype != k_pool.dtype:
            moves = row_moves(slots, plans).tokens_on_device
            return (self._dispatches.quantise(keys.dtype, moves, len(slots), k_pool),)
        pages = page_moves(slots, k_pool.shape[2], plans)
        kinds = (
            (kernels.WRITE_KV_PAGES, pages.pages_on_device, len(pages.pages)),
            (kernels.WRITE_KV_TOKENS, pages.tokens_on_device, len(pages.tokens)),
        )
        return tuple(self._dispatches.move(*kind, k_pool, v_pool) for kind in kinds if kind[2])

    def of_rotated(
        self,
        projected: Projected,
        turns: mx.array,
        heads: Heads,
        norms: Norms,
        pools: tuple[mx.array, mx.array],
        slots: Slots,
        plans: Plans,
    ) -> Dispatch:
        """Dispatch rotating and writing all rows. Raises ValueError for inconsistent arguments."""
        k_pool, v_pool = pools
        check_pools(k_pool, v_pool)
        written = mx.zeros((len(slots), heads.num_kv, heads.dim), projected[0].dtype)
        check_write(written, written, k_pool, v_pool, slots)
        moves = row_moves(slots, plans).tokens_on_device
        return self._rotated.dispatch(projected, turns, heads, norms, moves, k_pool)


def row_moves(slots: Slots, plans: Plans) -> WritePlan:
    """Plan every row alone."""
    return plans.plan(_ROWS, lambda: WritePlan.of_rows(slots))


def page_moves(slots: Slots, page_size: int, plans: Plans) -> WritePlan:
    """Plan whole pages, and the rows outside them."""

    def plan() -> WritePlan:
        return WritePlan.of_pages(slots, page_size) or row_moves(slots, plans)

    return plans.plan(("pages", page_size), plan)


def keep_moves(moves: WritePlan, plans: Plans) -> None:
    """Store the targets of the rows, so that their slots' values are ignored."""
    plans.plan(_ROWS, lambda: moves)


def without_length(array: mx.array) -> mx.array:
    """Return (T, heads, D), also of rows as models pass them; kernels see no difference."""
    return array.squeeze(2) if array.ndim == 4 and array.shape[2] == 1 else array
