"""What a step takes by its rows, in steps of one row: Macs by mlx's rules for quantised weights, and this CPU.

Of mlx's Metal backend (`mlx/backend/metal/quantized.cpp`, August 2026), for affine weights of large layers:

    M3 and later   the kernel for few rows reads all weights once for every five rows
    M1, M2         it reads them once for every row; caches hold some of them
    13 rows (12 on an Ultra, 6 on M1 and M2) and more    the matrix kernel, of one price up to 32 rows

Another row within a pass takes `row` passes. Published times of whole models are within 10 %: M5 Max, 27B and
70B in 4 bits (mlxcel issues 1182 and 1197, mlx issue 3791), M4 Pro (mlx issue 3839), M1 Ultra (mlxcel issue
1185). A mixture of experts reads those of all rows: 0.26 of a step a row on an M3 Ultra (oMLX issue 3374).
None of these was measured by us. The CPU's table is of the included model on two cores of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil

from mlxserve.model.row_speeds import ROWS

Steps = Callable[[int], float]  # steps of one row that a step of so many rows takes

_MATRIX_ROWS = 32  # that a pass of the matrix kernel takes


def by_five(row: float, matrix: float) -> Steps:
    """M3 and later."""

    def steps(num_rows: int) -> float:
        if num_rows >= 13:
            return matrix * ceil(num_rows / _MATRIX_ROWS)
        passes = ceil(num_rows / 5)
        return passes * (1 + row * (ceil(num_rows / passes) - 1))

    return steps


def by_row(again: float, matrix: float, first_matrix: int) -> Steps:
    """M1 and M2; `again`: the share of the weights that a further row reads again."""

    def steps(num_rows: int) -> float:
        if num_rows >= first_matrix:
            return matrix * ceil(num_rows / _MATRIX_ROWS)
        return 1 + again * (num_rows - 1)

    return steps


def measured(table: Mapping[int, float]) -> Steps:
    """Between measured sizes in proportion; beyond the last one as well."""
    sizes = sorted(table)

    def steps(num_rows: int) -> float:
        above = next((size for size in sizes if size >= num_rows), None)
        if above is None:
            return table[sizes[-1]] * num_rows / sizes[-1]
        below = max((size for size in sizes if size < num_rows), default=above)
        part = (num_rows - below) / (above - below) if above > below else 0.0
        return table[below] + part * (table[above] - table[below])

    return steps


MACHINES: Mapping[str, Steps] = {
    "M5 Max": by_five(0.08, 3.4),
    "M4 Pro": by_five(0.16, 3.6),
    "M3 Ultra, experts": lambda num_rows: 1 + 0.26 * (num_rows - 1),
    "M1 Ultra": by_row(0.87, 6.0, 12),
    "M1 Max": by_row(0.85, 5.0, 6),
    "CPU": measured({1: 1.0, 2: 1.1, 3: 1.15, 5: 1.35, 8: 1.6, 13: 2.0, 16: 2.3, 32: 3.4}),
}


def table_of(steps: Steps) -> dict[int, float]:
    """The sizes that an engine measures when it loads a model."""
    return {num_rows: steps(num_rows) for num_rows in ROWS}
