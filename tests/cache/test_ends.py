"""The place that is given up first costs the fewest tokens for its pages, for how long ago it was used."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mlxserve.cache.ends import End, Ends

WINDOW = 4


def window(chat: str, end: int) -> list[bytes]:
    """Hashes of the window before page `end` of a conversation."""
    return [f"{chat}{page}".encode() for page in range(max(0, end - WINDOW), end)]


def last(chat: str, end: int) -> bytes:
    return window(chat, end)[-1]


def cheapest(ends: Ends, now: int, held: Sequence[bytes] = ()) -> bytes | None:
    def num_freed(_: bytes, end: End, is_leaf: bool) -> int:
        return sum(page not in held for page in ends.alone(end))

    found = ends.cheapest(now, num_freed)
    return None if found is None else found[1]


def test_the_end_of_a_short_conversation_costs_less() -> None:
    ends = Ends()
    ends.add(window("long", 100), 1600, now=1)
    ends.add(window("short", 5), 80, now=1)
    assert cheapest(ends, now=1) == last("short", 5)


def test_what_was_used_long_ago_costs_less() -> None:
    ends = Ends()
    ends.add(window("old", 20), 320, now=1)
    ends.add(window("new", 10), 160, now=9)
    assert cheapest(ends, now=9) == last("old", 20)
    ends.use(last("old", 20), now=9)
    assert cheapest(ends, now=9) == last("new", 10)


def test_places_behind_a_conversation_go_before_another_conversations() -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    ends.add(window("b", 8), 128, now=1)
    ends.use(last("a", 10), now=2)
    ends.add(window("a", 12), 192, now=2)
    ends.pass_by(last("a", 10))
    assert cheapest(ends, now=2) == last("a", 10)


def test_where_several_requests_continued_is_worth_more() -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    ends.add(window("b", 12), 192, now=1)
    for _ in range(2):
        ends.use(last("a", 10), now=1)
    ends.pass_by(last("a", 10))
    assert cheapest(ends, now=1) == last("b", 12)


def test_an_end_within_a_later_window_saves_only_what_is_between_them() -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    ends.add(window("a", 11), 176, now=1)
    ends.add(window("b", 5), 80, now=1)
    assert cheapest(ends, now=1) == last("a", 11), "16 tokens for a page, not 176"


def test_an_end_beyond_a_window_saves_only_what_follows_the_end_before_it() -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    ends.add(window("a", 20), 320, now=1, before=last("a", 10))
    ends.add(window("b", 12), 192, now=1)
    assert cheapest(ends, now=1) == last("a", 10), "the later one is a conversation's last"
    ends.drop(last("a", 10))
    assert cheapest(ends, now=1) == last("b", 12), "320 tokens, since the one before is gone"
    ends.check()


def test_pages_that_another_end_has_are_not_freed() -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    ends.add(window("a", 11), 176, now=1)
    assert ends.drop(last("a", 10)) == [b"a6"]
    assert ends.has_unit(b"a7")
    assert set(ends.drop(last("a", 11))) == set(window("a", 11))
    assert not ends.has_unit(b"a7")
    ends.check()


def test_an_end_whose_pages_are_all_held_frees_nothing() -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    assert cheapest(ends, now=1, held=window("a", 10)) is None
    assert cheapest(ends, now=1, held=window("a", 10)[1:]) == last("a", 10)


@pytest.mark.parametrize("is_again", [False, True])
def test_an_end_that_is_added_again_counts_once(is_again: bool) -> None:
    ends = Ends()
    ends.add(window("a", 10), 160, now=1)
    if is_again:
        ends.add(window("a", 10), 160, now=5)
    assert len(ends) == 1
    assert len(ends.drop(last("a", 10))) == WINDOW
    ends.check()


# ---- not all are looked at


def test_the_cheapest_is_the_first_by_cost_whatever_happened() -> None:
    """Of random ends, used and passed in any order: the same as where all are looked at."""
    draw = random.Random(7)
    ends = Ends()

    def num_freed(hash_: bytes, end: End, is_leaf: bool) -> float:
        if hash_ in held:
            return 0
        return len(ends.alone(end)) + is_leaf * ends.num_saved(end) / 16

    for now in range(1, 600):
        chat, end = draw.choice("abcdefgh"), draw.randrange(4, 60)
        ends.add(window(chat, end), 16 * end, now)
        known = list(ends)
        held = set(draw.sample(known, len(known) // 3))
        ends.use(draw.choice(known), now)
        ends.pass_by(draw.choice(known))
        cheapest = ends.cheapest(now, num_freed, least=7.99)
        all_of_them = ends.first_by_cost(len(ends), now, num_freed)
        assert cheapest == next(iter(all_of_them), None)
        assert ends.first_by_cost(5, now, num_freed, least=7.99) == all_of_them[:5]
        if cheapest is not None and now % 3 == 0:
            ends.drop(cheapest[1])
        ends.check()


def test_only_what_was_used_long_ago_is_looked_at() -> None:
    ends = Ends()
    for chat in range(1000):
        ends.add(window(f"{chat} ", 8), 128, now=chat)
    looked: list[bytes] = []

    def num_freed(hash_: bytes, end: End, is_leaf: bool) -> float:
        looked.append(hash_)
        return len(end.hashes) + ends.num_saved(end) / 16

    found = ends.cheapest(100_000, num_freed, least=8)
    assert found is not None
    assert found[1] == last("0 ", 8)
    assert len(looked) == 1000, "all are as old: a small share of the time"
    looked.clear()
    found = ends.cheapest(1000, num_freed, least=8)
    assert found is not None
    assert found[1] == last("0 ", 8)
    assert len(looked) < 1000 * 2 // 3
