"""Recurrent states: what a step's groups begin with, and what is kept of them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model import state_groups
from mlxserve.model.packed_states import StateSpec
from mlxserve.model.states import StateStore
from mlxserve.request import (
    Chunk,
    LiveRequest,
    Request,
    RequestState,
    StatePlan,
    as_page_table,
)

SPECS = [StateSpec((((2,), mx.float32), ((3, 2), mx.float16)))]


def request(name: str) -> LiveRequest:
    live = LiveRequest(Request(name, [1] * 40, SamplingParams()))
    live.state = RequestState.RUNNING
    return live


def chunk(live: LiveRequest, start: int, length: int = 1, plan: StatePlan | None = None) -> Chunk:
    return Chunk(live, start, length, as_page_table(range(3)), False, state=plan)


def run(store: StateStore, chunks: list[Chunk], num_decodes: int) -> list[tuple[int, int]]:
    """A step whose layers add each row's tokens to its state; (batch, length) of the groups."""
    groups = store.groups(chunks, num_decodes)
    for group in groups:
        before = group.begin(0, 2)
        shapes = [(group.batch, *shape) for shape, _ in SPECS[0].arrays]
        group.after[0] = [
            (mx.zeros(shape, dtype) if array is None else array) + group.length
            for array, shape, (_, dtype) in zip(before, shapes, SPECS[0].arrays, strict=True)
        ]
    store.commit(groups)
    return [(group.batch, group.length) for group in groups]


def seen(store: StateStore, live: LiveRequest, position: int) -> float:
    """Tokens that a request's state has seen."""
    [group] = store.groups([chunk(live, position)], 1)
    before = group.begin(0, 2)[0]
    assert before is not None
    return float(before.reshape(-1)[0].item())


def test_a_spec_knows_its_size() -> None:
    assert SPECS[0].nbytes == 2 * 4 + 6 * 2


def test_decodes_are_one_group_and_chunks_are_cut_where_their_state_is_kept() -> None:
    store = StateStore(SPECS)
    a, b, c = map(request, "abc")
    assert run(store, [chunk(a, 0, 5), chunk(b, 0, 7)], 0) == [(1, 5), (1, 7)]
    plan = StatePlan(None, ((16, 1), (32, 2)))
    assert run(store, [chunk(a, 5), chunk(b, 7), chunk(c, 0, 40, plan)], 2) == [
        (2, 1),
        (1, 16),
        (1, 16),
        (1, 8),
    ]
    assert [seen(store, a, 6), seen(store, b, 8), seen(store, c, 40)] == [6, 8, 40]
    store.check({1, 2})


def test_a_sequence_begins_with_nothing_and_a_prompt_of_one_token_alone() -> None:
    """Zeros are something else: the first token of RecurrentGemma is not scaled."""
    store = StateStore(SPECS)
    a, b, c = map(request, "abc")
    run(store, [chunk(a, 0, 5), chunk(c, 0, 5)], 0)
    groups = store.groups([chunk(a, 5), chunk(b, 0), chunk(c, 5)], 3)
    assert [(group.first, group.batch) for group in groups] == [(0, 1), (1, 1), (2, 1)]
    assert groups[1].begin(0, 2) == [None, None]
    assert groups[0].before is not None


def test_a_batch_that_stays_the_same_is_not_copied() -> None:
    store = StateStore(SPECS)
    a, b, c = map(request, "abc")
    run(store, [chunk(live, 0, 5) for live in (a, b, c)], 0)
    run(store, [chunk(live, 5) for live in (a, b, c)], 3)
    [same] = store.groups([chunk(live, 6) for live in (a, b, c)], 3)
    [again] = store.groups([chunk(live, 6) for live in (a, b, c)], 3)
    [fewer] = store.groups([chunk(live, 6) for live in (a, c)], 2)
    assert same.before is again.before
    assert fewer.before is not None
    assert [array.shape for array in fewer.before[0]] == [(2, 2), (2, 3, 2)]


def test_a_request_continues_from_a_snapshot_of_another() -> None:
    store = StateStore(SPECS)
    a, b = map(request, "ab")
    run(store, [chunk(a, 0, 20, StatePlan(None, ((16, 7),)))], 0)
    run(store, [chunk(b, 16, 4, StatePlan(7, ()))], 0)
    assert seen(store, b, 20) == 20


def test_a_snapshot_of_a_decode_outlives_its_batch() -> None:
    store = StateStore(SPECS)
    a, b = map(request, "ab")
    run(store, [chunk(a, 0, 15), chunk(b, 0, 9)], 0)
    run(store, [chunk(a, 15, plan=StatePlan(None, ((16, 3),))), chunk(b, 9)], 2)
    a.state = b.state = RequestState.FINISHED
    store.drop([])
    c = request("c")
    run(store, [chunk(c, 16, 2, StatePlan(3, ()))], 0)
    assert seen(store, c, 18) == 18


def test_a_state_of_another_position_is_an_error() -> None:
    store = StateStore(SPECS)
    a = request("a")
    run(store, [chunk(a, 0, 5)], 0)
    with pytest.raises(AssertionError, match="have seen 5 to 5 tokens, the chunk begins at 4"):
        store.groups([chunk(a, 4)], 1)


def drafted(live: LiveRequest, start: int, num_tokens: int, keep: int | None = None) -> Chunk:
    plan = None if keep is None else StatePlan(None, ((keep, 100 + keep),))
    page_table = as_page_table(range(3))
    draft = tuple(range(num_tokens))
    return Chunk(live, start, 1 + num_tokens, page_table, True, state=plan, draft=draft)


