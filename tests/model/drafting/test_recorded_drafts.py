"""Steps with drafts, recorded or built in Python, are the same kernels with the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels.metal import MetalBackend
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model import step_graphs
from mlxserve.model.drafting.draft_model import DraftModel
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.paged_drafter import PagedDrafter
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.paged import ShownNorm
from mlxserve.model.runner import ModelRunner
from mlxserve.request import GUESS, Chunk, LiveRequest, Request, Sampled, as_page_table
from tests.model.test_step_graphs import HashingFactory

PAGE = 16
GREEDY = SamplingParams(temperature=0)
pytestmark = pytest.mark.usefixtures("compiled", "on_a_cpu")  # a GPU has no float64


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


@pytest.fixture(scope="module")
def small(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama", num_hidden_layers=1), "small")


class Drafting:
    """Two answers that are drafted for, whose every sampled token is a hash of a step's kernels."""

    def __init__(self, loaded: LoadedModel, small: LoadedModel) -> None:
        self.kernels = HashingFactory()
        backend = MetalBackend(self.kernels)
        kv, other = (KVPool(model.layers, 24, PAGE, backend) for model in (loaded, small))
        drafter = DraftModel(small, DraftPages(other), vocab_size=loaded.vocab_size, max_rows=64)
        self.runner = ModelRunner(loaded, kv, drafter=drafter)
        self.requests = [
            LiveRequest(Request(str(n), [7 + n] * 20, SamplingParams(seed=n))) for n in (0, 1)
        ]

    def step(self, lengths: tuple[int, int]) -> list[Sampled | None]:
        """Draft; each answer goes on with the tokens that were sampled after its first two rows."""
        chunks = []
        for number, (request, length) in enumerate(zip(self.requests, lengths, strict=True)):
            start, draft = len(request.token_ids) - 1, (GUESS,) * length
            pages = as_page_table(range(number, 24, 2))
            chunks.append(Chunk(request, start, 1 + length, pages, samples=True, draft=draft))
        pending = self.runner.launch(chunks)
        self.runner.start(pending)
        found = self.runner.collect(pending)
        for request, sampled in zip(self.requests, found, strict=True):
            assert sampled is not None
            request.token_ids.extend([sampled.token_id, *(s.token_id for s in sampled.more[:1])])
        return found


def test_recorded_steps_draft_and_verify_as_built_ones(
    loaded: LoadedModel, small: LoadedModel
) -> None:
    built, recorded = Drafting(loaded, small), Drafting(loaded, small)
    num_recorded, tokens = 0, set()
    for number in range(26):
        lengths = (3, 2) if number % 4 else (2, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_graphs, "TIMES_BEFORE", 10**6)
            calls = built.kernels.num_calls
            expected = built.step(lengths)
            calls = built.kernels.num_calls - calls
        before = recorded.kernels.num_calls
        assert recorded.step(lengths) == expected
        num_recorded += recorded.kernels.num_calls - before < calls // 2
        tokens.update(one.guesses for one in expected if one is not None)
    assert num_recorded >= 6
    assert len(tokens) > 30, "guesses are hashes as well"


class Listening(PagedDrafter):
    """Drafts nothing, and keeps the hidden states that it is shown."""

    wants_hidden = True

    def __init__(self, loaded: LoadedModel, pages: DraftPages, *, wants_unnormed: bool) -> None:
        super().__init__(loaded, pages, vocab_size=9, max_rows=9)
        self.wants_unnormed = wants_unnormed
        self.heard: list[mx.array] = []

    def _logits(self, *_: Any) -> tuple[mx.array, mx.array | None]:
        raise NotImplementedError

    def follow(self, _chunks: Sequence[Chunk], _tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is not None
        self.heard.append(hidden)


class Answering:
    """Two answers without drafts, whose hidden states are listened to."""

    def __init__(self, loaded: LoadedModel, *, wants_unnormed: bool) -> None:
        self.kernels = HashingFactory()
        backend = MetalBackend(self.kernels)
        kv, other = (KVPool(loaded.layers, 24, PAGE, backend) for _ in range(2))
        self.drafter = Listening(loaded, DraftPages(other), wants_unnormed=wants_unnormed)
        self.runner = ModelRunner(loaded, kv, drafter=self.drafter)
        self.requests = [LiveRequest(Request(str(n), [7 + n] * 20, GREEDY)) for n in (0, 1)]

    def step(self) -> mx.array:
        """Return the hidden states of the two answers' next rows."""
        chunks = [
            Chunk(
                request,
                len(request.token_ids) - 1,
                1,
                as_page_table(range(at, 24, 2)),
                samples=True,
            )
            for at, request in enumerate(self.requests)
        ]
        pending = self.runner.launch(chunks)
        self.runner.start(pending)
        for request, sampled in zip(self.requests, self.runner.collect(pending), strict=True):
            assert sampled is not None
            request.token_ids.append(sampled.token_id)
        return self.drafter.heard[-1]


@pytest.mark.parametrize("wants_unnormed", [False, True])
def test_recorded_steps_show_the_hidden_states_of_built_ones(
    loaded: LoadedModel, wants_unnormed: bool
) -> None:
    inner = loaded.model.model
    norm, inner.norm = inner.norm, ShownNorm(inner.norm, loaded.selector)
    built, recorded = (Answering(loaded, wants_unnormed=wants_unnormed) for _ in range(2))
    num_recorded = 0
    for _ in range(12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_graphs, "TIMES_BEFORE", 10**6)
            calls = built.kernels.num_calls
            expected = built.step()
            calls = built.kernels.num_calls - calls
        before = recorded.kernels.num_calls
        assert mx.array_equal(recorded.step(), expected)
        num_recorded += recorded.kernels.num_calls - before < calls // 2
    inner.norm = norm
    assert num_recorded >= 6
    assert len({float(hidden.sum()) for hidden in recorded.drafter.heard}) == 12
