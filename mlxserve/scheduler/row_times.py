"""RowTimes: how long a step of decodes takes, by its rows. Times are given to it: no clock.

    seconds of a step = heat * shape of its rows

The heat is common to all steps and follows within about six of them: a laptop that throttles, a
context that grows. The shape is the median of the last nine steps of a size, so that a step that
stalled does not count. Sizes that have not run for long are read off a table that was measured when the
model was loaded (`model/row_speeds.py`), beside the nearest size that has. Each token of the longest draft may
add a call: of a drafter, or of layers with recurrent states, which take the second rows of all drafts after the first.

Why a table: what another row costs depends on the chip, on the layers and on the number format. On
M3 and later, mlx reads quantised weights once for every five rows, on M1 and M2 once for every row,
and from 6 to 18 rows on another kernel runs whose time is the same up to 32 rows (`get_qmv_batch_limit`
and `use_qmv_wide` of mlx/backend/metal/quantized.cpp).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from statistics import median

# Without measurements: a step waits for weights, so that 16 rows cost little more than one.
ASSUMED: Mapping[int, float] = {1: 1.0, 16: 1.3, 32: 2.6}
_KEPT = 9  # steps of each size
_NUM_KNOWN = 3  # steps that tell a size's time
_FOLLOWS = 0.3  # weight of the newest step in the heat
# Steps after which a size is read off the table again: the last ones may have run beside other work.
_FORGOTTEN_AFTER = 1024
_SWEPT_EVERY = 64  # steps
_MAX_CHANGE = 1.5  # of the heat's estimate by one step: a stall is no heat
# A step that takes more than this of the table's time reads a longer context than the table's steps did, which
# another row may share, or runs beside other work.
_AS_IN_TABLE = 1.2
_MIN_SECONDS = 1e-9  # a coarse clock may measure a step as none at all
CALL = 0.08  # of a step of one row: a drafter's call that was never measured


class RowTimes:
    """Learns the times of steps by their rows, and by the calls of a drafter before them."""

    def __init__(
        self,
        table: Mapping[int, float] = ASSUMED,
        *,
        has_calls: bool = False,
        call: float | None = None,
    ) -> None:
        """Begin with a table of seconds by rows; any unit will do until a step is observed.

        has_calls: each token of the longest draft is a call of a drafter or of recurrent layers, whose time counts
        call: that of a call, in the table's unit; by default a part of a step of one row
        """
        self._sizes = sorted(table)
        self._table = [table[rows] for rows in self._sizes]
        self._has_calls = has_calls
        self._shapes: dict[tuple[int, int], deque[float]] = {}  # by rows and calls, the last steps
        self._medians: dict[tuple[int, int], float] = {}  # of those that are known
        self._plain: list[int] = []  # known sizes without calls, ascending
        call = CALL * self._table[0] if call is None else call
        self._calls: deque[float] = deque([call], maxlen=_KEPT)
        self._last: dict[tuple[int, int], int] = {}  # number of the last step of a size
        self._num_steps = 0
        self._heat = 1.0
        self.is_measured = False  # a step was observed
        self.num_drafted = 0  # steps since the last one without drafts

    def observe(self, num_rows: int, seconds: float, longest: int = 0) -> None:
        """Learn from a step of decodes.

        num_rows: one for each decode, and one for each drafted token
        longest: tokens of the longest draft; 0 if there was none
        """
        self.num_drafted = self.num_drafted + 1 if longest else 0
        size = num_rows, longest if self._has_calls else 0
        seconds = max(seconds, _MIN_SECONDS)
        if not self.is_measured:
            self.is_measured, self._heat = True, seconds / self.shape(num_rows, longest)
        if size in self._medians:
            change = seconds / self._heat / self._medians[size]
            self._heat *= 1 + _FOLLOWS * (min(_MAX_CHANGE, max(1 / _MAX_CHANGE, change)) - 1)
        shapes = self._shapes.setdefault(size, deque(maxlen=_KEPT))
        shapes.append(seconds / self._heat)
        if size[1]:
            own = max(0.0, shapes[-1] - self._shape(num_rows))
            self._calls.append(own / size[1])
        if len(shapes) >= _NUM_KNOWN:
            if size not in self._medians and not size[1]:
                insort(self._plain, num_rows)
            self._medians[size] = median(shapes)
        self._last[size] = self._num_steps = self._num_steps + 1
        if self._num_steps % _SWEPT_EVERY == 0:
            self._forget(self._num_steps - _FORGOTTEN_AFTER)

    def is_known(self, num_rows: int, longest: int = 0) -> bool:
        """Return True if enough steps of this size have been observed."""
        return (num_rows, longest if self._has_calls else 0) in self._medians

    def is_partly_known(self, num_rows: int, longest: int = 0) -> bool:
        """Return True if steps of this size have been observed, and too few of them."""
        size = num_rows, longest if self._has_calls else 0
        return size in self._shapes and size not in self._medians

    def is_as_in_table(self, num_rows: int) -> bool:
        """Return True if a step without a drafter's calls takes about the time that the table has for it."""
        return self._heat * self._shape(num_rows) <= _AS_IN_TABLE * self._in_table(num_rows)

    def shape(self, num_rows: int, longest: int = 0) -> float:
        """Time of a step in units of the heat."""
        if not longest or not self._has_calls:
            return self._shape(num_rows)
        known = self._medians.get((num_rows, longest))
        return self._shape(num_rows) + longest * median(self._calls) if known is None else known

    def seconds(self, num_rows: int) -> float | None:
        """Seconds of a step without a drafter's calls; None until enough of this size have been observed."""
        return self._heat * self._shape(num_rows) if self.is_known(num_rows) else None

    def _forget(self, before: int) -> None:
        """Forget the sizes whose last step came before this one."""
        for size in [size for size, last in self._last.items() if last < before]:
            del self._last[size], self._shapes[size]
            if self._medians.pop(size, None) is not None and not size[1]:
                self._plain.remove(size[0])

    def _shape(self, num_rows: int) -> float:
        """Without calls; of a size that is not known, the table's time beside the nearest known size."""
        known = self._medians.get((num_rows, 0))
        if known is not None:
            return known
        near = self._nearest(num_rows)
        scale = 1.0 if near is None else self._medians[near, 0] / self._in_table(near)
        return scale * self._in_table(num_rows)

    def _nearest(self, num_rows: int) -> int | None:
        at = bisect_left(self._plain, num_rows)
        around = self._plain[max(0, at - 1) : at + 1]
        return min(around, key=lambda rows: abs(rows - num_rows), default=None)

    def _in_table(self, num_rows: int) -> float:
        """The table's time, between two of its sizes a part of the way; beyond the last in proportion."""
        at = bisect_left(self._sizes, num_rows)
        if at == len(self._sizes):
            return self._table[-1] * num_rows / self._sizes[-1]
        if at == 0 or self._sizes[at] == num_rows:
            return self._table[at]
        below, above = self._sizes[at - 1], self._sizes[at]
        part = (num_rows - below) / (above - below)
        return self._table[at - 1] + part * (self._table[at] - self._table[at - 1])