def test_the_jth_rows_of_all_drafts_are_one_group() -> None:
    store = StateStore(SPECS)
    a, b, c, d = map(request, "abcd")
    run(store, [chunk(live, 0, 5) for live in (a, b, c)], 0)
    chunks = [chunk(a, 5), drafted(b, 5, 3), drafted(c, 5, 1), chunk(d, 0, 9)]
    groups = store.groups(chunks, 7)
    assert [(group.batch, group.length) for group in groups] == [
        (3, 1),
        (2, 1),
        (1, 1),
        (1, 1),
        (1, 9),
    ]
    assert [group.rows for group in groups] == [[0, 5, 1], [6, 2], None, None, None]
    assert [group.first for group in groups[2:]] == [3, 4, 7]
    assert [group.positions for group in groups] == [[5, 5, 5], [6, 6], [7], [8], [0]]


def test_rows_of_one_draft_beside_decodes_are_in_order() -> None:
    store = StateStore(SPECS)
    a, b = map(request, "ab")
    run(store, [chunk(live, 0, 5) for live in (a, b)], 0)
    groups = store.groups([chunk(a, 5), drafted(b, 5, 2)], 4)
    assert [(group.first, group.batch, group.rows) for group in groups] == [
        (0, 2, None),
        (2, 1, None),
        (3, 1, None),
    ]
    assert state_groups.order_of_rows(groups) is None


def test_outputs_of_groups_go_back_to_the_rows_of_the_step() -> None:
    store = StateStore(SPECS)
    a, b = map(request, "ab")
    run(store, [chunk(live, 0, 5) for live in (a, b)], 0)
    groups = store.groups([drafted(a, 5, 2), drafted(b, 5, 2), chunk(request("c"), 0, 2)], 6)
    rows = [
        row
        for group in groups
        for row in (range(group.first, group.end) if group.rows is None else group.rows)
    ]
    assert rows == [0, 3, 1, 4, 2, 5, 6, 7]
    order = state_groups.order_of_rows(groups)
    assert order is not None
    assert [rows[index] for index in order.tolist()] == list(range(8))


@pytest.mark.parametrize("accepted", [(0, 0), (1, 3), (0, 2), (1, 0)])
def test_the_step_after_a_draft_begins_where_it_was_accepted_up_to(
    accepted: tuple[int, int],
) -> None:
    store = StateStore(SPECS)
    a, b, c = map(request, "abc")
    run(store, [chunk(a, 0, 5), chunk(b, 0, 9), chunk(c, 0, 3)], 0)
    run(store, [chunk(c, 3), drafted(a, 5, 1), drafted(b, 9, 3)], 7)
    in_a, in_b = 6 + accepted[0], 10 + accepted[1]
    assert [seen(store, a, in_a), seen(store, b, in_b), seen(store, c, 4)] == [in_a, in_b, 4]
    together = [chunk(b, in_b), chunk(c, 4), chunk(a, in_a)]
    [group] = store.groups(together, 3)
    states = group.begin(0, 2)[0]
    assert states is not None
    assert states[:, 0].tolist() == [in_b, 4, in_a]
    run(store, together, 3)
    assert [seen(store, a, in_a + 1), seen(store, b, in_b + 1)] == [in_a + 1, in_b + 1]


def test_a_snapshot_within_a_draft_is_that_of_its_row() -> None:
    store = StateStore(SPECS)
    a, b = map(request, "ab")
    run(store, [chunk(live, 0, 13) for live in (a, b)], 0)
    run(store, [drafted(a, 13, 5, keep=16), drafted(b, 13, 4)], 11)
    c = request("c")
    run(store, [chunk(c, 16, 2, StatePlan(116, ()))], 0)
    assert seen(store, c, 18) == 18


def test_a_state_beyond_a_draft_is_an_error() -> None:
    store = StateStore(SPECS)
    a = request("a")
    run(store, [chunk(a, 0, 5)], 0)
    run(store, [drafted(a, 5, 2)], 3)
    with pytest.raises(AssertionError, match="have seen 6 to 8 tokens, the chunk begins at 9"):
        store.groups([chunk(a, 9)], 1)


def test_sequences_one_by_one_have_a_group_for_each_row_of_a_draft() -> None:
    store = StateStore(SPECS)
    a, b = map(request, "ab")
    run(store, [chunk(live, 0, 5) for live in (a, b)], 0)
    groups = store.groups_of_sequences([drafted(a, 5, 2), chunk(b, 5)])
    assert [(group.first, group.start, group.level) for group in groups] == [
        (0, 5, 0),
        (1, 6, 1),
        (2, 7, 2),
        (3, 5, 0),
    ]


def test_what_is_dropped_is_gone() -> None:
    store = StateStore(SPECS)
    a = request("a")
    run(store, [chunk(a, 0, 20, StatePlan(None, ((16, 1),)))], 0)
    store.drop([1])
    store.check(())
    a.state = RequestState.WAITING
    store.drop([])
    with pytest.raises(KeyError):
        store.groups([chunk(a, 20)], 1)


def test_what_a_chunk_leaves_does_not_keep_its_tokens_in_memory() -> None:
    """A convolution's state is a view of the chunk's last tokens: 3 of 4,000 here."""
    spec = StateSpec((((3, 64), mx.float32),))
    store = StateStore([spec])
    a = request("a")
    before = mx.get_active_memory()
    groups = store.groups([chunk(a, 0, 8_000, StatePlan(None, ((4_000, 7),)))], 0)
    for group in groups:
        group.after[0] = [mx.ones((1, group.length, 64))[:, -3:]]
    store.commit(groups)
    mx.eval(store.arrays())
    del groups, group
    assert store.num_snapshots == 1
    assert mx.get_active_memory() - before < 8 * spec.nbytes
