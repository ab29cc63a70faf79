"""A step is launched, read one step later, and gives the tokens of the dense model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from metal_kernels.reading import DeviceError
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.batch import Batch
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.paged import RowSelector
from mlxserve.model.runner import ModelRunner, Pending
from mlxserve.request import Chunk, LiveRequest, Request, Sampled, as_page_table
from tests.device_errors import broken, in_a_thread

PAGE = 16
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def runner_of(loaded: LoadedModel, seed: int = 0, num_pages: int = 8) -> ModelRunner:
    kv = KVPool(loaded.layers, num_pages, PAGE, select_backend("cpu"))
    return ModelRunner(loaded, kv, seed)


def request(ids: Sequence[int], params: SamplingParams = GREEDY, arrival: int = 0) -> LiveRequest:
    return LiveRequest(Request(str(ids[0]), list(ids), params), arrival=arrival)


def chunk(of: LiveRequest, start: int, end: int, pages: tuple[int, ...], **options: bool) -> Chunk:
    return Chunk(of, start, end - start, as_page_table(pages), **{"samples": True, **options})


def run(runner: ModelRunner, chunks: Sequence[Chunk], previous: Pending | None = None) -> Pending:
    pending = runner.launch(chunks, previous)
    runner.start(pending)
    return pending


def token(sampled: Sampled | None) -> int:
    assert sampled is not None
    return sampled.token_id


def greedy(loaded: LoadedModel, ids: Sequence[int], count: int) -> list[int]:
    ids, answer = list(ids), []
    for _ in range(count):
        answer.append(int(mx.argmax(loaded.model(mx.array([ids]))[0, -1])))
        ids.append(answer[-1])
    return answer


def decode(
    runner: ModelRunner, requests: Sequence[LiveRequest], count: int, *, is_lazy: bool
) -> list[list[int]]:
    """Prefill and decode requests together. Lazy: each step is launched before the previous one is
    read. Nothing is published or freed, so pages are simply numbered from 0, two per request."""
    tables = [(2 * i + 1, 2 * i) for i in range(len(requests))]
    pairs = list(zip(requests, tables, strict=True))
    step = [chunk(r, 0, len(r.token_ids), table) for r, table in pairs]
    pending = run(runner, sorted(step, key=lambda one: one.length))
    for done in range(1, count):
        if not is_lazy:
            read(runner, pending)
        ends = [r.num_prompt + done for r in requests]
        step = [
            chunk(r, end - 1, end, table, is_lazy=is_lazy)
            for (r, table), end in zip(pairs, ends, strict=True)
        ]
        following = runner.launch(step, pending if is_lazy else None)
        if is_lazy:
            read(runner, pending)
        runner.start(following)
        pending = following
    read(runner, pending)
    return [[*r.token_ids[r.num_prompt :]] for r in requests]


def read(runner: ModelRunner, pending: Pending) -> None:
    for one, sampled in zip(pending.chunks, runner.collect(pending), strict=True):
        one.request.token_ids.append(token(sampled))


@pytest.mark.parametrize("is_lazy", [False, True], ids=["read", "lazy"])
def test_greedy_tokens_equal_the_dense_ones_read_or_pending(
    is_lazy: bool, loaded: LoadedModel
) -> None:
    prompts = [[7, 8, 9], list(range(20, 37)), [5]]
    found = decode(runner_of(loaded), [request(ids) for ids in prompts], 6, is_lazy=is_lazy)
    assert found == [greedy(loaded, ids, 6) for ids in prompts]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5, temperature=1.2),
        SamplingParams(seed=5, temperature=1.2, top_k=40, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.8, frequency_penalty=0.5),
        SamplingParams(seed=6, presence_penalty=1.5, repetition_penalty=0.7),
    ],
    ids=["plain", "filtered", "penalties", "seeded_penalties"],
)
def test_a_pending_token_gives_the_same_samples_as_one_that_was_read(
    params: SamplingParams, loaded: LoadedModel
) -> None:
    prompts = [[7, 8, 9], [4, 4, 4, 4, 4], [1]]
    one, other = (
        decode(runner_of(loaded), [request(p, params) for p in prompts], 8, is_lazy=is_lazy)
        for is_lazy in (False, True)
    )
    assert one == other


def test_a_seeded_answer_is_the_same_alone_and_in_a_batch(loaded: LoadedModel) -> None:
    params = SamplingParams(seed=2**63 + 11, temperature=1.5)
    (alone,) = decode(runner_of(loaded), [request([7, 8, 9], params)], 8, is_lazy=True)
    company = [request([3], SamplingParams(seed=1)), request([7, 8, 9], params), request([4, 4])]
    assert decode(runner_of(loaded), company, 8, is_lazy=True)[1] == alone


def first_tokens(loaded: LoadedModel, params: SamplingParams, **options: int) -> list[int]:
    seed = options.pop("seed", 0)
    found = decode(
        runner_of(loaded, seed), [request([7, 8, 9], params, **options)], 4, is_lazy=False
    )
    return found[0]


def test_seeds_beyond_32_bits_and_below_0_count(loaded: LoadedModel) -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 2, -1, -2, -(2**63) + 1]
    params = [SamplingParams(seed=seed, temperature=3.0) for seed in seeds]
    answers = [tuple(first_tokens(loaded, one)) for one in params]
    assert answers == [tuple(first_tokens(loaded, one)) for one in params]
    assert answers[5] == answers[7], "a seed counts modulo 2**64"
    assert len(set(answers)) == len(seeds) - 1


def test_without_a_seed_the_arrival_and_the_engines_seed_decide(loaded: LoadedModel) -> None:
    free = SamplingParams(temperature=3.0)
    base = first_tokens(loaded, free)
    assert first_tokens(loaded, free) == base
    assert first_tokens(loaded, free, arrival=1) != base
    assert first_tokens(loaded, free, seed=1) != base


def test_a_chunk_that_does_not_sample_yields_nothing(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    prompt = request(range(30, 60))
    pending = run(runner, [chunk(prompt, 0, 16, (3, 1), samples=False)])
    assert runner.collect(pending) == [None]
    other = request([9, 9])
    pending = run(
        runner,
        [chunk(prompt, 16, 20, (3, 1), samples=False), chunk(other, 0, 2, (0,))],
    )
    assert [None if s is None else s.token_id for s in runner.collect(pending)] == [
        None,
        *greedy(loaded, [9, 9], 1),
    ]
    pending = run(runner, [chunk(prompt, 20, 30, (3, 1))])
    assert token(runner.collect(pending)[0]) == greedy(loaded, range(30, 60), 1)[0]


def test_a_step_that_samples_nothing_is_waited_for(loaded: LoadedModel) -> None:
    """Else a failure of the device would be reported by a later step, of other requests."""
    runner, long = runner_of(loaded), request(range(4))
    launched = run(runner, [chunk(long, 0, 2, (0,), samples=False)])
    assert runner.collect(launched) == [None]

    def collect() -> object:
        return runner.collect(replace(launched, done=broken()))

    with pytest.raises(DeviceError):
        in_a_thread(collect)


def test_a_lazy_token_is_taken_from_its_own_request(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    one, other = request([7, 8, 9]), request([5, 6])
    pending = run(runner, [chunk(one, 0, 3, (0,)), chunk(other, 0, 2, (1,))])
    swapped = [chunk(other, 2, 3, (1,), is_lazy=True), chunk(one, 3, 4, (0,), is_lazy=True)]
    following = runner.launch(swapped, pending)
    firsts = [token(s) for s in runner.collect(pending)]
    runner.start(following)
    seconds = [token(s) for s in runner.collect(following)]
    assert [firsts[0], seconds[1]] == greedy(loaded, [7, 8, 9], 2)
    assert [firsts[1], seconds[0]] == greedy(loaded, [5, 6], 2)


def test_a_lazy_token_of_a_request_that_did_not_sample_is_an_error(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    pending = run(runner, [chunk(request([5, 6]), 0, 2, (1,))])
    stranger = request([7, 8, 9])
    with pytest.raises(LookupError, match="request 7 did not sample in the previous step"):
        runner.launch([chunk(stranger, 2, 3, (0,), is_lazy=True)], pending)


def test_logprobs_are_returned_for_requests_that_ask_for_them(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    wanting = request([7, 8, 9], SamplingParams(temperature=0, logprobs=2))
    pending = run(runner, [chunk(request([5]), 0, 1, (1,)), chunk(wanting, 0, 3, (0,))])
    without, with_ = runner.collect(pending)
    assert without is not None
    assert without.logprob is None
    assert with_ is not None
    assert with_.logprob is not None
    dense = np.array(loaded.model(mx.array([[7, 8, 9]]))[0, -1], np.float64)
    exact = dense - np.log(np.exp(dense).sum())
    assert with_.logprob.logprob == pytest.approx(exact.max(), abs=1e-4)
    assert [i for i, _ in with_.logprob.top] == np.argsort(-exact)[:2].tolist()


def test_logits_are_computed_for_sampling_rows_or_all_rows(loaded: LoadedModel) -> None:
    runner = runner_of(loaded)
    chunks = [chunk(request([5]), 0, 1, (1,)), chunk(request([7, 8, 9]), 0, 3, (0,))]
    batch = Batch.from_chunks(chunks, PAGE)
    every = np.array(runner.logits(batch, mx.array(batch.tokens), all_rows=True))
    wanted = np.array(runner.logits(batch, mx.array(batch.tokens)))
    assert every.shape == (4, loaded.vocab_size)
    assert np.allclose(wanted, every[[0, 3]], atol=1e-5)
    assert loaded.selector.rows is None


def test_a_head_that_cannot_be_wrapped_gives_the_same_rows(loaded: LoadedModel) -> None:
    kv = KVPool(loaded.layers, 8, PAGE, select_backend("cpu"))
    runner = ModelRunner(replace(loaded, selector=RowSelector()), kv)  # which no head reads
    chunks = [chunk(request([5]), 0, 1, (1,)), chunk(request([7, 8, 9]), 0, 3, (0,))]
    batch = Batch.from_chunks(chunks, PAGE)
    found = np.array(runner.logits(batch, mx.array(batch.tokens)))
    other = np.array(runner_of(loaded).logits(batch, mx.array(batch.tokens)))
    assert np.allclose(found, other, atol=1e-5)


def test_a_failed_forward_leaves_no_rows_selected(loaded: LoadedModel) -> None:
    class Failing(nn.Module):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, cache: object) -> mx.array:
            assert loaded.selector.rows is not None
            raise RuntimeError("out of order")

    kv = KVPool(loaded.layers, 8, PAGE, select_backend("cpu"))
    batch = Batch.from_chunks([chunk(request([5, 6]), 0, 2, (1,))], PAGE)
    with pytest.raises(RuntimeError, match="out of order"):
        ModelRunner(replace(loaded, model=Failing()), kv).logits(batch, mx.array(batch.tokens))
    assert loaded.selector.rows is None


def test_a_step_is_started_at_launch_where_every_layer_writes_in_place(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    real = mx.async_eval

    def begin(*arrays: mx.array) -> None:
        started.append(len(arrays))
        real(*arrays)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(mx, "async_eval", begin)
    in_place, copying = X86Backend(), X86Backend()
    monkeypatch.setattr(in_place, "writes_in_place", True)
    others = [in_place] * (len(loaded.layers) - 1)
    # One layer that may copy its pool is enough to wait for the step before.
    for backends, is_started in ((in_place, 1), ([*others, copying], 0), (copying, 0)):
        kv = KVPool(loaded.layers, 4, PAGE, backends)
        runner = ModelRunner(loaded, kv)
        started.clear()
        pending = runner.launch([chunk(request([5, 6]), 0, 2, (1,))])
        assert len(started) == is_started
        runner.start(pending)
        assert len(started) == 1, "exactly once"
        assert token(runner.collect(pending)[0]) == greedy(loaded, [5, 6], 1)[0]
