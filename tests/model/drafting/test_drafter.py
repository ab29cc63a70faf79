"""A drafter's guesses: which rows it computes for them, in how many calls, and what is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.context import Context
from mlxserve.model.batch import Batch
from mlxserve.model.drafting.draft_model import DraftModel
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.drafter import Drafter
from mlxserve.model.drafting.paged_drafter import PagedDrafter
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import GUESS, Chunk, LiveRequest, Request, Sampled, as_page_table

PAGE = 16
GREEDY = SamplingParams(temperature=0)
SPEC = LayerSpec(1, 8, 8, mx.float32)


class Counting(PagedDrafter):
    """Guesses the next number, and remembers the rows that it was called with."""

    wants_hidden = True

    def __init__(self, vocab_size: int = 500, max_length: int = 100, max_rows: int = 64) -> None:
        pages = DraftPages(KVPool([SPEC], 8, PAGE, select_backend("cpu")))
        loaded = cast(LoadedModel, SimpleNamespace(context=Context(max_length, max_length)))
        super().__init__(loaded, pages, vocab_size=vocab_size, max_rows=max_rows)
        self.calls: list[list[tuple[int, int]]] = []  # (token, position) of each row
        self.carried: list[list[int] | None] = []
        self.followed: list[tuple[list[int], tuple[int, ...] | None]] = []

    def _logits(
        self, batch: Batch, tokens: mx.array, rows: list[int], carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        ids: list[int] = tokens.tolist()
        self.calls.append(list(zip(ids, batch.positions.tolist(), strict=True)))
        self.carried.append(None if carried is None else carried.tolist())
        chosen = tokens[mx.array(rows)]
        return (mx.arange(300)[None] == chosen[:, None] + 1).astype(mx.float32), chosen * 10

    def follow(self, chunks: Sequence[Chunk], tokens: mx.array, hidden: mx.array | None) -> None:
        self.followed.append((tokens.tolist(), None if hidden is None else tuple(hidden.shape)))


def request(first: int, length: int) -> LiveRequest:
    live = LiveRequest(Request(str(first), range(first, first + length), GREEDY))
    live.prefill_end = length
    return live


def drafting(of: LiveRequest, pages: tuple[int, ...], num_guesses: int) -> Chunk:
    start = len(of.token_ids) - 1
    draft = (GUESS,) * num_guesses
    return Chunk(of, start, 1 + num_guesses, as_page_table(pages), samples=True, draft=draft)


def proposed(drafter: Drafter, *chunks: Chunk) -> list[int]:
    drafter.begin(chunks)
    ids: list[int] = drafter.propose(chunks).tolist()
    return ids


def test_drafts_of_several_lengths_take_one_call_for_each_token_of_the_longest() -> None:
    drafter = Counting()
    first, second, third = request(10, 3), request(50, 1), request(70, 20)
    chunks = [drafting(first, (0,), 1), drafting(second, (1,), 3), drafting(third, (2, 3), 2)]
    assert proposed(drafter, *chunks) == [13, 51, 52, 53, 90, 91]
    assert [len(call) for call in drafter.calls] == [3 + 1 + 20, 2, 1]
    assert drafter.calls[0][0] == (50, 0), "single rows come first"
    assert drafter.calls[1] == [(51, 1), (90, 20)]
    assert drafter.calls[2] == [(52, 2)]
    assert drafter.carried == [None, [500, 890], [510]]


def test_accepted_guesses_are_not_computed_again_and_rejected_ones_are() -> None:
    drafter, live = Counting(), request(10, 4)
    proposed(drafter, drafting(live, (0,), 4))
    live.token_ids.extend([14, 15, 16])  # two guesses are accepted
    assert proposed(drafter, drafting(live, (0,), 2)) == [17, 18]
    assert drafter.calls[4] == [(16, 6)]
    live.token_ids.append(40)  # none is
    assert proposed(drafter, drafting(live, (0,), 2)) == [41, 42]
    assert drafter.calls[6] == [(40, 7)]
    live.token_ids.extend([41, 42, 90])  # all are: the last guess was never computed
    assert proposed(drafter, drafting(live, (0,), 1)) == [91]
    assert drafter.calls[8] == [(42, 9), (90, 10)]


def test_what_is_missing_is_computed_within_bounds_and_nothing_is_guessed_meanwhile() -> None:
    drafter = Counting(max_rows=12)
    long, short = request(100, 30), request(10, 3)
    chunks = [drafting(long, (0, 1), 2), drafting(short, (2,), 1)]
    assert proposed(drafter, *chunks) == [GUESS, GUESS, GUESS]
    assert drafter.calls == [[(100 + position, position) for position in range(12)]]
    assert proposed(drafter, *chunks) == [GUESS, GUESS, GUESS]
    assert proposed(drafter, *chunks) == [130, 131, 13]
    assert drafter.calls[2][:6] == [(124 + number, 24 + number) for number in range(6)]


def test_positions_that_a_drafter_cannot_compute_have_no_guess() -> None:
    drafter = Counting(max_length=20)
    chunks = [drafting(request(100, 19), (0, 1), 2), drafting(request(10, 3), (2,), 2)]
    assert proposed(drafter, *chunks) == [GUESS, GUESS, 13, 14]
    assert {position for call in drafter.calls for _, position in call} == {0, 1, 2, 3}


def test_no_guess_is_beyond_the_vocabulary_of_the_model() -> None:
    """Its 300 logits are cut, or padded with what is never drawn: the noise is that of the model's own ids."""
    assert proposed(Counting(vocab_size=30), drafting(request(27, 2), (0,), 3))[:1] == [29]
    assert max(proposed(Counting(vocab_size=30), drafting(request(27, 2), (0,), 3))) < 30
    assert proposed(Counting(vocab_size=900), drafting(request(298, 1), (0,), 1)) == [299]


