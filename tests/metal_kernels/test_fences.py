"""Fences that go on from the state of others, as after a recorded step, wait for as much."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_kernels.fences import NUM_WAITS, Fences


def after(num_reads: int) -> tuple[Fences, mx.array, list[mx.array]]:
    """(the fences of a pool that was written and then read so often, the pool, its fences)."""
    fences, pool = Fences(), mx.zeros(8)
    fences.add(pool)
    history = [mx.array(number) for number in range(1 + num_reads)]
    fences.after_write(pool, history[0])
    for fence in history[1:]:
        fences.after_read(pool, fence)
    return fences, pool, history


@pytest.mark.parametrize("num_reads", range(NUM_WAITS + 1))
def test_a_writer_waits_for_the_same_after_going_on(num_reads: int) -> None:
    fences, pool, _ = after(num_reads)
    other = Fences()
    other.add(pool)
    other.resume([pool], fences.state([pool]))
    assert all(
        a is b for a, b in zip(other.before_write(pool), fences.before_write(pool), strict=True)
    )


@pytest.mark.parametrize("num_reads", range(NUM_WAITS + 1))
def test_a_reader_after_going_on_waits_for_the_write_or_for_what_followed_it(
    num_reads: int,
) -> None:
    fences, pool, history = after(num_reads)
    fences.resume([pool], fences.state([pool]))
    awaited = fences.before_read(pool)
    assert awaited is history[0] or any(awaited is read for read in history[1:])
    read = mx.array(9)
    fences.after_read(pool, read)
    assert any(bound is read for bound in fences.before_write(pool))
