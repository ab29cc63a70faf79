"""SmolLM2 answers with the tokens of mlx-lm's float32 path, however it is served.

mlx-lm computes with every weight dequantised to float32, this product with the file's own blocks;
`record.py` wrote what it answered, and by how much each token was ahead.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.hub.files import find_model
from mlxserve.text.tokenizer import Tokenizer
from tests.real.asking import GREEDY, PAGE_SIZE, tokens_of
from tests.real.prompts import NUM_LONG, SMOLLM2, TEXT, prompts
from tests.real.record import figures_of

pytestmark = pytest.mark.slow

REFERENCES = ("mlx-lm", "transformers", "llama.cpp")
CLEAR = 0.3  # logits by which llama.cpp's choice was ahead


def test_the_tokenizer_is_the_files_own(smollm2: Path) -> None:
    tokenizer = Tokenizer(find_model(str(smollm2)).path)
    for reference in REFERENCES:
        figures = figures_of(reference, SMOLLM2)
        assert tokenizer.encode(TEXT)[: len(figures["text_ids"])] == figures["text_ids"]
        lengths = [answer["num_prompt_tokens"] for answer in figures["answers"]]
        assert [len(tokenizer.encode(prompt)) for prompt in prompts()] == lengths


def test_greedy_tokens_are_mlx_lms_in_a_batch_and_from_the_cache(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    some = slice(0, -NUM_LONG, 2)  # of every length
    asked, wanted = prompts()[some], expected[some]
    assert tokens_of(llm, asked) == wanted, "in a batch"
    outputs = llm.generate(asked, replace(GREEDY, max_tokens=8), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:8] for tokens in wanted], (
        "from the cache"
    )
    long = [output.usage for output in outputs if output.usage.prompt_tokens > PAGE_SIZE]
    assert all(usage.cached_tokens for usage in long)


def test_llama_cpp_answers_the_same_as_far_as_its_choices_are_clear(
    expected: list[tuple[int, ...]],
) -> None:
    """It computes with activations in 8 bits, so a choice by a hair may be another one."""
    num_clear = 0
    for answer, wanted in zip(figures_of("llama.cpp", SMOLLM2)["answers"], expected, strict=True):
        pairs = zip(answer["tokens"], answer["leads"], strict=True)
        clear = [token for token, _ in takewhile(lambda pair: pair[1] > CLEAR, pairs)]
        assert tuple(clear) == wanted[: len(clear)]
        num_clear += len(clear)
    assert num_clear > 100


@pytest.mark.long
def test_greedy_tokens_are_mlx_lms_alone(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert llm.reset_prefix_cache()
    params = replace(GREEDY, max_tokens=8)
    some = slice(0, -NUM_LONG, 2)  # of every length
    for prompt, wanted in zip(prompts()[some], expected[some], strict=True):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.token_ids == wanted[:8]


@pytest.mark.long
def test_of_several_answers_each_is_the_same_and_seeds_differ(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    prompt = prompts()[0]
    [greedy] = llm.generate([prompt], replace(GREEDY, n=3), use_tqdm=False)
    assert [one.token_ids for one in (greedy, *greedy.alternatives)] == [expected[0]] * 3
    drawn = replace(GREEDY, n=3, temperature=1, seed=5, max_tokens=12)
    [first] = llm.generate([prompt], drawn, use_tqdm=False)
    [again] = llm.generate([prompt], drawn, use_tqdm=False)
    texts = [one.text for one in (first, *first.alternatives)]
    assert len(set(texts)) == 3
    assert [one.text for one in (again, *again.alternatives)] == texts


def test_a_structure_is_filled_with_sense(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        max_tokens=60,
        temperature=0,
        structure=Structure(StructureKind.JSON_SCHEMA, json.dumps(schema)),
    )
    question = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    [answer] = llm.chat(question, params, use_tqdm=False)
    assert json.loads(answer.text)["capital"] == "Paris"


def test_a_call_is_filled_with_sense(llm: LLM) -> None:
    """Its template has no tools, so they are refused in words; a schema of a call does the same."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    question = [{"role": "user", "content": "Call get_weather for the city of Paris."}]
    with pytest.raises(
        InvalidParameter, match="chat template of this model does not support tools"
    ):
        llm.chat(question, GREEDY, tools=[tool], use_tqdm=False)
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["get_weather", "send_mail"]},
            "arguments": {**parameters, "required": ["city"], "additionalProperties": False},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    structure = Structure(StructureKind.JSON_SCHEMA, json.dumps(schema))
    params = SamplingParams(max_tokens=60, temperature=0, structure=structure)
    [answer] = llm.chat(question, params, use_tqdm=False)
    call = json.loads(answer.text)
    assert call["name"] == "get_weather"
    assert "Paris" in call["arguments"]["city"]
