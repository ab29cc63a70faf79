"""Rows of drafts in one call of a recurrent module: states, snapshots and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update  # noqa: F401
from mlx_lm.models.ssm import ssm_update  # noqa: F401

from metal_kernels.reading import read
from metal_kernels.replay import DeltaRows, PlainReplay
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model import draft_rows
from mlxserve.model.draft_rows import DraftConv1d, DraftRows, NotReplayed
from mlxserve.model.packed_states import StateSpec
from mlxserve.model.state_groups import Group, group_of_drafts, order_of_rows
from mlxserve.model.states import StateStore
from mlxserve.request import Chunk, LiveRequest, Request, RequestState, StatePlan, as_page_table
from tests.emulated import emulated_backend
from tests.metal_kernels.mlx_recurrences import emulated_recurrences
from tests.metal_kernels.test_replay import cases

CHANNELS, WIDTH = 4, 3
SPECS = [StateSpec((((WIDTH - 1, CHANNELS), mx.float32),))]


class Recurrent(nn.Module):  # type: ignore[misc]
    """A module of a definition that calls mlx-lm's recurrences, which this file imports as those do."""


class Convolution(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """A recurrent module whose state is that of a convolution, as LFM2's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, WIDTH, groups=CHANNELS)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = mx.concatenate([cache[0], x], axis=1)
        cache[0] = x[:, -(WIDTH - 1) :]
        return self.conv(x)


def request(name: str) -> LiveRequest:
    live = LiveRequest(Request(name, [1] * 40, SamplingParams()))
    live.state = RequestState.RUNNING
    return live


def chunk(live: LiveRequest, start: int, num_drafted: int = 0, keep: int | None = None) -> Chunk:
    plan = None if keep is None else StatePlan(None, ((keep, 7),))
    draft = tuple(range(num_drafted))
    return Chunk(
        live, start, 1 + num_drafted, as_page_table(range(3)), True, state=plan, draft=draft
    )


def begun(*lives: LiveRequest) -> StateStore:
    """Sequences with another state each, of which position 5 is next."""
    store = StateStore(SPECS, replay=PlainReplay())
    groups = store.groups([chunk(live, 0)._replace(length=5) for live in lives], 0)
    for at, group in enumerate(groups):
        group.after[0] = [mx.full((1, WIDTH - 1, CHANNELS), 1.0 + at)]
    store.commit(groups)
    return store


def run(module: Callable[..., mx.array], group: Group, x: mx.array) -> mx.array:
    """Call a module for all rows of drafts: (rows, 1, channels)."""
    assert group.drafts is not None
    cache = ArraysCache(1)
    call = group.drafts.call(0, group.begin(0, 1))
    cache.cache = call.placeholders
    output: mx.array = call.run(module, (x, cache), {})
    return output


def test_all_rows_of_drafts_and_decodes_are_one_group() -> None:
    a, b, c, d = map(request, "abcd")
    store = begun(a, b, c)
    chunks = [chunk(a, 5), chunk(b, 5, 3), chunk(d, 0)._replace(length=9), chunk(c, 5, 1)]
    drafts, others = store.groups(chunks, 5)
    assert drafts.drafts is not None
    assert (drafts.batch, drafts.length, drafts.rows) == (7, 1, [0, 1, 2, 3, 4, 14, 15])
    assert drafts.positions == [5, 5, 6, 7, 8, 5, 6]
    assert drafts.drafts.lengths == [1, 4, 2]
    assert drafts.drafts.spans.table == [(0, 0, 1), (1, 1, 4), (2, 5, 2)]
    assert (others.first, others.length) == (5, 9)
    order = order_of_rows([drafts, others])
    assert order is not None
    assert read(order).tolist() == [0, 1, 2, 3, 4, *range(7, 16), 5, 6]


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_step_begins_after_the_accepted_rows(accepted: int) -> None:
    """The states and outputs of single rows, whether none, some or all of a draft are right."""
    mx.random.seed(0)
    module, x = Convolution(), mx.random.normal((5, 1, CHANNELS))
    alone = ArraysCache(1)
    alone.cache = [mx.full((1, WIDTH - 1, CHANNELS), 2.0)]
    expected = []
    states = []
    for row in range(1, 5):
        expected.append(module(x[row : row + 1], alone))
        states.append(alone[0])
    a, b = map(request, "ab")
    store = begun(a, b)
    draft_rows.use_draft_rows(module)
    [group] = store.groups([chunk(a, 5), chunk(b, 5, 3)], 5)
    output = run(module, group, x)
    np.testing.assert_allclose(read(output[1:]), read(mx.concatenate(expected)), atol=1e-6)
    store.commit([group])
    [following] = store.groups([chunk(b, 6 + accepted), chunk(a, 6)], 2)
    assert following.drafts is None
    begin = following.begin(0, 1)[0]
    assert begin is not None
    assert mx.array_equal(begin[0], states[accepted][0])
    assert read(begin[1, :, 0]).tolist() == [1.0, x[0, 0, 0].item()]


def test_a_snapshot_within_a_draft_is_the_state_after_its_row() -> None:
    a, b = map(request, "ab")
    store = begun(a, b)
    module = Convolution()
    draft_rows.use_draft_rows(module)
    [group] = store.groups([chunk(a, 5, 3, keep=7), chunk(b, 5)], 5)
    x = mx.arange(5 * CHANNELS, dtype=mx.float32).reshape(5, 1, CHANNELS)
    run(module, group, x)
    store.commit([group])
    store.check({7})
    [kept] = store.read_units([7])
    assert np.frombuffer(kept, np.float32).tolist() == read(x[:2].reshape(-1)).tolist()


def test_a_state_that_nothing_computes_is_refused() -> None:
    """Else the next step would begin with the one before the draft."""
    a = request("a")
    store = begun(a)
    module = Convolution()  # whose convolution does not take rows of drafts
    [group] = store.groups([chunk(a, 5, 2)], 3)
    with pytest.raises(NotReplayed, match="1 of 1 states"):
        run(module, group, mx.zeros((3, 1, CHANNELS)))
    draft_rows.use_draft_rows(module)

    def twice(x: mx.array, cache: Any) -> mx.array:
        return module(module(x, cache), cache)

    with pytest.raises(NotReplayed, match="another shape"):
        run(twice, group, mx.zeros((3, 1, CHANNELS)))


def test_a_layer_that_was_not_called_is_an_error() -> None:
    a = request("a")
    store = begun(a)
    [group] = store.groups([chunk(a, 5, 2)], 3)
    with pytest.raises(AssertionError, match="was not called"):
        store.commit([group])


def test_outside_of_a_call_modules_are_as_they_were() -> None:
    module = Convolution()
    module.full = nn.Conv1d(CHANNELS, CHANNELS, WIDTH)
    x, cache = mx.random.normal((2, 5, CHANNELS)), ArraysCache(1)
    cache.cache = [mx.zeros((2, WIDTH - 1, CHANNELS))]
    expected = module(x, cache)
    draft_rows.use_draft_rows(module)
    cache.cache = [mx.zeros((2, WIDTH - 1, CHANNELS))]
    assert type(module.conv) is DraftConv1d
    assert type(module.full) is nn.Conv1d, "it mixes channels"
    assert mx.array_equal(module(x, cache), expected)


def of_a_mac(rows: Any, readout: Any, cache: Any) -> tuple[mx.array, mx.array]:
    """The calls that mlx-lm's definitions make of its kernels."""
    if isinstance(rows, DeltaRows):
        arrays = (*readout, rows.k, rows.v, rows.g, rows.beta)
        found = gated_delta.gated_delta_kernel(*(array[:, None] for array in arrays), cache[0])
    else:
        x, b, c, dt = (array[:, None] for array in (rows.x, rows.B, readout[0], rows.dt))
        bias, limits = mx.zeros(dt.shape[-1]), (0.0, float("inf"))
        found = ssm.ssm_update_kernel(x, rows.A_log, b, c, readout[1], dt, bias, cache[0], limits)
    outputs, cache[0] = found
    return outputs, cache[0]


@pytest.mark.parametrize(
    "name", ["packed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gates", "ssm"))]
)
def test_the_kernels_that_a_mac_calls_are_told_the_rows_of_drafts(name: str) -> None:
    """Each has the bits that mlx-lm's own kernel computes for it alone, which `comparing` finds."""
    rows, readout, states = cases(mx.bfloat16)[name]
    draft_rows.use_draft_rows(Recurrent())
    drafts = DraftRows(emulated_backend().replay, [1, 4, 1])
    call, cache = drafts.call(0, [states]), ArraysCache(1)
    cache.cache = call.placeholders
    with emulated_recurrences():
        with draft_rows.comparing() as compared:
            outputs, _ = call.run(of_a_mac, (rows, readout, cache), {})
        assert outputs.shape[:2] == (6, 1)
        assert len(compared) == 2 * 6
        assert all(read(each) for each in compared)
    [[after]] = drafts.at([2, 5])
    assert after.shape == (2, *states.shape[1:])


def test_windows_begin_with_the_inputs_before_each_sequence() -> None:
    drafts = DraftRows(PlainReplay(), [1, 3])
    # 0 to 3 are the two kept inputs of each sequence; then come the rows.
    assert read(drafts.windows(2)).tolist() == [[0, 1, 4], [2, 3, 5], [3, 5, 6], [5, 6, 7]]
    assert drafts.windows(2) is drafts.windows(2)


def test_a_group_of_drafts_continues_its_own_sequences_alone() -> None:
    a, b = map(request, "ab")
    decodes = [(chunk(a, 5, 2), 0), (chunk(b, 9), 3)]
    group = group_of_drafts(decodes, None, 1, PlainReplay())
    assert [group.continues(row) for row in range(4)] == [False, True, True, False]
    assert group.rows is None
