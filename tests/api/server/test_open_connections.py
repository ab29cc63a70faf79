"""Who makes room, told by names instead of sockets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.api.server.open_connections import Crowd

HOME, AWAY = "127.0.0.1", "10.0.0.2"


def test_the_one_that_is_idle_longest_makes_room() -> None:
    crowd = Crowd[str](3, 3)
    assert [crowd.enter(name, HOME) for name in "abc"] == [None, None, None]
    crowd.set_idle("a", False)
    assert crowd.enter("d", HOME) == "b"
    crowd.set_idle("a", True)  # idle again: behind the others
    assert [crowd.enter(name, AWAY) for name in "efg"] == ["c", "d", "a"]


def test_where_all_are_busy_the_newcomer_leaves() -> None:
    crowd = Crowd[str](2, 2)
    for name in "ab":
        crowd.enter(name, HOME)
        crowd.set_idle(name, False)
    assert crowd.enter("c", HOME) == "c"
    crowd.leave("a")
    assert crowd.enter("d", HOME) is None


def test_an_address_takes_no_room_from_another() -> None:
    crowd = Crowd[str](4, 2)
    crowd.enter("guest", AWAY)
    assert [crowd.enter(name, HOME) for name in "abc"] == [None, None, "a"]
    crowd.set_idle("b", False)
    crowd.set_idle("c", False)
    assert crowd.enter("d", HOME) == "d"
    assert crowd.enter("another guest", AWAY) is None


@settings(derandomize=True, database=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("eilb"), st.integers(0, 9), st.sampled_from("xy"))))
def test_there_are_never_more_than_allowed(steps: list[tuple[str, int, str]]) -> None:
    crowd = Crowd[int](4, 3)
    inside: dict[int, str] = {}
    for what, who, address in steps:
        if what == "e" and who not in inside:
            inside[who] = address
            inside.pop(crowd.enter(who, address), None)  # type: ignore[arg-type]
        elif what == "l":
            crowd.leave(who)
            inside.pop(who, None)
        else:
            crowd.set_idle(who, what == "i")
        assert len(inside) <= 4
        assert all(list(inside.values()).count(place) <= 3 for place in "xy")
        assert crowd._addresses == inside
        assert set(crowd._idle) <= set(inside)
        assert sum(crowd._counts.values()) == len(inside)
