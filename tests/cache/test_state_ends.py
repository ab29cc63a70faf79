"""Which recurrent states are dropped first, and which ones are not dropped yet."""

from __future__ import annotations

from math import inf

from mlxserve.cache.kinds.state_ends import StateEnds
from mlxserve.cache.pages import PagePool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import StateStats
from mlxserve.request import LiveRequest, Request

PAGE = 4


class Chats:
    """The cached pages and states of conversations; no request runs."""

    def __init__(self, num_slots: int) -> None:
        self.pool = PagePool(64, PAGE)
        self.ends = StateEnds(num_slots, self.pool, StateStats(), lambda: 0)
        self._num_states = 0

    def path(self, chat: str, num_pages: int) -> list[bytes]:
        return [f"{chat}{page}".encode() for page in range(num_pages)]

    def add(self, chat: str, num_pages: int) -> int:
        """Publish the pages of a chat up to this one, and keep the state after them; return its id."""
        path = self.path(chat, num_pages)
        for page, hash_ in enumerate(path):
            if not self.pool.index.is_known(hash_):
                [new] = self.pool.allocate(1) or []
                parent = path[page - 1] if page else b""
                self.pool.publish(new, hash_, parent, [-1] * PAGE)
                self.pool.release([new])
        self._num_states += 1
        self.ends.add(path, self._num_states)
        return self._num_states

    def has(self, chat: str, num_pages: int) -> bool:
        return self.ends.has(self.path(chat, num_pages)[-1])


def test_a_state_that_saves_little_takes_no_slot_of_one_that_saves_more() -> None:
    chats = Chats(num_slots=2)
    chats.add("a", 8)
    chats.add("b", 3)

    assert not chats.ends.make_room_for(PAGE)
    assert chats.ends.make_room_for(8 * PAGE)
    assert chats.has("a", 8)
    assert not chats.has("b", 3), "12 tokens, and not 32"


def test_the_end_of_an_answer_costs_less_than_that_of_its_prompt() -> None:
    chats = Chats(num_slots=3)
    chats.add("a", 8)
    chats.add("a", 9)
    chats.add("b", 5)
    chats.ends.make_room(1)
    assert [chats.has("a", 8), chats.has("a", 9), chats.has("b", 5)] == [True, False, True]
    chats.ends.check(())


def test_an_end_before_a_dropped_one_saves_the_tokens_of_both() -> None:
    chats = Chats(num_slots=3)
    chats.add("a", 8)
    chats.add("a", 9)
    chats.ends.drop_end(chats.path("a", 8)[-1])
    chats.add("b", 3)

    chats.ends.make_room(2)
    assert chats.has("a", 9), "36 tokens since the end before it is gone"
    assert not chats.has("b", 3)
    chats.ends.check(())


def test_what_a_conversation_has_passed_goes_first() -> None:
    chats = Chats(num_slots=3)
    request = LiveRequest(Request("r", [1], SamplingParams()))
    chats.add("b", 2)
    chats.add("a", 8)
    chats.ends.restore(request, chats.path("a", 8)[-1])
    chats.ends.names.pop_restored(request)
    chats.add("a", 16)
    chats.ends.stop(request, chats.path("a", 16))
    chats.ends.make_room(1)
    assert [chats.has("a", 8), chats.has("a", 16), chats.has("b", 2)] == [False, True, True]
    chats.ends.check(())


def test_protected_states_go_last_and_only_for_running_requests() -> None:
    chats = Chats(num_slots=2)
    chats.add("a", 3)
    chats.add("b", 3)
    find = chats.pool.index.page_of
    chats.pool.pin(map(find, chats.path("a", 3)))
    chats.pool.order.keep_until([find(hash_) for hash_ in chats.path("b", 3)], 9.0)
    chats.ends.change_protection()
    assert chats.ends.make_room_for(inf)
    assert not chats.has("b", 3), "kept for some time"
    chats.add("c", 3)
    chats.pool.pin(map(find, chats.path("c", 3)))
    chats.ends.change_protection()
    assert not chats.ends.make_room_for(inf), "both are named"
    chats.ends.make_room(1)
    assert len(chats.ends) == 1


def test_a_state_after_an_evicted_page_goes_before_all_others() -> None:
    chats = Chats(num_slots=2)
    chats.add("a", 12)
    chats.add("b", 2)
    chats.pool.forget([chats.path("a", 12)[-1]])
    chats.ends.make_room(1)
    assert not chats.has("a", 12)
    assert chats.has("b", 2)


def test_a_state_that_a_request_will_begin_with_is_not_dropped_yet() -> None:
    chats = Chats(num_slots=2)
    request = LiveRequest(Request("r", [1], SamplingParams()))
    id_ = chats.add("a", 3)
    chats.ends.restore(request, chats.path("a", 3)[-1])
    chats.ends.drop_end(chats.path("a", 3)[-1])
    assert chats.ends.names.pop_dropped() == []
    assert chats.ends.names.pop_restored(request) == id_
    assert chats.ends.names.pop_dropped() == [id_]


def test_a_lower_limit_drops_states_at_once() -> None:
    chats = Chats(num_slots=3)
    ids = [chats.add(chat, 3) for chat in "abc"]
    chats.ends.make_room(2)
    resize = chats.ends.lower(1, ())
    assert resize is not None
    assert (resize.num_units, list(resize.dropped)) == (1, ids[:2])
    assert set(chats.ends.ids()) == {ids[2]}
    assert chats.ends.lower(0, ()) is None
    assert chats.ends.limit == 1, "one state is kept"
