"""DiskLoads: every load is answered once, and who was given up gets nothing late."""

from __future__ import annotations

import pytest

from mlxserve.disk.loads import DiskAnswer, DiskLoads

NAMES = [b"first", b"second"]


def test_loads_are_read_in_order_and_each_is_answered_once() -> None:
    loads = DiskLoads()
    first, second = loads.add(NAMES), loads.add(NAMES[:1])
    load = loads.pop()
    assert load is not None
    assert (load.ticket, load.names) == (first, tuple(NAMES))
    loads.answer(load, [b"x"], num_bytes=1, seconds=1.0)
    assert loads.are_waiting
    assert loads.poll() == [DiskAnswer(first, (b"x",))]
    assert [load.ticket for load in loads.pop_all()] == [second]
    assert loads.pop() is None
    assert not loads.has_answers


def test_what_was_given_up_gets_no_second_answer() -> None:
    loads = DiskLoads()
    tickets = [loads.add(NAMES), loads.add(NAMES)]
    load = loads.pop()
    assert load is not None
    loads.answer_all()
    assert not loads.are_waiting
    assert not loads.is_waiting(load)
    loads.answer(load, [b"x"], num_bytes=1, seconds=1.0)
    assert loads.poll() == [DiskAnswer(ticket, ()) for ticket in tickets]
    assert loads.pop() is None


def test_a_refused_load_is_answered_with_nothing() -> None:
    loads = DiskLoads()
    ticket = loads.refuse()
    assert loads.poll() == [DiskAnswer(ticket, ())]
    assert loads.add(NAMES) != ticket


def test_the_rate_is_that_of_recent_reads_from_files() -> None:
    loads = DiskLoads()

    def read(num_bytes: int, seconds: float) -> None:
        loads.add(NAMES)
        load = loads.pop()
        assert load is not None
        loads.answer(load, NAMES, num_bytes=num_bytes, seconds=seconds)

    read(0, 0.0)  # all of it was still in memory
    assert (loads.num_read, loads.read_rate) == (2, 0)
    read(1000, 1.0)
    assert loads.read_rate == 1000
    read(2000, 1.0)
    assert loads.read_rate == pytest.approx(1300)
    assert (loads.num_read, loads.bytes_read) == (6, 3000)
