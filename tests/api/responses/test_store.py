from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.api.responses.store import MissingResponse, ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(
    name: str, previous: str | None = None, *, owner: str = "a", size: int = 10
) -> StoredResponse:
    return StoredResponse(owner, {"id": name}, [f"{name}?", f"{name}!"], size, previous)


def filled(*responses: StoredResponse, **limits: Any) -> ResponseStore:
    store = ResponseStore(**limits)
    for each in responses:
        store.put(each)
    return store


def missing(store: ResponseStore, response_id: str, owner: str) -> str:
    """The response for whose lack a conversation cannot be continued."""
    with pytest.raises(MissingResponse) as caught:
        store.conversation(response_id, owner)
    return caught.value.response_id


def test_a_response_only_exists_for_its_owner() -> None:
    store = filled(stored("r1"), stored("r2", "r1", owner="b"))
    assert store.get("r1", "a") is not None
    assert store.get("r1", "b") is None
    assert missing(store, "r1", "b") == "r1"
    assert missing(store, "r2", "b") == "r1"  # the response before it belongs to another key
    assert not store.delete("r1", "b")
    assert store.get("r1", "a") is not None


def test_a_conversation_has_the_items_of_all_its_responses() -> None:
    store = filled(stored("r1"), stored("r2", "r1"), stored("r3", "r2"), stored("x", "r1"))
    assert store.conversation("r3", "a") == ["r1?", "r1!", "r2?", "r2!", "r3?", "r3!"]
    assert store.conversation("x", "a") == ["r1?", "r1!", "x?", "x!"]
    assert missing(store, "r9", "a") == "r9"


def test_the_least_recently_used_are_evicted_first() -> None:
    store = filled(stored("r1"), stored("r2"), stored("r3"), max_responses=3)
    store.conversation("r1", "a")
    store.put(stored("r4"))
    assert [name for name in ("r1", "r2", "r3", "r4") if store.get(name, "a")] == ["r1", "r3", "r4"]


def test_the_end_of_a_conversation_is_evicted_before_its_start() -> None:
    store = filled(stored("r1"), stored("r2", "r1"), stored("r3", "r2"), max_responses=3)
    store.put(stored("y"))
    assert store.conversation("r2", "a")
    assert store.get("r3", "a") is None


def test_bytes_are_bounded_and_the_owner_with_the_most_is_evicted_from() -> None:
    store = filled(
        stored("small", owner="b"),
        *(stored(f"r{number}", size=30) for number in range(3)),
        max_bytes=100,
    )
    store.put(stored("more", size=30))
    assert store.num_bytes == 100
    assert store.get("small", "b") is not None
    assert store.get("r0", "a") is None


def test_unused_responses_expire() -> None:
    clock = Clock()
    store = ResponseStore(max_age=10, clock=clock)
    store.put(stored("r1"))
    store.put(stored("r2"))
    clock.now = 8
    store.conversation("r1", "a")
    clock.now = 12
    assert store.get("r1", "a") is not None
    assert store.get("r2", "a") is None
    assert (len(store), store.num_bytes) == (1, 10)


names = st.integers(0, 12).map(str)
steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "go on", "wait"]), names, names, st.sampled_from("ab")
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(steps)
def test_the_store_stays_within_its_limits_and_counts_its_bytes(steps: Any) -> None:
    clock = Clock()
    store = ResponseStore(max_responses=5, max_bytes=60, max_age=10, clock=clock)
    number = 0
    for kind, name, other, owner in steps:
        if kind == "put":
            number += 1
            store.put(stored(f"{name}-{number}", f"{other}-{number - 1}", owner=owner, size=number))
        elif kind == "delete":
            store.delete(f"{name}-{number}", owner)
        elif kind == "go on":
            with contextlib.suppress(MissingResponse):
                store.conversation(f"{name}-{number}", owner)
        else:
            clock.now += 4
        assert len(store) <= 5
        assert store.num_bytes <= 60
        kept = [
            each
            for which in range(1, number + 1)
            for n in range(13)
            for who in "ab"
            if (each := store.get(f"{n}-{which}", who)) is not None
        ]
        assert store.num_bytes == sum(each.size for each in kept)
