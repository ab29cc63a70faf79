from __future__ import annotations

from hypothesis import given
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
