"""An assistant never changes a token, and computes from the model's pages what it would from whole texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from mlxserve import LLM, SamplingParams
from mlxserve.model import attention
from mlxserve.model.drafting.assistant import Assistant
from mlxserve.model.drafting.assistant_model import AssistantModel, Shared
from mlxserve.request import Chunk
from tests.assistants import always_drafting, read_assistant, write_agreeing_pair, write_assistant
from tests.assistants import unprobed as unprobed
from tests.emulated import emulated_backend
from tests.test_draft_models import (
    BRIEF,
    GREEDY,
    OPTIONS,
    PROMPTS,
    SAMPLING,
    WARM,
    Scenarios,
    Undrafted,
    are_accepted_everywhere,
    drafted_by,
    stats,
    tokens,
)
from tests.test_draft_models import undrafted as undrafted

CLUSTERED: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 4,
}
WINDOW = 24  # of the tiny model
SLIDING = "sliding_attention"

pytestmark = pytest.mark.usefixtures("unprobed")


@pytest.fixture(scope="module")
def target(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("gemma4_text")


@pytest.fixture(scope="module")
def assistant(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assistant(tmp_path_factory.mktemp("assistant"), target)


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    with LLM(str(target), num_pages=100, **OPTIONS) as llm:
        yield llm


# ---- tokens


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param("agreeing", BRIEF, id="agreeing, half the answers"),
        *(
            pytest.param(kind, SAMPLING, marks=pytest.mark.long, id=kind)
            for kind in ("random", "clusters", "agreeing")
        ),
    ],
)
def test_no_token_differs(
    kind: str,
    sampling: Sequence[SamplingParams],
    target: Path,
    undrafted: Undrafted,
    tmp_path: Path,
) -> None:
    """Alone, together, next turns, short of pages, resized and restarted from disk, for each kind of sampling."""
    if kind == "agreeing":
        target, folder = write_agreeing_pair(tmp_path, target)
    else:
        folder = write_assistant(
            tmp_path / "assistant", target, **(CLUSTERED if kind == "clusters" else {})
        )
    scenarios = Scenarios(str(target), {"draft_model": str(folder)}, tmp_path, sampling)
    expected = undrafted(str(target), sampling)
    with always_drafting():
        assert scenarios.run(is_drafted=True) == expected
    assert scenarios.num_drafted > (1000 if sampling is SAMPLING else 500)
    if kind == "agreeing":
        assert are_accepted_everywhere(scenarios), scenarios.accepted


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, CLUSTERED], ids=["random", "clusters"])
def test_tokens_are_those_without_an_assistant(
    plain: LLM, target: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    params = [replace(one, max_tokens=8) for one in SAMPLING[:2]]
    folder = write_assistant(tmp_path, target, **changes)
    expected = tokens(plain, PROMPTS[1:3], params)
    with (
        always_drafting(),
        LLM(str(target), num_pages=30, draft_model=str(folder), **OPTIONS) as llm,
    ):
        found, num_drafted, _ = drafted_by(llm, PROMPTS[1:3], params)
        assert llm.stats().planned.page == plain.stats().planned.page, "it keeps nothing in pages"
        assert llm.stats().planned.weights > plain.stats().planned.weights
    assert found == expected
    assert num_drafted > 20


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, None], ids=["nan", "noise"])
def test_whatever_hidden_states_it_is_given_change_no_token(
    plain: LLM, target: Path, assistant: Path, value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [replace(one, max_tokens=20) for one in SAMPLING[:3]]
    expected = tokens(plain, PROMPTS[:3], params)
    follow, draw = Assistant.follow, np.random.default_rng(4)

    def spoiled(
        self: Assistant, chunks: Sequence[Chunk], ids: mx.array, hidden: mx.array | None
    ) -> None:
        assert hidden is not None
        noise = mx.array(draw.normal(size=hidden.shape).astype(np.float32)) * 30
        follow(self, chunks, ids, noise if value is None else mx.full(hidden.shape, value))

    monkeypatch.setattr(Assistant, "follow", spoiled)
    with (
        always_drafting(),
        LLM(str(target), num_pages=40, draft_model=str(assistant), **OPTIONS) as llm,
    ):
        found, num_drafted, num_accepted = drafted_by(llm, PROMPTS[:3], params)
    assert found == expected
    assert num_accepted < num_drafted


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")  # weights become float32
def test_the_emulated_metal_kernels_read_for_an_assistant(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = write_agreeing_pair(tmp_path, target)
    prompts, params = PROMPTS[2:4], [replace(GREEDY, max_tokens=10), replace(WARM, max_tokens=8)]
    with LLM(str(target), num_pages=30, **OPTIONS) as llm:
        expected = tokens(llm, prompts, params)
    monkeypatch.setattr(
        attention, "select_backends", lambda _name, layers: [emulated_backend()] * len(layers)
    )
    with (
        always_drafting(),
        LLM(str(target), num_pages=30, draft_model=str(folder), **OPTIONS) as llm,
    ):
        found, _, num_accepted = drafted_by(llm, prompts, params)
    assert found == expected
    assert num_accepted > 0


# ---- what it computes


class _Call:
    """A call of the assistant: the tokens of its rows, embedded, and their logits."""

    def __init__(self, embedded: mx.array, logits: mx.array) -> None:
        self.embedded, self.logits = embedded, logits


class _Draft:
    """What an assistant was asked for: the known tokens and the length of each request's draft."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.known = [list(chunk.request.token_ids) for chunk in chunks]
        self.sizes = [len(chunk.draft) for chunk in chunks]
        self.calls: list[_Call] = []
        self.guesses: list[int] = []

    def of(self, number: int) -> list[int]:
        """The guesses of a request."""
        first = sum(self.sizes[:number])
        return self.guesses[first : first + self.sizes[number]]

    def rows_of(self, number: int) -> list[int]:
        """The request's row in each call: in order, then the longest drafts first."""
        ranks = sorted(range(len(self.sizes)), key=lambda other: -self.sizes[other])
        return [number, *[ranks.index(number)] * (self.sizes[number] - 1)]