# ---- in the runner


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def runner_of(loaded: LoadedModel, drafter: Drafter | None) -> ModelRunner:
    return ModelRunner(
        loaded, KVPool(loaded.layers, 8, PAGE, select_backend("cpu")), drafter=drafter
    )


def computed(runner: ModelRunner, *chunks: Chunk) -> list[Sampled | None]:
    pending = runner.launch(chunks)
    runner.start(pending)
    return runner.collect(pending)


def test_a_step_verifies_guesses_that_nobody_has_read(loaded: LoadedModel) -> None:
    """The same samples as where the host names the guesses; they come back with them, in the chunks' order."""
    live, other = request(10, 6), request(60, 5)
    prompts = [
        Chunk(live, 0, 5, as_page_table([0]), samples=False),
        Chunk(other, 0, 5, as_page_table([1]), samples=True),
    ]
    drafter = Counting(loaded.vocab_size)
    runner, plain = runner_of(loaded, drafter), runner_of(loaded, None)
    for each in (runner, plain):
        computed(each, *prompts)
    other.token_ids.append(65)
    chunks = [drafting(live, (0,), 3), drafting(other, (1,), 1)]
    found = computed(runner, *chunks)
    named = [chunks[0]._replace(draft=(16, 17, 18)), chunks[1]._replace(draft=(66,))]
    expected = computed(plain, *named)
    assert [one.guesses for one in found if one] == [(16, 17, 18), (66,)]
    assert [(one.token_id, one.more) for one in found if one] == [
        (one.token_id, one.more) for one in expected if one
    ]
    size = loaded.config["hidden_size"]
    assert drafter.followed == [
        ([*range(10, 15), *range(60, 65)], (10, size)),
        ([15, 16, 17, 18, 65, 66], (6, size)),
    ]


def test_guesses_that_were_not_made_are_no_tokens(loaded: LoadedModel) -> None:
    drafter = Counting(loaded.vocab_size, max_rows=2)
    runner, live = runner_of(loaded, drafter), request(10, 6)
    computed(runner, Chunk(live, 0, 5, as_page_table([0]), samples=False))
    [found] = computed(runner, drafting(live, (0,), 2))
    assert found is not None
    assert found.guesses == (GUESS, GUESS)
    assert drafter.followed[-1][0] == [15, 0, 0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3)])
def test_a_smaller_vocabulary_is_never_left_though_its_logits_are_no_numbers(
    loaded: LoadedModel,
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
    params: SamplingParams,
) -> None:
    """mlx does not check the indices of an embedding."""
    small = prepare(*build_model("llama", vocab_size=300), "small")
    kv = KVPool(small.layers, 8, PAGE, select_backend("cpu"))
    drafter = DraftModel(small, DraftPages(kv), vocab_size=loaded.vocab_size, max_rows=64)
    seen: list[int] = []
    embed = small.model.model.embed_tokens

    def remembered(ids: mx.array) -> mx.array:
        seen.extend(ids.reshape(-1).tolist())
        return embed(ids)

    remembered.as_linear = embed.as_linear  # type: ignore[attr-defined]
    small.model.model.embed_tokens = remembered
    live = LiveRequest(Request("r", [299, 1500, 8, 1000, 20], params))
    chunk = drafting(live, (0,), 4)
    for num_good in (0, 4):
        numbers = np.full(kv.nbytes_of(1) // 4, np.nan, np.float32)
        kv.write_units([0], [numbers.tobytes()])
        drafter.pages.mark(chunk, 0, num_good)
        assert all(0 <= token < loaded.vocab_size for token in proposed(drafter, chunk))
    assert 0 <= min(seen) <= max(seen) < 300


def test_a_draft_model_computes_prompts_as_they_come(loaded: LoadedModel) -> None:
    pages = DraftPages(KVPool(loaded.layers, 8, PAGE, select_backend("cpu")))
    drafter = DraftModel(loaded, pages, vocab_size=loaded.vocab_size, max_rows=64)
    runner, live = runner_of(loaded, drafter), request(10, 30)
    for start, end in ((0, 16), (16, 30)):
        computed(runner, Chunk(live, start, end - start, as_page_table([0, 1]), samples=end == 30))
        assert pages.num_leading(Chunk(live, end, 1, as_page_table([0, 1]), samples=True)) == end


def test_a_draft_model_catches_up_with_a_prompt_within_bounds(loaded: LoadedModel) -> None:
    """The beginning of the prompt was found in the cache, where the drafter has no rows."""
    pages = DraftPages(KVPool(loaded.layers, 8, PAGE, select_backend("cpu")))
    drafter = DraftModel(loaded, pages, vocab_size=loaded.vocab_size, max_rows=20)
    live, table = request(10, 50), as_page_table([0, 1, 2, 3])
    for num_good, (start, end) in zip((20, 40, 48), ((32, 40), (40, 44), (44, 48)), strict=True):
        chunk = Chunk(live, start, end - start, table, samples=False)
        drafter.begin([chunk])
        drafter.follow([chunk], mx.array([0]), None)
        assert pages.num_leading(Chunk(live, 49, 1, table, samples=True)) == num_good
