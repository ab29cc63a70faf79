from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mlxserve.cache.hashing import extend_hashes
from mlxserve.cache.pages import PagePool, PageState

PAGE_SIZE = 4


def chain(*numbers: int) -> tuple[list[bytes], list[int]]:
    """Hashes and tokens of a prompt with one page of each number."""
    token_ids = [number for number in numbers for _ in range(PAGE_SIZE)]
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, PAGE_SIZE, b"")
    return hashes, token_ids


def publish(pool: PagePool, pages: list[int], *numbers: int) -> None:
    hashes, token_ids = chain(*numbers)
    for index, page in enumerate(pages):
        if pool.index.hash_of(page) is None:
            parent = hashes[index - 1] if index else b""
            tokens = token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            pool.publish(page, hashes[index], parent, tokens)


def take(pool: PagePool, count: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def cache(pool: PagePool, *numbers: int) -> list[int]:
    """Compute a prompt of these pages and release it."""
    pages = take(pool, len(numbers))
    publish(pool, pages, *numbers)
    pool.release(pages)
    return pages


def test_a_new_pool_is_free() -> None:
    pool = PagePool(8, PAGE_SIZE)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (8, 0, 0)
    pool.check([])


def test_an_allocation_beyond_the_free_pages_fails_without_any_change() -> None:
    pool = PagePool(4, PAGE_SIZE)
    cache(pool, 1, 2, 3)
    held = pool.index.match(*chain(1))
    pool.retain(held)
    assert pool.allocate(4) is None
    assert (pool.num_free, pool.num_cached) == (3, 3)
    pool.check([held])


def test_a_published_page_is_matched_even_after_its_release() -> None:
    pool = PagePool(8, PAGE_SIZE)
    pages = cache(pool, 1, 2, 3)
    assert pool.index.match(*chain(1, 2, 3)) == pages
    assert pool.index.match(*chain(1, 2, 9)) == pages[:2]
    assert pool.index.match(*chain(2)) == []
    assert pool.num_free == 8


def test_a_page_is_not_matched_before_it_is_published() -> None:
    pool = PagePool(8, PAGE_SIZE)
    take(pool, 2)
    assert pool.index.match(*chain(1, 2)) == []


def test_a_match_can_skip_leading_pages() -> None:
    pool = PagePool(8, PAGE_SIZE)
    pages = cache(pool, 1, 2, 3)
    assert pool.index.match(*chain(1, 2, 3), skip=1) == pages[1:]


def test_equal_hashes_of_different_tokens_do_not_match() -> None:
    pool = PagePool(8, PAGE_SIZE)
    hashes, token_ids = chain(1)
    cache(pool, 1)
    assert pool.index.match(hashes, token_ids) != []
    assert pool.index.match(hashes, [7] * PAGE_SIZE) == []


def test_a_match_ends_before_the_page_whose_tokens_differ() -> None:
    for differs_at in range(3 * PAGE_SIZE):
        pool = PagePool(8, PAGE_SIZE)
        hashes, token_ids = chain(1, 2, 3)
        pages = cache(pool, 1, 2, 3)
        token_ids[differs_at] += 1
        assert pool.index.match(hashes, token_ids) == pages[: differs_at // PAGE_SIZE], differs_at
        assert (
            pool.index.match(hashes, token_ids, skip=2)
            == pages[2 : 2 + (differs_at < 2 * PAGE_SIZE)]
        ), differs_at


def test_retaining_a_free_hit_lowers_the_number_of_free_pages() -> None:
    pool = PagePool(8, PAGE_SIZE)
    pages = cache(pool, 1, 2)
    assert pool.num_idle(pages) == 2
    pool.retain(pages)
    assert pool.num_free == 6
    pool.retain(pages)
    assert (pool.num_free, pool.num_idle(pages)) == (6, 0)
    pool.release(pages)
    assert pool.num_free == 6
    pool.release(pages)
    assert pool.num_free == 8
    pool.check([])


def test_retained_hits_are_not_evicted_by_the_next_allocation() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = cache(pool, 1, 2)
    pool.retain(pages)
    fresh = take(pool, 2)
    assert not set(pages) & set(fresh)
    assert pool.index.match(*chain(1, 2)) == pages
    pool.check([pages, fresh])


def test_blank_pages_are_allocated_before_cached_ones() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cached = cache(pool, 1, 2)
    pool.release(take(pool, 6))
    assert not set(cached) & set(take(pool, 6))
    assert pool.num_evicted == 0


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = PagePool(3, PAGE_SIZE)
    for number in (1, 2, 3):
        cache(pool, number)
    pool.retain(pool.index.match(*chain(1)))
    pool.release(pool.index.match(*chain(1)))
    take(pool, 1)
    assert [bool(pool.index.match(*chain(n))) for n in (1, 2, 3)] == [True, False, True]
    take(pool, 1)
    assert [bool(pool.index.match(*chain(n))) for n in (1, 2, 3)] == [True, False, False]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = cache(pool, 1, 2, 3, 4)
    for left in (3, 2, 1, 0):
        take(pool, 1)
        assert pool.index.match(*chain(1, 2, 3, 4)) == pages[:left]


def test_a_second_page_with_the_same_content_stays_unhashed() -> None:
    pool = PagePool(8, PAGE_SIZE)
    one, other = take(pool, 1), take(pool, 1)
    publish(pool, one, 1)
    publish(pool, other, 1)
    assert pool.index.match(*chain(1)) == one
    assert pool.num_duplicates == 1
    pool.check([one, other])
    pool.release(other)
    pool.release(one)
    pool.check([])
    assert pool.index.match(*chain(1)) == one


def test_allocated_pages_follow_the_holders_last_page() -> None:
    pool = PagePool(64, PAGE_SIZE)
    one, other = take(pool, 2), take(pool, 2)
    assert pool.allocate(2, after=one[-1]) == [one[-1] + 1, one[-1] + 2]
    assert pool.allocate(2, after=other[-1]) == [other[-1] + 1, other[-1] + 2]


def test_the_last_evicted_pages_are_remembered() -> None:
    pool = PagePool(num_pages=300, page_size=PAGE_SIZE)
    assert pool.evictions.since(0) == []
    cached = cache(pool, *range(300))
    first = take(pool, 1)
    assert pool.evictions.since(0) == first == cached[-1:]
    second = take(pool, 2)
    assert set(pool.evictions.since(1) or []) == set(second)
    assert pool.evictions.since(pool.num_evicted) == []
    take(pool, 297)
    assert pool.evictions.since(0) is None, "more than are remembered"
    assert len(pool.evictions.since(300 - 256) or []) == 256


def test_pages_before_the_first_evicted_one_are_unchanged() -> None:
    pool = PagePool(num_pages=4, page_size=PAGE_SIZE)
    hashes, _ = chain(1, 2, 3, 4)
    pages = cache(pool, 1, 2, 3, 4)
    assert pool.index.num_unchanged(pages, hashes) == 4
    assert pool.index.num_unchanged(pages[:2], hashes) == 2
    assert pool.index.num_unchanged([], hashes) == 0
    take(pool, 2)
    assert pool.index.num_unchanged(pages, hashes) == 2


def test_pages_evicted_together_are_allocated_as_one_run() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cache(pool, *range(1, 9))
    assert take(pool, 4) == [4, 5, 6, 7]


def test_a_reset_forgets_every_page() -> None:
    pool = PagePool(4, PAGE_SIZE)
    cache(pool, 1, 2)
    assert pool.reset()
    assert pool.index.match(*chain(1, 2)) == []
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check([])


def test_a_reset_is_refused_while_a_page_is_in_use() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = cache(pool, 1, 2)
    pool.retain(pages[:1])
    assert not pool.reset()
    assert pool.index.match(*chain(1, 2)) == pages


def test_releasing_a_page_without_a_holder_is_an_error() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = take(pool, 1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="has no holder"):
        pool.release(pages)


def publish_under_a_wrong_hash(pool: PagePool) -> None:
    pool.publish(take(pool, 1)[0], b"x" * 16, chain(1)[0][0], [5] * PAGE_SIZE)


def lower_hot_after(pool: PagePool) -> None:
    pool.order.hot_after = 1


def test_the_audit_names_what_is_wrong() -> None:
    for mistake, message in [
        (lambda pool: pool.share([0]), "page 0 is in 1 page tables, but counts 2"),
        (lambda pool: take(pool, 1), "is in 0 page tables, but counts 1"),
        (lambda pool: pool.release([0]), "page 0 is in 1 page tables, but counts 0"),
        (publish_under_a_wrong_hash, "wrong hash"),
        (lower_hot_after, "a hot page is filed as normal"),
    ]:
        pool = PagePool(8, PAGE_SIZE)
        held = take(pool, 3)
        publish(pool, held, 1, 2, 3)
        pool.retain(found := cache(pool, 4))
        pool.release(found)
        pool.check([held])
        mistake(pool)
        with pytest.raises(AssertionError, match=message):
            pool.check([held])


class PoolMachine(RuleBasedStateMachine):
    """The pool against plain lists: which pages are free, and the order of eviction."""

    @initialize(num_pages=st.integers(1, 12), num_open=st.none() | st.integers(1, 12))
    def build(self, num_pages: int, num_open: int | None) -> None:
        num_open = num_open and min(num_open, num_pages)
        self.pool = PagePool(num_pages, PAGE_SIZE, num_open=num_open)
        self.tables: list[tuple[list[int], list[int]]] = []  # pages, and the number of each
        self.normal: list[int] = []  # free pages with a hash, the next to be evicted first
        self.hot: list[int] = []  # those that were hit twice
        self.hits: Counter[int] = Counter()
        self.blank = set(range(num_pages))

    @rule(numbers=st.lists(st.integers(1, 2), min_size=1, max_size=6))
    def start(self, numbers: list[int]) -> None:
        hashes, token_ids = chain(*numbers)
        hits = self.pool.index.match(hashes, token_ids)
        fresh = len(numbers) - len(hits)
        if fresh > self.pool.num_free - self.pool.num_idle(hits):
            return
        self.pool.retain(hits)
        self.hits.update(hits)
        self.unfile(hits)
        evicted = [*self.normal, *self.hot][: max(0, fresh - len(self.blank))]
        pages = self.pool.allocate(fresh, after=hits[-1] if hits else None)
        assert pages is not None
        assert set(pages) <= self.blank | set(evicted)
        self.blank |= set(evicted)
        self.blank -= set(pages)
        self.unfile(evicted)
        for page in evicted:
            del self.hits[page]
        self.tables.append((hits + pages, numbers))
        self.audit()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        pages, numbers = data.draw(st.sampled_from(self.tables))
        publish(self.pool, pages, *numbers)
        self.audit()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(pages)
        held = {page for table, _ in self.tables for page in table}
        for page in reversed(pages):
            if page not in held:
                hashed = self.pool.index.hash_of(page) is not None
                (self.file if hashed else self.blank.add)(page)
        self.audit()

    def file(self, page: int) -> None:
        (self.hot if self.hits[page] >= 2 else self.normal).append(page)
        if len(self.hot) > self.pool.num_pages // 2:
            self.normal.append(self.hot.pop(0))
            self.hits[self.normal[-1]] = 1

    def unfile(self, pages: list[int]) -> None:
        self.normal = [page for page in self.normal if page not in pages]
        self.hot = [page for page in self.hot if page not in pages]

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.tables)
        if not self.tables:
            self.blank |= {*self.normal, *self.hot}
            self.normal, self.hot = [], []
            self.hits.clear()
        self.audit()

    @rule(num_more=st.integers(0, 3))
    def grow(self, num_more: int) -> None:
        num_pages = min(14, self.pool.num_pages + num_more)
        self.blank |= set(range(self.pool.num_pages, num_pages))
        self.pool.grow(num_pages)
        self.audit()

    def audit(self) -> None:
        self.pool.check(pages for pages, _ in self.tables)
        assert self.pool.order.first() == [*self.normal, *self.hot]
        assert self.pool.num_free == len(self.blank) + len(self.normal) + len(self.hot)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# ---- pins


def test_a_pinned_page_is_never_evicted() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = cache(pool, 1, 2)
    pool.pin(pages)
    assert (pool.num_free, pool.num_pinned) == (2, 2)
    assert pool.allocate(3) is None
    take(pool, 2)
    assert pool.index.match(*chain(1, 2)) == pages
    pool.check()


def test_pins_and_holders_are_counted_separately() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = cache(pool, 1, 2)
    pool.pin(pages)
    pool.pin(pages[:1])
    pool.retain(pages)
    assert not any(pool.is_exclusive(page) for page in pages)
    pool.unpin(pages)
    assert [pool.is_exclusive(page) for page in pages] == [False, True]
    pool.release(pages)
    assert (pool.num_free, pool.num_pinned) == (3, 1)
    pool.unpin(pages[:1])
    assert (pool.num_free, pool.num_pinned) == (4, 0)
    pool.check([])


def test_unpinned_pages_are_evicted_last_page_first() -> None:
    pool = PagePool(3, PAGE_SIZE)
    pages = cache(pool, 1, 2, 3)
    pool.pin(pages)
    pool.unpin(pages)
    assert take(pool, 1) == pages[2:]


def test_a_reset_keeps_pinned_pages() -> None:
    pool = PagePool(6, PAGE_SIZE)
    pages = cache(pool, 1, 2)
    cache(pool, 3)
    pool.pin(pages)
    assert pool.reset()
    assert pool.index.match(*chain(1, 2)) == pages
    assert pool.index.match(*chain(3)) == []
    pool.retain(pages)
    assert not pool.reset()


def test_a_page_without_a_hash_cannot_be_pinned() -> None:
    pool = PagePool(2, PAGE_SIZE)
    with pytest.raises(AssertionError, match="has no hash"):
        pool.pin(take(pool, 1))


# ---- classes of retention


def hit(pool: PagePool, *numbers: int) -> list[int]:
    pages = pool.index.match(*chain(*numbers))
    assert len(pages) == len(numbers)
    pool.retain(pages)
    pool.release(pages)
    pool.check([])
    return pages


def test_pages_hit_twice_are_evicted_after_pages_used_later() -> None:
    pool = PagePool(6, PAGE_SIZE)
    often = cache(pool, 1, 2)
    for _ in range(2):
        hit(pool, 1, 2)
    later = cache(pool, 3, 4)
    hit(pool, 3, 4)
    assert pool.order.first() == [*reversed(later), *reversed(often)]
    take(pool, 4)
    assert pool.index.match(*chain(1, 2)) == often
    assert pool.index.match(*chain(3, 4)) == []


@pytest.mark.parametrize("hot_after", [1, 2, 3])
def test_hot_after_sets_the_number_of_hits_of_a_hot_page(hot_after: int) -> None:
    pool = PagePool(6, PAGE_SIZE, hot_after)
    cache(pool, 1)
    for _ in range(hot_after):
        assert pool.num_hot == 0
        hit(pool, 1)
    assert pool.num_hot == 1


def test_at_most_half_of_the_pool_is_hot_and_one_hit_makes_the_others_hot_again() -> None:
    pool = PagePool(6, PAGE_SIZE)
    cache(pool, 1, 2, 3, 4, 5)
    for _ in range(2):
        one, two, three, four, five = hit(pool, 1, 2, 3, 4, 5)
    assert pool.order.first() == [five, four, three, two, one]
    assert pool.num_hot == 3
    hashes, _ = chain(1, 2, 3, 4, 5)
    pool.release([pool.adopt(hashes[4])])
    assert pool.order.first() == [four, five, three, two, one], "not hot without another hit"
    hits = pool.index.match(*chain(1, 2, 3, 4, 5), skip=3)
    pool.retain(hits)
    pool.release(hits)
    assert pool.order.first() == [three, two, one, five, four], "hot again after one hit"
    pool.check([])


def test_kept_pages_are_evicted_last_until_their_time_has_passed() -> None:
    pool = PagePool(6, PAGE_SIZE)
    kept = cache(pool, 1, 2)
    pool.order.keep_until(kept, until=10.0)
    later = cache(pool, 3)
    for _ in range(2):
        hit(pool, 3)
    pool.order.expire(9.9)
    assert pool.order.first() == [*later, *reversed(kept)]
    pool.order.expire(10.0)
    assert pool.order.first() == [*reversed(kept), *later]
    pool.check([])


def test_the_later_of_two_times_counts() -> None:
    pool = PagePool(6, PAGE_SIZE)
    pages = cache(pool, 1, 2, 3)
    pool.order.keep_until(pages, until=10.0)
    pool.order.keep_until(pages[:1], until=20.0)
    pool.order.keep_until(pages, until=5.0)
    later = cache(pool, 4)
    pool.order.expire(10.0)
    assert pool.order.first() == [*later, pages[2], pages[1], pages[0]]
    later = cache(pool, 5)
    assert pool.order.first()[-2:] == [*later, pages[0]], "the first page is still kept"


def test_kept_pages_are_evicted_when_no_others_are_left() -> None:
    pool = PagePool(3, PAGE_SIZE)
    pages = cache(pool, 1, 2, 3)
    pool.order.keep_until(pages, until=10.0)
    assert set(take(pool, 3)) == set(pages)
    pool.order.expire(10.0)
    pool.check()


def test_pages_kept_while_held_are_evicted_last_after_their_release() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = take(pool, 2)
    publish(pool, pages, 1, 2)
    pool.order.keep_until(pages, until=10.0)
    other = cache(pool, 3)
    pool.release(pages)
    assert pool.order.first() == [*other, *reversed(pages)]
    pool.check([])


def test_every_page_is_in_one_of_five_states() -> None:
    pool = PagePool(8, PAGE_SIZE)
    first, second, third = cache(pool, 1, 2, 3)
    pool.pin([first])
    pool.retain([first, second])
    pool.retain([second])
    (own,) = take(pool, 1)
    expected = {
        first: PageState.PINNED,  # although it is held
        second: PageState.SHARED,
        third: PageState.CACHED,
        own: PageState.ACTIVE,
    }
    states = pool.states()
    assert len(states) == 8
    assert {page: PageState(states[page]) for page in expected} == expected
    assert states.count(PageState.FREE) == 4


def test_sharing_a_page_adds_a_holder_and_counts_no_hit() -> None:
    pool = PagePool(4, PAGE_SIZE)
    shared, other = take(pool, 2)
    publish(pool, [shared], 1)
    publish(pool, [other], 2)
    pool.share([shared])
    pool.share([shared])
    pool.check([[shared]] * 3 + [[other]])
    for page in (shared, shared, shared, other):
        pool.release([page])
    assert pool.order.first() == [shared, other]  # with two hits it would be last
    with pytest.raises(AssertionError, match="has no holder"):
        pool.share([other])


# ---- growing


def test_a_pool_that_grows_gets_blank_pages_and_evicts_nothing() -> None:
    pool = PagePool(4, PAGE_SIZE)
    cached = cache(pool, 1, 2, 3)
    pool.grow(9)
    assert (pool.num_pages, pool.num_free, pool.num_evicted) == (9, 9, 0)
    assert pool.index.match(*chain(1, 2, 3)) == cached
    assert sorted([*take(pool, 6), *cached]) == list(range(9))


def test_a_pool_does_not_shrink() -> None:
    with pytest.raises(AssertionError, match="does not shrink"):
        PagePool(4, PAGE_SIZE).grow(3)


def test_a_renewed_pool_is_empty_and_its_counters_go_on() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cache(pool, 1, 2, 3)
    smaller = pool.renewed(5)
    assert (smaller.num_pages, smaller.num_free, smaller.num_cached) == (5, 5, 0)
    assert smaller.num_published == pool.num_published == 3
    smaller.check([])


# ---- pages that are opened with need


def test_pages_are_opened_before_one_is_evicted_and_half_as_many_at_once() -> None:
    pool = PagePool(20, PAGE_SIZE, num_open=4)
    assert (pool.num_free, pool.blank.num_open) == (20, 4)
    assert max(pool.allocate(4) or []) == 3
    assert pool.blank.num_open == 4
    assert pool.allocate(1) == [4]
    assert (pool.num_free, pool.blank.num_open) == (15, 6)
    assert len(pool.allocate(15) or []) == 15
    assert (pool.num_free, pool.blank.num_open) == (0, 20)
    assert pool.allocate(1) is None
    pool.check()


def test_a_cached_page_stays_while_others_were_never_opened() -> None:
    pool = PagePool(8, PAGE_SIZE, num_open=2)
    pages = pool.allocate(2) or []
    publish(pool, pages, 1, 2)
    pool.release(pages)
    assert len(pool.allocate(6) or []) == 6
    assert pool.num_evicted == 0
    assert pool.allocate(1) is not None
    assert pool.num_evicted == 1


def test_more_pages_are_not_opened_by_growing() -> None:
    pool = PagePool(20, PAGE_SIZE, num_open=8)
    pool.grow(30)
    assert (pool.blank.num_open, pool.num_free) == (8, 30)
    pool.check()


def test_a_renewed_pool_opens_as_few_pages_as_at_first() -> None:
    pool = PagePool(20, PAGE_SIZE, num_open=4)
    pool.allocate(15)
    assert pool.renewed().blank.num_open == 4
    assert pool.renewed(3).blank.num_open == 3
    pool = PagePool(20, PAGE_SIZE)
    assert pool.renewed().blank.num_open == 20


def test_pages_that_are_forgotten_go_with_all_that_follow_them() -> None:
    pool = PagePool(12, PAGE_SIZE)
    cache(pool, 1, 2, 3)
    cache(pool, 1, 2, 4)
    cache(pool, 1, 5)
    hashes, _ = chain(1, 2, 3)
    assert set(pool.forget(hashes[1:2])) == {*hashes[1:], chain(1, 2, 4)[0][-1]}
    assert len(pool.index.match(*chain(1, 5))) == 2
    assert pool.num_cached == 2
    assert not pool.forget(hashes[1:])
    pool.check([])


def test_pages_that_are_held_or_pinned_are_not_forgotten() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cache(pool, 1, 2, 3)
    hashes, _ = chain(1, 2, 3)
    held = pool.index.match(*chain(1, 2))
    pool.retain(held)
    pool.pin(held[:1])
    assert pool.forget(hashes) == hashes[2:]
    pool.release(held)
    assert pool.forget(hashes) == hashes[1:2]
    assert pool.num_pinned == pool.num_cached == 1
    pool.check([])


def test_pages_whose_time_is_over_are_evicted_before_those_that_they_follow() -> None:
    """Pages 0, 1, 2 and 0, 1, 3 are two conversations with a common beginning."""
    pool = PagePool(8, PAGE_SIZE)
    held = pool.allocate(4)
    assert held == [0, 1, 2, 3]
    publish(pool, [0, 1, 2], 1, 2, 3)
    publish(pool, [0, 1, 3], 1, 2, 4)
    pool.release(held)
    pool.order.keep_until([0, 1, 2], 10.0)
    pool.order.keep_until([0, 1, 3], 20.0)
    pool.order.expire(10.0)
    assert (pool.order.first(), pool.order.num_kept) == ([2, 3, 1, 0], 3)
    pool.order.keep_until([0, 1, 2], 30.0)
    pool.order.expire(40.0)
    assert (pool.order.first(), pool.order.num_kept) == ([3, 2, 1, 0], 0)
    pool.check()


class Unwalked(OrderedDict[int, int]):
    """Pages that can be found, and not walked."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all kept pages are walked")


def test_the_end_of_a_time_walks_no_pages_that_are_kept_longer() -> None:
    pool = PagePool(100, PAGE_SIZE)
    pages = pool.allocate(100)
    assert pages is not None
    publish(pool, pages, *range(100))
    pool.release(pages)
    pool.order.keep_until(pages, 100.0)
    pool.order.keep_until(pages[:4], 200.0)
    pool.order.kept = Unwalked(pool.order.kept)
    pool.order.expire(50.0)
    pool.order.expire(100.0)
    assert pool.order.num_kept == 4
