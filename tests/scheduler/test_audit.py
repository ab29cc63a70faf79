"""The audit finds a request whose fields contradict its state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.cache.pages import PagePool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import LiveRequest, Request, RequestState, Sampled
from mlxserve.scheduler.audit import check_ending, check_running, check_waiting
from mlxserve.scheduler.commit import Commit
from mlxserve.scheduler.page_tables import PageTables
from tests.reliability.faults import Fault, Point


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8, 4)


@pytest.fixture
def running(pool: PagePool) -> LiveRequest:
    """With two pages, of which six tokens are computed."""
    request = LiveRequest(Request("r", [1] * 8, SamplingParams()), num_computed=6, prefill_end=8)
    request.page_table.extend(pool.allocate(2) or ())
    request.state = RequestState.RUNNING
    check_running([request], pool, num_unread=0)
    return request


MISTAKES: dict[str, tuple[str, Callable[[LiveRequest], object]]] = {
    "r runs as": ("state", lambda _: RequestState.WAITING),
    "r: wrong number of steps in flight": ("num_in_flight", lambda _: 1),
    "r: wrong number of computed tokens": ("num_computed", lambda r: len(r.token_ids) + 2),
    "r would sample known tokens again": ("token_ids", lambda r: [*r.token_ids, 1]),
    "r: known tokens are skipped": ("prefill_end", lambda _: 6),
    "r: table is too short": ("page_table", lambda r: r.page_table[:1]),
    "r has a page twice": ("page_table", lambda r: r.page_table[:1] * 2),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_running_request_is_what_it_says(
    message: str, running: LiveRequest, pool: PagePool
) -> None:
    name, wrong = MISTAKES[message]
    setattr(running, name, wrong(running))
    with pytest.raises(AssertionError, match=message):
        check_running([running], pool, num_unread=0)


def test_waiting_requests_hold_no_pages_and_ended_ones_are_in_flight(
    running: LiveRequest, pool: PagePool
) -> None:
    running.state = RequestState.WAITING
    with pytest.raises(AssertionError, match="r waits and holds pages"):
        check_waiting([running], max_overtakes=1)
    running.state = RequestState.FINISHED
    with pytest.raises(AssertionError, match="r should have been released"):
        check_ending([running], pool, num_unread=0)


@pytest.mark.parametrize(
    ("kind", "method"), [(PageTables, "publish"), (PageTables, "end"), (Commit, "output")]
)
def test_a_token_that_may_not_have_been_reported_is_found(
    make_engine: Callable, kind: type, method: str
) -> None:
    """Its answer went on without it after a step whose other requests were committed."""
    engine = make_engine(num_pages=20)
    engine.add([1] * 8, 1)
    scheduler = engine.scheduler
    chunks = scheduler.schedule()
    fault = Fault(Point(kind, method), lambda: OSError("planted"))
    with fault.planted(), pytest.raises(OSError, match="planted"):
        scheduler.update(chunks, [Sampled(0)])
    with pytest.raises(AssertionError, match="may be known and not reported"):
        scheduler.check()
    scheduler.restart()
    scheduler.check()
    assert not scheduler.roster.live
