"""Speculation never changes a token: with drafts and without, greedy and sampled, in any batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.chat.answers import RequestOutput
from mlxserve.core.sampling_params import Structure, StructureKind
from tests.together import begun_together

SENTENCES = "The quick brown fox jumps over the lazy dog. The farmer has nine cows and two goats. "
COPYING = f"{SENTENCES * 3}The quick"  # a text that repeats and stops in mid-sentence
PROMPTS = (COPYING, "Tell me a story about a cat.", SENTENCES, f"{COPYING}The farmer has")
GREEDY = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.6, top_p=0.95, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(num_pages=200, page_size=16, disable_log_stats=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def speculative() -> Iterator[LLM]:
    with LLM(num_pages=200, page_size=16, disable_log_stats=True, speculative_tokens=8) as llm:
        yield llm


def generate(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    llm.check()
    return outputs


def num_accepted(llm: LLM) -> int:
    return llm.stats().scheduler.accepted_tokens


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        pytest.param(SAMPLED, marks=pytest.mark.slow),
        pytest.param(
            replace(GREEDY, ignore_eos=False, min_tokens=30, logit_bias={17: 1.5}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(SAMPLED, temperature=0.8, top_p=1.0, min_p=0.05), marks=pytest.mark.slow
        ),
        pytest.param(replace(SAMPLED, temperature=0.5, top_k=20), marks=pytest.mark.slow),
        pytest.param(replace(GREEDY, max_tokens=7), marks=pytest.mark.slow),
    ],
    ids=["greedy", "top-p", "min-tokens", "min-p", "top-k", "short"],
)
def test_tokens_are_the_same_with_drafts(
    plain: LLM, speculative: LLM, params: SamplingParams
) -> None:
    before = num_accepted(speculative)
    for prompts in ([COPYING], [COPYING, SENTENCES], PROMPTS):
        expected = generate(plain, prompts, params)
        found = generate(speculative, prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.text for one in found] == [one.text for one in expected]
        assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    assert num_accepted(speculative) > before
    assert num_accepted(plain) == 0


def test_fewer_steps_are_computed(plain: LLM, speculative: LLM) -> None:
    steps = []
    for llm in (plain, speculative):
        before = llm.stats().engine.num_steps
        generate(llm, [COPYING], GREEDY)
        steps.append(llm.stats().engine.num_steps - before)
    assert steps[1] < steps[0] / 2, steps


def test_an_answer_ends_before_a_stop_string_within_a_draft(plain: LLM, speculative: LLM) -> None:
    [whole] = generate(plain, [COPYING], GREEDY)
    for stop in (whole.text[20:26], whole.text[31:35], whole.text[50:60]):
        [found] = generate(speculative, [COPYING], replace(GREEDY, stop=(stop,)))
        assert found.text == whole.text.partition(stop)[0]
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        assert found.finish_reason == "stop"


def test_an_answer_ends_with_a_stop_token_within_a_draft(plain: LLM, speculative: LLM) -> None:
    [whole] = generate(plain, [COPYING], GREEDY)
    for at in (11, 23, 24):
        token = whole.token_ids[at]
        [found] = generate(speculative, [COPYING], replace(GREEDY, stop_token_ids=(token,)))
        assert found.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        assert found.finish_reason == "stop"


def test_log_probabilities_are_those_of_single_steps(plain: LLM, speculative: LLM) -> None:
    params = replace(GREEDY, logprobs=3, max_tokens=40)
    [expected] = generate(plain, [COPYING], params)
    [found] = generate(speculative, [COPYING], params)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert len(found.logprobs) == len(expected.logprobs) == 40
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_each_of_n_answers_is_the_same(plain: LLM, speculative: LLM) -> None:
    before = num_accepted(speculative)
    params = replace(SAMPLED, n=2, temperature=1.0)  # warm enough for two different answers
    [found], [expected] = (generate(llm, [COPYING], params) for llm in (speculative, plain))
    assert found.token_ids == expected.token_ids
    [second], [expected_second] = found.alternatives, expected.alternatives
    assert second.token_ids == expected_second.token_ids != found.token_ids
    assert num_accepted(speculative) > before


@pytest.mark.slow
def test_answers_are_the_same_where_pages_are_short(plain: LLM) -> None:
    expected = [one.token_ids for one in generate(plain, PROMPTS, GREEDY)]
    with LLM(num_pages=15, page_size=16, disable_log_stats=True, speculative_tokens=8) as llm:
        with begun_together(len(PROMPTS)):
            assert [one.token_ids for one in generate(llm, PROMPTS, GREEDY)] == expected
        assert llm.stats().scheduler.num_preemptions > 0
        assert num_accepted(llm) > 0


def test_pages_of_a_speculative_answer_are_right_when_they_are_found(plain: LLM) -> None:
    """The next turn continues on what drafts, right and wrong, have left in the pages."""
    with LLM(num_pages=200, page_size=16, disable_log_stats=True, speculative_tokens=8) as llm:
        [first] = generate(llm, [COPYING], GREEDY)
        stats = llm.stats().scheduler
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        prompt = [*first.token_ids, *first.token_ids[:40]]
        [again] = llm.generate([prompt], GREEDY, use_tqdm=False)
        tokens = [*prompt, *again.token_ids, 20]
        [found] = llm.generate([tokens], GREEDY, use_tqdm=False)
        assert found.usage.cached_tokens >= len(tokens) - 32
        assert found.usage.speculation is not None
    assert plain.reset_prefix_cache()
    [expected] = plain.generate([tokens], GREEDY, use_tqdm=False)
    assert found.token_ids == expected.token_ids


def test_penalised_answers_are_the_same(plain: LLM, speculative: LLM) -> None:
    before = num_accepted(speculative)
    for params in (
        replace(GREEDY, repetition_penalty=1.02, max_tokens=50),
        replace(SAMPLED, frequency_penalty=0.1, presence_penalty=0.1, max_tokens=30),
    ):
        found, expected = (generate(llm, PROMPTS[:2], params) for llm in (speculative, plain))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert num_accepted(speculative) > before


SCHEMA = """{"type": "object", "additionalProperties": false,
    "properties": {"temperature_in_celsius": {"type": "integer", "minimum": 0, "maximum": 40},
                   "is_raining_today": {"type": "boolean"}},
    "required": ["temperature_in_celsius", "is_raining_today"]}"""


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "top-p"])
def test_forced_tokens_of_a_structure_take_no_step_of_their_own(
    plain: LLM, speculative: LLM, params: SamplingParams
) -> None:
    structure = Structure(StructureKind.JSON_SCHEMA, SCHEMA)
    params = replace(params, structure=structure, ignore_eos=False)
    before = speculative.stats()
    [found], [expected] = (generate(llm, ["Weather:"], params) for llm in (speculative, plain))
    assert found.token_ids == expected.token_ids
    assert {*json.loads(found.text)} == {"temperature_in_celsius", "is_raining_today"}
    after = speculative.stats()
    num_taken = after.scheduler.accepted_tokens - before.scheduler.accepted_tokens
    assert num_taken > 0
    num_steps = after.engine.num_steps - before.engine.num_steps
    assert num_steps <= len(found.token_ids) - num_taken + 2
    beside = generate(speculative, ["Weather:", COPYING], params)
    assert beside[0].token_ids == expected.token_ids
