"""Which connection is closed for a new one, with names instead of sockets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.api.server.open_connections import OpenConnections

HOME, AWAY = "127.0.0.1", "10.0.0.2"


def test_the_connection_idle_longest_is_closed() -> None:
    open_connections = OpenConnections[str](3, 3)
    assert [open_connections.enter(name, HOME) for name in "abc"] == [None, None, None]
    open_connections.set_idle("a", False)
    assert open_connections.enter("d", HOME) == "b"
    open_connections.set_idle("a", True)  # idle again: after the others
    assert [open_connections.enter(name, AWAY) for name in "efg"] == ["c", "d", "a"]


def test_if_all_are_busy_the_new_connection_is_closed() -> None:
    open_connections = OpenConnections[str](2, 2)
    for name in "ab":
        open_connections.enter(name, HOME)
        open_connections.set_idle(name, False)
    assert open_connections.enter("c", HOME) == "c"
    open_connections.leave("a")
    assert open_connections.enter("d", HOME) is None


def test_an_address_at_its_cap_only_displaces_itself() -> None:
    open_connections = OpenConnections[str](4, 2)
    open_connections.enter("guest", AWAY)
    assert [open_connections.enter(name, HOME) for name in "abc"] == [None, None, "a"]
    open_connections.set_idle("b", False)
    open_connections.set_idle("c", False)
    assert open_connections.enter("d", HOME) == "d"
    assert open_connections.enter("another guest", AWAY) is None


@settings(derandomize=True, database=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("eilb"), st.integers(0, 9), st.sampled_from("xy"))))
def test_there_are_never_more_than_allowed(steps: list[tuple[str, int, str]]) -> None:
    open_connections = OpenConnections[int](4, 3)
    inside: dict[int, str] = {}
    for what, who, address in steps:
        if what == "e" and who not in inside:
            inside[who] = address
            closed = open_connections.enter(who, address)
            if closed is not None:
                del inside[closed]  # one that was open, or the new one
        elif what == "l":
            open_connections.leave(who)
            inside.pop(who, None)
        else:
            open_connections.set_idle(who, what == "i")
        assert len(inside) <= 4
        assert all(list(inside.values()).count(place) <= 3 for place in "xy")
        assert len(open_connections) == len(inside)