@contextmanager
def watched() -> Iterator[list[_Draft]]:
    """Yield the drafts that are made."""
    drafts: list[_Draft] = []
    propose, call = Assistant.propose, AssistantModel.__call__

    def proposing(self: Assistant, chunks: Sequence[Chunk]) -> mx.array:
        drafts.append(_Draft(chunks))
        ids = propose(self, chunks)
        drafts[-1].guesses = ids.tolist()
        return ids

    def calling(
        self: AssistantModel, embedded: mx.array, hidden: mx.array, at: mx.array, shared: Shared
    ) -> tuple[mx.array, mx.array]:
        logits, after = call(self, embedded, hidden, at, shared)
        drafts[-1].calls.append(_Call(embedded, logits))
        return logits, after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assistant, "propose", proposing)
        patch.setattr(AssistantModel, "__call__", calling)
        yield drafts


class Dense:
    """The target and its assistant over whole texts, without pages."""

    def __init__(self, target: Path, assistant: AssistantModel) -> None:
        self._target = load_model(target)[0]
        self._assistant = assistant

    def calls(self, known: list[int], guesses: Sequence[int]) -> list[tuple[mx.array, mx.array]]:
        """Return (token, embedded; logits) of the calls that guess these tokens after the known ones."""
        model, length = self._target, len(known) - 1
        cache = [KVCache() for _ in model.make_cache()]
        hidden = model.model(mx.array([known[:-1]]), cache=cache)[0, -1:]
        kinds = model.args.layer_types[: len(cache)]
        shared = {}
        for kind, layer in zip(kinds, cache, strict=True):  # the last one of its kind stays
            first = max(0, length - WINDOW) if kind == SLIDING else 0
            shared[kind] = layer.keys[:, :, first:length], layer.values[:, :, first:length]
        found = []
        for token in [known[-1], *guesses[:-1]]:
            embedded = model.model.embed_tokens(mx.array([token])) * model.model.embed_scale
            at = mx.array([length - 1])
            logits, hidden = self._assistant(embedded, hidden, at, shared)
            found.append((embedded[0], logits[0]))
        return found


def check_calls(dense: Dense, drafts: Sequence[_Draft]) -> int:
    """Compare every call with that over whole texts; return how many drafts were compared."""
    num_checked = 0
    for draft in drafts:
        assert len(draft.calls) == max(draft.sizes), "each request had a hidden state"
        for number, known in enumerate(draft.known):
            expected = dense.calls(known, draft.of(number))
            rows = draft.rows_of(number)
            for call, row, (embedded, logits) in zip(draft.calls, rows, expected, strict=False):
                np.testing.assert_allclose(
                    np.array(call.embedded[row]), np.array(embedded), rtol=1e-5
                )
                # Rounding grows from call to call, here to 0.006; a wrong row differs by 5.
                np.testing.assert_allclose(np.array(call.logits[row]), np.array(logits), atol=0.05)
            num_checked += 1
    return num_checked


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 40},
        {"num_pages": 100, "num_window_pages": 30},
        {"num_pages": 100, "num_window_pages": 0},
    ],
    ids=["default", "windows in a pool of their own", "one pool"],
)
def test_logits_are_those_over_whole_texts(
    options: dict[str, int], target: Path, assistant: Path, unprobed: None
) -> None:
    """Of requests together and of their next turns, from cached pages and after rejected guesses."""
    prompts, params = PROMPTS[1:3], [replace(one, max_tokens=10) for one in SAMPLING[:2]]
    with (
        always_drafting(),
        LLM(
            str(target),
            draft_model=str(assistant),
            max_num_batched_tokens=40,
            max_num_seqs=8,
            **OPTIONS,
            **options,
        ) as llm,
        watched() as drafts,
    ):
        found = tokens(llm, prompts, params)
        hits = stats(llm).prefix_hits
        tokens(llm, [[*a, *b, 5] for a, b in zip(prompts, found, strict=True)], params)
        assert stats(llm).prefix_hits > hits
    assert check_calls(Dense(target, read_assistant(assistant)), drafts) > 10
