"""Invariants of every request between two calls of the scheduler. Raises AssertionError."""

from __future__ import annotations

from collections.abc import Iterable

from mlxserve.cache.pages import PagePool
from mlxserve.request import CacheMiss, LiveRequest, RequestState


def check_waiting(requests: Iterable[LiveRequest], max_overtakes: int) -> None:
    for request in requests:
        assert request.state is RequestState.WAITING, f"{request.id} waits as {request.state}"
        assert not request.page_table, f"{request.id} waits and holds pages"
        assert request.num_overtaken <= max_overtakes, f"{request.id} is overtaken too often"
        assert request.num_computed == request.num_in_flight == 0, (
            f"{request.id} is waiting and computed"
        )


def check_running(requests: Iterable[LiveRequest], pool: PagePool, num_unread: int) -> None:
    for request in requests:
        assert request.state is RequestState.RUNNING, f"{request.id} runs as {request.state}"
        _check_progress(request)
        _check_holder(request, pool, num_unread)


def check_ending(requests: Iterable[LiveRequest], pool: PagePool, num_unread: int) -> None:
    for request in requests:
        assert request.is_finished, f"{request.id} ends as {request.state}"
        assert request.num_in_flight, f"{request.id} should have been released"
        _check_holder(request, pool, num_unread)


def check_foresight(request: LiveRequest, page_size: int, last: int) -> None:
    """Audit that the steps before `decodes_until` and `commits_until` need no full plan or commit.

    last: the last position that the request may have
    """
    in_pages = len(request.page_table) * page_size
    assert request.decodes_until <= max(0, min(in_pages, last)), f"{request.id}: no look"
    if request.commits_until:
        unread = len(request.token_ids) - 1  # the first position whose token is not known
        end = unread // page_size * page_size + page_size - 1
        assert request.commits_until <= min(end, last - 1), f"{request.id}: no look at its end"


def _check_progress(request: LiveRequest) -> None:
    """Audit that what is known is computed: all but the newest token, or up to where the prompt has come."""
    num_known = len(request.token_ids)
    if request.num_computed < request.prefill_end:
        assert num_known == request.prefill_end, f"{request.id} would sample known tokens again"
    else:
        assert request.num_computed >= num_known - 1, f"{request.id}: known tokens are skipped"


def _check_holder(request: LiveRequest, pool: PagePool, num_unread: int) -> None:
    name, table, num_computed = request.id, request.page_table, request.num_computed
    assert 0 <= request.num_in_flight <= num_unread, f"{name}: wrong number of steps in flight"
    may_be_empty = request.num_preemptions > 0 or request.disk_end or _was_lost(request)
    assert num_computed > 0 or may_be_empty, f"{name} runs, but nothing is computed"
    assert 0 <= num_computed <= len(request.token_ids) + 1, (
        f"{name}: wrong number of computed tokens"
    )
    assert not (request.loading and request.num_in_flight), f"{name} is loaded and computed at once"
    assert not request.loading or request.disk_end, f"{name} is loaded, but has nothing on disk"
    assert len(table) * pool.page_size >= num_computed, f"{name}: table is too short"
    assert len(set(table)) == len(table), f"{name} has a page twice"
    assert request.num_cached < request.num_prompt, f"{name}: nothing was left to compute"
    for index, page in enumerate(table):
        if (hash_ := pool.index.hash_of(page)) is not None:
            assert hash_ == request.page_hashes[index], f"{name} holds a page with other content"
            is_full = index < len(request.token_ids) // pool.page_size
            assert is_full, f"{name} holds a findable page with an unknown token"


def _was_lost(request: LiveRequest) -> bool:
    """Return True if the request was to begin with pages from disk that could not be read."""
    return request.cache is not None and request.cache.reason is CacheMiss.LOST
