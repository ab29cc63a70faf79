"""RecordedLimits: stands for mlx's limits of memory, and remembers what they were set to."""

from __future__ import annotations

OWN_LIMIT = 1 << 40  # of freed arrays, before the first model


class RecordedLimits:
    """Bytes, oldest first. Each setter returns the limit before, as mlx's do."""

    def __init__(self) -> None:
        self.wired: list[int] = []
        self.freed: list[int] = []

    def set_wired(self, size: int) -> int:
        self.wired.append(size)
        return ([0, *self.wired])[-2]

    def set_freed(self, size: int) -> int:
        self.freed.append(size)
        return ([OWN_LIMIT, *self.freed])[-2]
