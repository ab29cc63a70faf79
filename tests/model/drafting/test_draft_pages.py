"""DraftPages: which rows of a drafter's pages are good, however pages are written, copied, moved and read back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.core.errors import OutOfMemory
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.drafting.draft_pages import DraftPages, PairedPages
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

PAGE = 16
SPEC = LayerSpec(2, 8, 8, mx.float32)


def kv_of(num_pages: int = 8, num_backed: int | None = None) -> KVPool:
    return KVPool([SPEC], num_pages, PAGE, select_backend("cpu"), num_backed)


def chunk(start: int, end: int, pages: tuple[int, ...] = (3, 1, 5)) -> Chunk:
    request = LiveRequest(Request("r", [7] * 60, SamplingParams()))
    return Chunk(request, start, end - start, as_page_table(pages), samples=True)


def payload(kv: KVPool, value: float) -> bytes:
    return np.full(kv.nbytes_of(1) // 4, value, np.float32).tobytes()


@pytest.fixture
def pages() -> DraftPages:
    return DraftPages(kv_of())


def test_rows_are_good_up_to_the_first_that_is_missing(pages: DraftPages) -> None:
    assert pages.num_leading(chunk(0, 5)) == 0
    pages.mark(chunk(0, 40), 0, 20)
    assert pages.num_leading(chunk(40, 41)) == 20
    assert pages.num_leading(chunk(18, 19)) == 18, "rows from the chunk on do not count"
    pages.mark(chunk(0, 40), 20, 40)
    assert pages.num_leading(chunk(40, 41)) == 40


def test_a_hole_hides_the_pages_after_it(pages: DraftPages) -> None:
    pages.mark(chunk(0, 48), 0, 48)
    pages.overwrite([chunk(0, 4, pages=(1,))])
    assert pages.num_leading(chunk(47, 48)) == PAGE


def test_a_step_forgets_the_rows_from_its_own_on(pages: DraftPages) -> None:
    pages.mark(chunk(0, 48), 0, 48)
    pages.overwrite([chunk(20, 34)])
    pages.mark(chunk(20, 34), 20, 22)  # two of its guesses
    assert pages.num_leading(chunk(47, 48)) == 22
    pages.overwrite([chunk(21, 22)])  # the second was rejected
    assert pages.num_leading(chunk(47, 48)) == 21


def test_the_last_row_of_a_page_and_the_first_of_the_next(pages: DraftPages) -> None:
    pages.mark(chunk(0, 48), 0, PAGE)
    assert pages.num_leading(chunk(PAGE, PAGE + 1)) == PAGE
    pages.overwrite([chunk(PAGE - 1, PAGE + 1)])
    assert pages.num_leading(chunk(PAGE, PAGE + 1)) == PAGE - 1
    pages.mark(chunk(0, 48), PAGE - 1, PAGE + 1)
    assert pages.num_leading(chunk(PAGE + 1, PAGE + 2)) == PAGE + 1


def test_a_copy_has_as_many_good_rows_as_its_page(pages: DraftPages) -> None:
    pages.mark(chunk(0, 48), 0, 25)
    pages.copy_pages([3, 1], [0, 7])
    assert pages.num_leading(chunk(40, 41, pages=(0, 7, 5))) == 25


def test_a_record_brings_rows_and_their_number_back(pages: DraftPages) -> None:
    pages.kv.write_units([3, 1], [payload(pages.kv, 0.5), payload(pages.kv, 2.0)])
    pages.mark(chunk(0, 48), 0, 25)
    other = DraftPages(kv_of())
    payloads = pages.read_units([3, 1])
    assert {len(each) for each in payloads} == {pages.payload_size}
    other.write_units([6, 2], payloads)
    assert other.num_leading(chunk(40, 41, pages=(6, 2, 5))) == 25
    assert other.read_units([6, 2]) == payloads


def test_a_larger_pool_keeps_its_rows_and_a_smaller_one_none(pages: DraftPages) -> None:
    pages.mark(chunk(0, 48), 0, 25)
    pages.resize(12)
    pages.check()
    assert pages.num_leading(chunk(40, 41)) == 25
    pages.resize(6)
    pages.check()
    assert pages.num_leading(chunk(40, 41)) == 0
    pages.mark(chunk(0, 48), 0, 25)
    pages.restart(6)
    assert pages.num_leading(chunk(40, 41)) == 0


# ---- both pools


def test_pages_of_both_pools_move_together() -> None:
    own, drafter = kv_of(), DraftPages(kv_of())
    both = PairedPages(own, drafter)
    own.write_units([2], [payload(own, 1.0)])
    drafter.kv.write_units([2], [payload(own, 3.0)])
    drafter.mark(chunk(0, 16, pages=(2,)), 0, 9)
    both.copy_pages([2], [4])
    [record] = both.read_units([4])
    assert record == payload(own, 1.0) + payload(own, 3.0) + b"\x09\0\0\0"
    both.write_units([6], [record])
    assert both.read_units([6]) == [record]
    assert drafter.num_leading(chunk(16, 17, pages=(6,))) == 9
    assert both.nbytes == both.nbytes_of(8) == own.nbytes * 2
    assert len(both.arrays()) == 4
    both.check()
    both.resize(10)
    assert own.num_pages == drafter.kv.num_pages == 10
    assert both.read_units([6]) == [record]
    both.restart(6)
    assert own.num_pages == drafter.kv.num_pages == 6
    assert drafter.num_leading(chunk(16, 17, pages=(4,))) == 0


def test_both_pools_get_memory_and_lose_it() -> None:
    own, drafter = kv_of(num_backed=2), DraftPages(kv_of(num_backed=2))
    both = PairedPages(own, drafter)
    both.back(4)
    assert (own.num_backed, drafter.kv.num_backed, both.num_backed) == (4, 4, 4)
    times = 0
    while both.back_ahead(6):
        times += 1
    assert times == 2, "one layer of each pool"
    both.back(6)
    both.shrink(3)
    assert (own.num_backed, drafter.kv.num_backed) == (3, 3)
    both.check()


def test_neither_pool_grows_where_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    own, drafter = kv_of(), DraftPages(kv_of())
    both = PairedPages(own, drafter)
    drafter.mark(chunk(0, 48), 0, 25)

    def refuse(_num_pages: int) -> None:
        raise OutOfMemory("no memory")

    monkeypatch.setattr(own, "resize", refuse)
    with pytest.raises(OutOfMemory):
        both.resize(20)
    both.check()
    assert (own.num_pages, drafter.kv.num_pages, drafter.kv.num_backed) == (8, 8, 8)
    assert drafter.num_leading(chunk(40, 41)) == 25
