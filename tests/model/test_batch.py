"""Rows of a step: tokens, positions, slots, and which rows sample or wait for a token."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.batch import Batch
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

PAGE = 16


def chunk(
    tokens: list[int],
    start: int,
    end: int,
    pages: tuple[int, ...],
    *,
    samples: bool = True,
    is_lazy: bool = False,
) -> Chunk:
    request = LiveRequest(Request("r", tokens, SamplingParams()))
    table = as_page_table(pages)
    return Chunk(request, start, end - start, table, samples=samples, is_lazy=is_lazy)


def mixed() -> list[Chunk]:
    """Two decodes (one lazy), a chunk in the middle of a prompt, and the end of another."""
    return [
        chunk(list(range(100, 118)), 17, 18, (5, 2)),
        chunk(list(range(200, 216)), 16, 17, (9, 3), is_lazy=True),
        chunk(list(range(300, 400)), 14, 19, (7, 8), samples=False),
        chunk(list(range(400, 433)), 31, 33, (1, 0, 4), samples=True),
    ]


def test_rows_carry_their_tokens_positions_and_slots() -> None:
    batch = Batch.from_chunks(mixed(), PAGE)
    assert batch.tokens.tolist() == [117, 0, 314, 315, 316, 317, 318, 431, 432]
    assert batch.positions.tolist() == [17, 16, 14, 15, 16, 17, 18, 31, 32]
    assert batch.slots.tolist() == [33, 48, 126, 127, 128, 129, 130, 15, 64]


def test_the_rows_before_the_first_longer_chunk_are_decodes() -> None:
    batch = Batch.from_chunks(mixed(), PAGE)
    assert batch.num_decodes == 2
    assert batch.decodes is not None
    assert batch.decodes.context_lens.tolist() == [18, 17]
    assert batch.decodes.query_starts.tolist() == [0, 1, 2]
    assert batch.chunks is not None
    assert batch.chunks.context_lens.tolist() == [19, 33]
    assert batch.chunks.query_starts.tolist() == [0, 5, 7]
    assert [table[:2].tolist() for table in batch.chunks.page_tables] == [[7, 8], [1, 0]]


def test_the_last_row_of_each_sampling_chunk_is_sampled() -> None:
    chunks = mixed()
    batch = Batch.from_chunks(chunks, PAGE)
    assert batch.sample_rows.tolist() == [0, 1, 8]
    assert batch.sampling == (chunks[0], chunks[1], chunks[3])


def test_a_lazy_row_is_listed_for_the_runner() -> None:
    chunks = mixed()
    batch = Batch.from_chunks(chunks, PAGE)
    assert batch.lazy_rows.tolist() == [1]
    assert batch.lazy == (chunks[1],)


def test_a_step_of_one_kind_has_no_tables_of_the_other() -> None:
    only_decodes = Batch.from_chunks(mixed()[:2], PAGE)
    assert only_decodes.chunks is None
    assert only_decodes.num_decodes == 2
    only_chunks = Batch.from_chunks(mixed()[2:], PAGE)
    assert only_chunks.decodes is None
    assert only_chunks.num_decodes == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.integers(1, 40), st.booleans()), min_size=1, max_size=6
    ),
    st.sampled_from([16, 32, 64]),
    st.randoms(use_true_random=False),
)
def test_every_row_has_the_slot_of_its_position(
    drawn: list[tuple[int, int, bool]], size: int, random: Random
) -> None:
    pages = list(range(40))
    random.shuffle(pages)
    chunks: list[Chunk] = []
    expected: list[tuple[int, int, int]] = []
    for start, length, samples in sorted(drawn, key=lambda one: one[1]):
        count = -(-(start + length) // size)
        table = tuple(pages[:count])
        pages = pages[count:] + pages[:count]
        tokens = [1000 * len(chunks) + i for i in range(start + length)]
        chunks.append(chunk(tokens, start, start + length, table, samples=samples))
        expected += [
            (tokens[p], p, table[p // size] * size + p % size) for p in range(start, start + length)
        ]
    batch = Batch.from_chunks(chunks, size)
    rows = zip(batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True)
    assert list(rows) == expected
    counts = [0 if t is None else t.num_rows for t in (batch.decodes, batch.chunks)]
    assert counts == [batch.num_decodes, len(expected) - batch.num_decodes]
