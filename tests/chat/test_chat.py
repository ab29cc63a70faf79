"""Writer and vectors: prompts to requests, and the tokens of answers to deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.build import build_text_model
from mlxserve.chat.answers import RequestOutput
from mlxserve.chat.request_options import RequestOptions
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import (
    EngineStopped,
    InvalidParameter,
    InvalidRequest,
    PromptTooLong,
)
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.snapshot import Phase
from mlxserve.hub.embedded import model_path
from mlxserve.images.image import Image
from mlxserve.request import CacheMiss, CacheReport, FinishReason, Output, Pooling, TokenLogprob
from mlxserve.text.deltas import Delta, DeltaDecoder
from mlxserve.text.tokenizer import Tokenizer
from tests.chat.answering import GREEDY, collect, run


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_path())


async def until_idle(chat: TextModel) -> None:
    """Wait until no request runs and no page is held, then audit the engine."""
    async with asyncio.timeout(60):
        while chat.engine.stats().scheduler.num_running or chat.engine.stats().pool.num_used:
            await chat.engine.check()
    await chat.engine.check()


def outputs_of(pieces: Sequence[Sequence[int]]) -> list[Output]:
    outputs = [Output("r", tuple(piece), num_prompt=3) for piece in pieces]
    return [*outputs, Output("r", (), FinishReason.LENGTH, num_prompt=3)]


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_the_text_does_not_depend_on_how_tokens_are_grouped(
    text: str, cuts: list[int], tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [ids[a:b] for a, b in pairwise(bounds)]
    decoder = DeltaDecoder(tokenizer, SamplingParams(), frozenset())
    deltas = [decoder.push(output) for output in outputs_of(pieces)]
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids)


@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", " ", "é", "🙂", "stop"]), max_size=14),
    stops=st.lists(
        st.sampled_from(["ab", "ba", "abb", "stop", "st", "é🙂"]), min_size=1, max_size=3
    ),
)
def test_the_text_ends_before_the_first_stop_string_in_any_split(
    words: list[str], stops: list[str], tokenizer: Tokenizer
) -> None:
    text = "".join(words)
    ids = tokenizer.encode(text)
    decoder = DeltaDecoder(tokenizer, SamplingParams(stop=tuple(stops)), frozenset())
    seen, reason, stop = "", None, None
    for output in outputs_of([[token] for token in ids]):
        delta = decoder.push(output)
        seen, reason, stop = seen + delta.text, delta.finish_reason, delta.stop
        if reason is not None:
            assert delta.usage is not None
            break
    assert reason is not None
    assert not any(stop in seen for stop in stops)
    if reason is FinishReason.STOP:
        # The text up to some token held a stop string, and all before it was given out.
        assert stop in stops
        assert text.startswith(seen + stop)
    else:
        assert stop is None
        assert seen == text


def test_an_end_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.eos_token_ids)
    hello = tokenizer.encode("hello")
    decoder = DeltaDecoder(tokenizer, SamplingParams(), frozenset({end}))
    last = decoder.push(Output("r", (*hello, end), FinishReason.STOP, num_prompt=3, num_cached=2))
    assert last.text == "hello"
    assert last.usage is not None
    assert last.usage.completion_tokens == len(hello) + 1
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (3, 2)


def test_an_answer_ends_once_with_its_usage(chat: TextModel) -> None:
    deltas = run(collect(chat, [5, 6, 7], GREEDY))
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[0].usage is not None  # says what was cached before the first word is sent
    assert deltas[0].usage.prompt_tokens == 3
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 8)
    assert sum(len(delta.token_ids) for delta in deltas) == 8


def test_prompts_submitted_together_are_one_stream_with_an_index_for_each_answer(
    chat: TextModel,
) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(n=2, max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)

    async def together() -> list[Delta]:
        return [delta async for delta in await chat.writer.submit_all(prompts, params)]

    deltas = run(together())
    for index, (prompt, choice) in enumerate(product(prompts, params.choices())):
        alone = run(collect(chat, prompt, choice))
        own = [delta for delta in deltas if delta.answer_index == index]
        assert [delta.token_ids for delta in own] == [delta.token_ids for delta in alone]
        assert own[-1].finish_reason is FinishReason.LENGTH
    assert {delta.answer_index for delta in deltas} == {0, 1, 2, 3}


def test_whole_answers_are_their_deltas_joined(chat: TextModel) -> None:
    params = SamplingParams(n=2, max_tokens=6, temperature=1.0, seed=9, ignore_eos=True, logprobs=1)

    async def whole() -> list[RequestOutput]:
        return await (await chat.writer.submit_all([[5, 6, 7]], params)).whole()

    outputs = run(whole())
    assert len(outputs) == 2
    for output, choice in zip(outputs, params.choices(), strict=True):
        deltas = run(collect(chat, [5, 6, 7], choice))
        assert output.text == "".join(delta.text for delta in deltas)
        assert output.token_ids == tuple(t for delta in deltas for t in delta.token_ids)
        assert output.finish_reason is deltas[-1].finish_reason
        assert output.usage.completion_tokens == 6
        assert output.logprobs is not None
        assert tuple(one.token_id for one in output.logprobs) == output.token_ids


def test_one_invalid_prompt_refuses_all_that_were_submitted_with_it(chat: TextModel) -> None:
    async def scenario() -> None:
        await until_idle(chat)  # an earlier test's last request may still be ending
        with pytest.raises(PromptTooLong):
            await chat.writer.submit_all([[1, 2], [3] * 512], GREEDY)
        assert list((await chat.engine.snapshot()).requests) == []

    run(scenario())


def test_an_observer_sees_each_delta_first_and_may_end_the_stream(chat: TextModel) -> None:
    seen: list[Delta] = []

    def observe(delta: Delta) -> None:
        seen.append(delta)
        if len(seen) == 3:
            raise EngineStopped("enough")

    async def scenario() -> None:
        answer = await chat.writer.submit_all([[5, 6, 7]], GREEDY, observe=observe)
        read = [await anext(answer), await anext(answer)]
        with pytest.raises(EngineStopped, match="enough"):
            await anext(answer)
        assert seen[:2] == read
        await answer.aclose()
        await until_idle(chat)

    run(scenario())


def test_a_stop_string_ends_the_request_in_the_engine_too(chat: TextModel) -> None:
    async def scenario() -> None:
        params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
        full = "".join(d.text for d in await collect(chat, [5, 6, 7], params))
        stop = full[20:24]
        params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, stop=(stop,))
        deltas = await collect(chat, [5, 6, 7], params)
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert "".join(d.text for d in deltas) == full[: full.index(stop)]
        await until_idle(chat)

    run(scenario())


def test_closing_an_answer_releases_its_pages(chat: TextModel) -> None:
    async def scenario() -> None:
        answer = await chat.writer.submit(
            list(range(40)), SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        )
        await anext(answer)
        await answer.aclose()
        await until_idle(chat)
        assert [delta async for delta in answer] == []

    run(scenario())


def test_a_cancelled_submit_leaves_no_request_behind(chat: TextModel) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(
            collect(chat, [1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(chat)

    run(scenario())


def test_a_repeated_prompt_recomputes_at_most_one_page(chat: TextModel) -> None:
    prompt = list(range(100, 180))

    async def scenario() -> list[int]:
        cached = []
        for _ in range(2):
            usage = (await collect(chat, prompt, GREEDY))[-1].usage
            assert usage is not None
            cached.append(usage.cached_tokens)
        return cached

    first, second = run(scenario())
    assert first == 0
    assert len(prompt) - second <= 16


def test_different_salts_share_no_page(chat: TextModel) -> None:
    prompt = list(range(200, 280))

    async def cached(salt: str | None) -> int:
        answer = await chat.writer.submit(prompt, GREEDY, RequestOptions(cache_salt=salt))
        usage = [delta async for delta in answer][-1].usage
        assert usage is not None
        return usage.cached_tokens

    assert [run(cached(salt)) for salt in (None, "a", "b", "a", None)] == [0, 0, 0, 79, 79]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ([], GREEDY, InvalidRequest, "empty"),
        ([1] * 512, GREEDY, PromptTooLong, "512"),
        ([10**6], GREEDY, InvalidParameter, "token ids"),
        ([-1], GREEDY, InvalidParameter, "token ids"),
        ([1], SamplingParams(logit_bias={10**6: 1.0}), InvalidParameter, "logit_bias"),
        ([1], SamplingParams(stop_token_ids=(10**6,)), InvalidParameter, "stop_token_ids"),
    ],
)
def test_an_invalid_request_is_refused_before_anything_is_computed(
    chat: TextModel,
    prompt: list[int],
    params: SamplingParams,
    error: type[Exception],
    says: str,
) -> None:
    steps = chat.engine.stats().engine.num_steps
    with pytest.raises(error, match=says):
        run(collect(chat, prompt, params))
    assert chat.engine.stats().engine.num_steps == steps


def test_usage_has_a_report_of_the_prefix_cache(chat: TextModel) -> None:
    prompt = [(411 + 37 * n) % 500 for n in range(40)]

    def report(prompt: Sequence[int]) -> CacheReport | None:
        usage = run(collect(chat, prompt, GREEDY))[-1].usage
        assert usage is not None
        return usage.cache

    assert report(prompt) == CacheReport(0, 0, 0, CacheMiss.NEW_TEXT)
    assert report(prompt) == CacheReport(2, 32, 32, CacheMiss.BELOW_ONE_PAGE)
    assert report([*prompt[:20], *prompt]) == CacheReport(1, 16, 20, CacheMiss.NEW_TEXT)


def test_a_text_that_can_never_fit_is_refused_unread(
    chat: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was read")

    just_right = "x" * (chat.max_model_len * 4)
    assert len(chat.codec.encode(just_right)) > 0
    monkeypatch.setattr(Tokenizer, "encode", never)
    monkeypatch.setattr(Tokenizer, "render", never)
    huge = "x " * 1_000_000
    with pytest.raises(PromptTooLong, match="has 2000000 characters"):
        chat.codec.encode(huge)
    with pytest.raises(PromptTooLong, match="has 2000011 characters"):
        chat.writer.render([{"role": "system", "content": "x"}, {"role": "user", "content": huge}])
    tools = [{"type": "function", "function": {"name": "f", "description": huge}}]
    with pytest.raises(PromptTooLong, match="has 2000014 characters"):
        chat.writer.render([{"role": "user", "content": "x"}], tools=tools)


def test_a_snapshot_shows_running_requests(chat: TextModel) -> None:
    async def scenario() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        options = RequestOptions(client="me", request_id="mine")
        answer = await chat.writer.submit(list(range(40)), params, options)
        await anext(answer)
        snapshot = await chat.engine.snapshot()
        [seen] = [one for one in snapshot.requests if one.id == "mine"]
        assert seen.client == "me"
        assert seen.phase is Phase.DECODING
        assert seen.num_prompt == 40
        assert len(snapshot.pages) == 64
        assert snapshot.memory.kv_cache > 0
        await answer.aclose()
        assert not [one for one in (await chat.engine.snapshot()).requests if one.id == "mine"]

    run(scenario())
    assert chat.engine.seconds_since_beat() < 30


def test_answers_to_one_request_have_its_id_and_a_number(chat: TextModel) -> None:
    async def names(options: RequestOptions, n: int) -> list[str]:
        params = SamplingParams(n=n, max_tokens=200, ignore_eos=True)
        answers = await chat.writer.submit_all([[1, 2, 3]], params, options)
        snapshot = await chat.engine.snapshot()
        await answers.aclose()
        return sorted(one.id for one in snapshot.requests)

    assert run(names(RequestOptions(request_id="mine"), 1)) == ["mine"]
    assert run(names(RequestOptions(request_id="mine"), 3)) == ["mine-0", "mine-1", "mine-2"]
    assert len(set(run(names(RequestOptions(), 2)))) == 2


def test_a_closed_chat_raises_engine_stopped(
    model_folder: Callable[[str], Path],
) -> None:
    chat = build_text_model(
        EngineConfig().with_options(
            model=str(model_folder("llama")), num_pages=8, disable_log_stats=True
        )
    )

    async def scenario() -> None:
        answer = await chat.writer.submit([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(answer)
        await asyncio.to_thread(chat.close)
        rest = [delta async for delta in answer]
        assert rest[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(EngineStopped, match="closed"):
            await chat.writer.submit([1], GREEDY)

    run(scenario())
    assert not chat.engine.is_alive()
    chat.close()


@pytest.mark.parametrize(("num_prompts", "n"), [(1_025, 1), (1_024, 8)])
def test_more_answers_than_may_wait_are_refused_before_anything_is_prepared(
    chat: TextModel, num_prompts: int, n: int
) -> None:
    prompts: list[list[int]] = [[]] * num_prompts  # each of them would be refused
    with pytest.raises(InvalidRequest, match=rf"{num_prompts * n} requests.*at most 1024 may wait"):
        run(chat.writer.submit_all(prompts, SamplingParams(n=n)))


async def vector_of(chat: TextModel, text: list[int], **options: Any) -> list[float]:
    [vector] = await chat.vectors.embed([text], **options)
    return vector


def test_embedding_a_text_beside_an_answer_changes_neither(chat: TextModel) -> None:
    text = list(range(5, 200))

    async def both() -> tuple[list[list[float]], list[Delta]]:
        answer = asyncio.ensure_future(collect(chat, [5, 6, 7], GREEDY))
        vectors = [await vector_of(chat, text, pooling=pooling) for pooling in Pooling]
        return vectors, await answer

    alone = run(collect(chat, [5, 6, 7], GREEDY))
    (mean, last), deltas = run(both())
    assert [delta.token_ids for delta in deltas] == [delta.token_ids for delta in alone]
    assert mean == pytest.approx(run(vector_of(chat, text)), abs=1e-5)
    assert sum(x * x for x in mean) == pytest.approx(1, abs=1e-4)
    assert last != pytest.approx(mean, abs=1e-2)


def test_scoring_a_text_beside_an_answer_agrees_with_what_is_sampled(chat: TextModel) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1)

    async def whole() -> list[RequestOutput]:
        return await (await chat.writer.submit([5, 6, 7], params)).whole()

    [answer] = run(whole())
    text = [5, 6, 7, *answer.token_ids]

    async def both() -> tuple[list[TokenLogprob], list[Delta]]:
        beside = asyncio.ensure_future(collect(chat, [5, 6, 7], GREEDY))
        return await chat.writer.score(text, num_top=1), await beside

    scored, _ = run(both())
    assert [one.token_id for one in scored] == text[1:]
    for one, sampled in zip(scored[2:], answer.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(sampled.logprob, abs=1e-3)
        assert one.top[0][0] == one.token_id


@pytest.mark.parametrize("token_ids", [[], [-1], [10**9], [5] * 10_000])
def test_a_text_that_cannot_be_scored_is_refused(chat: TextModel, token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        run(chat.writer.score(token_ids))


@pytest.mark.parametrize("token_ids", [[], [-1], [10**9], [5] * 10_000])
def test_a_text_that_cannot_be_embedded_is_refused(chat: TextModel, token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        run(vector_of(chat, token_ids))


def test_a_cancelled_embedding_leaves_the_engine_consistent(chat: TextModel) -> None:
    async def give_up() -> None:
        task = asyncio.ensure_future(vector_of(chat, [5] * 400))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await chat.engine.check()

    run(give_up())
    assert run(vector_of(chat, [5, 6], dimensions=4))


def test_a_model_that_reads_text_only_refuses_images(chat: TextModel) -> None:
    image = Image.from_pixels(np.zeros((2, 2, 3), np.uint8))
    said = {"role": "user", "content": [{"type": "image", "image": image}]}
    assert not chat.supports_images
    with pytest.raises(InvalidParameter, match="this model reads text only"):
        chat.writer.render([said])
