from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import LiveRequest, Request
from mlxserve.scheduler.fairness import FairShare
from mlxserve.scheduler.waiting import WaitingQueue

AGEING_STEPS = 1000


def request(arrival: int, priority: int = 0, client: str = "") -> LiveRequest:
    asked = Request(f"r{arrival}", [1], SamplingParams(), priority=priority, client=client)
    return LiveRequest(asked, arrival=arrival, queued_at=arrival)


def queue_of(*requests: LiveRequest) -> tuple[WaitingQueue, FairShare]:
    fair_share = FairShare()
    queue = WaitingQueue(fair_share, AGEING_STEPS)
    for r in requests:
        fair_share.arrive(r.asked.client)
        queue.add(r)
    return queue, fair_share


def arrivals(queue: WaitingQueue, now: int = 20) -> list[int]:
    return [r.arrival for r in queue.in_order(now)]


def test_lower_classes_go_first_and_earlier_arrivals_before_later_ones() -> None:
    queue, _ = queue_of(*(request(n, priority) for n, priority in enumerate([1, 0, 2, 0, 1])))
    assert arrivals(queue) == [1, 3, 0, 4, 2]


def test_a_request_that_comes_back_is_at_the_front_of_its_class() -> None:
    requests = [request(arrival) for arrival in range(4)]
    back, urgent = request(9), request(10, priority=-1)
    back.prefill_end = 1
    queue, _ = queue_of(*requests, back, urgent)
    assert arrivals(queue) == [10, 9, 0, 1, 2, 3]


def test_the_client_that_has_got_least_goes_first() -> None:
    queue, fair_share = queue_of(*(request(n, client="aab"[n % 3]) for n in range(6)))
    assert arrivals(queue) == [0, 1, 2, 3, 4, 5]
    fair_share.charge("a", prefill=100)
    assert arrivals(queue) == [2, 5, 0, 1, 3, 4]
    fair_share.charge("b", decode=51)
    assert arrivals(queue) == [0, 1, 3, 4, 2, 5]


def test_clients_take_turns_within_one_look_as_they_are_charged() -> None:
    queue, fair_share = queue_of(*(request(n, client="aaab"[n // 2]) for n in range(8)))
    order = []
    for r in queue.in_order(20):
        queue.remove(r)
        fair_share.charge(r.asked.client, prefill=10)
        order.append(r.asked.client)
    assert order == [*"abab", *"aaaa"]


def test_waiting_lifts_a_request_to_the_best_class_that_waits_and_no_further() -> None:
    old = request(0, priority=2)
    queue, _ = queue_of(old, *(request(n, priority=n % 2) for n in range(1, 5)))
    assert arrivals(queue, AGEING_STEPS - 1) == [2, 4, 1, 3, 0]
    assert arrivals(queue, AGEING_STEPS) == [2, 4, 0, 1, 3]
    assert arrivals(queue, 2 * AGEING_STEPS) == [0, 1, 2, 3, 4]
    assert arrivals(queue, 50 * AGEING_STEPS) == [0, 1, 2, 3, 4]


def test_a_client_does_not_grow_old_into_more_than_its_share() -> None:
    queue, fair_share = queue_of(*(request(n, client="a") for n in range(3)))
    fair_share.charge("a", prefill=100)
    fair_share.arrive("b")
    fair_share.charge("b", decode=1)
    queue.add(request(9 * AGEING_STEPS, client="b"))
    queue.add(request(3, priority=1, client="a"))
    assert arrivals(queue, 9 * AGEING_STEPS) == [0, 1, 2, 3, 9 * AGEING_STEPS]
    fair_share.charge("a", prefill=100)
    assert arrivals(queue, 9 * AGEING_STEPS)[0] == 9 * AGEING_STEPS


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=20), st.data())
def test_removing_a_request_keeps_the_order_of_the_others(
    priorities: list[int], data: st.DataObject
) -> None:
    requests = [request(arrival, priority) for arrival, priority in enumerate(priorities)]
    queue, _ = queue_of(*data.draw(st.permutations(requests)))
    gone = data.draw(st.sampled_from(requests))
    before = arrivals(queue)
    queue.remove(gone)
    assert arrivals(queue) == [n for n in before if n != gone.arrival]
    assert len(queue) == len(list(queue)) == len(requests) - 1


@settings(report_multiple_bugs=False)
@given(st.data())
def test_any_order_of_events_leaves_the_order_of_a_queue_that_is_sorted_anew(
    data: st.DataObject,
) -> None:
    """Requests come, start, are preempted and leave, clients are charged, and time passes."""
    fair_share = FairShare()
    ageing_steps, now = data.draw(st.sampled_from([1, 3, 1000])), 0
    queue = WaitingQueue(fair_share, ageing_steps)
    waiting: list[LiveRequest] = []
    running: list[LiveRequest] = []

    def key(one: LiveRequest) -> tuple[int, bool, int, int]:
        best = min(other.asked.priority for other in waiting)
        risen = one.asked.priority - (now - one.queued_at) // ageing_steps
        tokens = fair_share.tokens_of(one.asked.client)
        return max(best, risen), not one.has_run, tokens, one.arrival

    for arrival in range(data.draw(st.integers(1, 30))):
        priority, client = data.draw(st.integers(-1, 2)), data.draw(st.sampled_from("abcd"))
        new = request(arrival, priority, client)
        new.queued_at = now
        fair_share.arrive(client)
        queue.add(new)
        waiting.append(new)
        now += data.draw(st.integers(0, 2))
        assert list(queue.in_order(now)) == sorted(waiting, key=key)
        match data.draw(st.sampled_from(["nothing", "start", "preempt", "leave", "charge"])):
            case "start":
                first = next(queue.in_order(now))
                queue.remove(first)
                waiting.remove(first)
                running.append(first)
                first.prefill_end = 1
            case "preempt" if running:
                back = running.pop(data.draw(st.integers(0, len(running) - 1)))
                queue.add(back)
                waiting.append(back)
            case "leave":
                gone = data.draw(st.sampled_from(waiting))
                fair_share.leave(gone.asked.client)
                queue.remove(gone)
                waiting.remove(gone)
            case "charge":
                live = [one.asked.client for one in (*waiting, *running)]
                fair_share.charge(data.draw(st.sampled_from(live)), decode=arrival)
        fair_share.check(Counter(one.asked.client for one in (*waiting, *running)))
        assert list(queue.in_order(now)) == sorted(waiting, key=key)


def test_a_look_at_the_first_of_many_clients_asks_for_few_of_their_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, fair_share = queue_of(*(request(n, client=str(n)) for n in range(1_000)))
    asked: list[str] = []
    tokens_of = fair_share.tokens_of
    monkeypatch.setattr(
        fair_share, "tokens_of", lambda client: asked.append(client) or tokens_of(client)
    )
    fair_share.charge("0", prefill=10)
    assert [one.arrival for one in islice(queue.in_order(20), 4)] == [1, 2, 3, 4]
    assert len(asked) < 40
