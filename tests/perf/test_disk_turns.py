"""A long chat that lost its window to side requests reads that from disk, and not its tokens."""

from __future__ import annotations

from tests.perf.disk_turns import with_side_requests
from tests.perf.memory_turns import Memory


def test_a_long_chat_reads_less_than_its_window_of_which_memory_has_a_part() -> None:
    """Four side requests of 1,500 tokens between its turns. Its tokens are as many bytes as two windows."""
    memory = Memory(int(1.2 * (1 << 30)), "windows")
    computed, read = with_side_requests(memory, 20_000, num_sides=4, side_tokens=1500)
    assert computed <= 1.1
    assert 0 < read <= 0.8
