"""DiskLoads: every load is answered once, and who was given up gets nothing late."""

from __future__ import annotations

from mlxserve.disk.loads import DiskAnswer, DiskLoads

NAMES = [b"first", b"second"]


def test_each_load_is_answered_once_whatever_the_order() -> None:
    loads = DiskLoads()
    first, second = loads.add(NAMES), loads.add(NAMES[:1])
    assert first.names == tuple(NAMES)
    assert not loads.has_answers
    answers = [DiskAnswer(load.ticket, (b"x",)) for load in (second, first)]
    for answer in answers:
        loads.answer(answer)
        loads.answer(answer)
    assert loads.has_answers
    assert loads.poll() == answers
    assert loads.poll() == []
    assert not loads.has_answers


def test_what_was_given_up_gets_no_second_answer() -> None:
    loads = DiskLoads()
    tickets = [loads.add(NAMES).ticket, loads.add(NAMES).ticket]
    loads.answer_all()
    loads.answer(DiskAnswer(tickets[0], (b"x",)))
    loads.answer_all()
    assert loads.poll() == [DiskAnswer(ticket, ()) for ticket in tickets]


def test_a_refused_load_is_answered_with_nothing() -> None:
    loads = DiskLoads()
    ticket = loads.refuse()
    assert loads.poll() == [DiskAnswer(ticket, ())]
    assert loads.add(NAMES).ticket != ticket
