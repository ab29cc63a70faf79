"""SmolLM2 answers with the tokens of mlx-lm's float32 path, however it is served.

mlx-lm computes with every weight dequantised to float32, this product with the file's own blocks;
`record.py` wrote what it answered, and by how much each token was ahead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.build import build_part
from mlxserve.errors import InvalidParameter
from mlxserve.hub.files import find_model
from mlxserve.sampling_params import Structure, StructureKind
from mlxserve.text.tokenizer import Tokenizer
from tests.perf.kv_dtype import config_of, predict
from tests.real.prompts import NUM_TOKENS, TEXT, prompts
from tests.real.record import PERPLEXITY_TOKENS, figures_of

pytestmark = pytest.mark.slow

SMOLLM2 = "smollm2-135m-instruct.q4_1"
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
PAGE_SIZE = 32
REFERENCES = {"mlx-lm": 2e-4, "transformers": 2e-4}  # how close its perplexity must be
NUM_LONG = 4  # the last prompts, of 1,200 to 6,000 tokens


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return [tuple(answer["tokens"]) for answer in figures_of("mlx-lm", SMOLLM2)["answers"]]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Any:
    with LLM(str(smollm2), num_pages=400, page_size=PAGE_SIZE, disable_log_stats=True) as llm:
        yield llm


def tokens_of(llm: LLM, asked: Sequence[str]) -> list[tuple[int, ...]]:
    outputs = llm.generate(list(asked), GREEDY, use_tqdm=False)
    llm.check()
    return [output.token_ids for output in outputs]


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
    asked, wanted = prompts()[:-NUM_LONG], expected[:-NUM_LONG]
    assert tokens_of(llm, asked) == wanted, "in a batch of 16"
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == wanted, "from the cache"
    long = [output.usage for output in outputs if output.usage.prompt_tokens > PAGE_SIZE]
    assert all(usage.cached_tokens for usage in long)


def test_greedy_tokens_are_mlx_lms_alone(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert llm.reset_prefix_cache()
    params = replace(GREEDY, max_tokens=8)
    for prompt, wanted in zip(prompts()[:-NUM_LONG], expected, strict=False):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.token_ids == wanted[:8]


def test_greedy_tokens_are_mlx_lms_after_up_to_6000_tokens(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    asked, wanted = prompts()[-NUM_LONG:], expected[-NUM_LONG:]
    assert [tokens_of(llm, [prompt])[0] for prompt in asked] == wanted, "each from those before it"
    assert tokens_of(llm, asked) == wanted, "from the cache, in a batch"


def test_of_several_answers_each_is_the_same_and_seeds_differ(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    prompt = prompts()[0]
    [greedy] = llm.generate([prompt], replace(GREEDY, n=3), use_tqdm=False)
    assert [one.token_ids for one in (greedy, *greedy.alternatives)] == [expected[0]] * 3
    drawn = replace(GREEDY, n=3, temperature=1, seed=5)
    [first] = llm.generate([prompt], drawn, use_tqdm=False)
    [again] = llm.generate([prompt], drawn, use_tqdm=False)
    texts = [one.text for one in (first, *first.alternatives)]
    assert len(set(texts)) == 3
    assert [one.text for one in (again, *again.alternatives)] == texts


def test_greedy_tokens_stay_when_drafted_preempted_and_cut_in_pages(
    smollm2: Path, expected: list[tuple[int, ...]]
) -> None:
    # Eight, of which the last two have 242 and 508 tokens.
    asked, wanted = prompts()[8:-NUM_LONG], expected[8:-NUM_LONG]
    settings: dict[str, dict[str, Any]] = {
        "drafted": {"num_pages": 400, "speculative_tokens": 4},
        "in chunks of a page": {
            "num_pages": 400,
            "max_num_batched_tokens": PAGE_SIZE,
            "max_num_seqs": PAGE_SIZE,
        },
        "preempted": {"num_pages": 24},
    }
    for name, options in settings.items():
        with LLM(str(smollm2), page_size=PAGE_SIZE, disable_log_stats=True, **options) as llm:
            assert tokens_of(llm, asked) == wanted, name
            stats = llm.stats().scheduler
            assert (name == "preempted") == (stats.num_preemptions > 0)


@pytest.mark.usefixtures("unhurried_disk")
def test_a_restart_finds_the_pages_on_disk(
    smollm2: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    asked, wanted = prompts()[14:16], expected[14:16]
    options: dict[str, Any] = {
        "num_pages": 200,
        "page_size": PAGE_SIZE,
        "disk_cache_size": 1,
        "disk_cache_dir": str(tmp_path),
        "disable_log_stats": True,
    }
    with LLM(str(smollm2), **options) as llm:
        assert tokens_of(llm, asked) == wanted
    with LLM(str(smollm2), **options) as llm:
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == wanted
        assert all(
            output.usage.cached_tokens > output.usage.prompt_tokens // 2 for output in outputs
        )
        assert llm.stats().disk.num_read > 0


def test_perplexity_is_the_references_and_in_8_bits_a_little_more(smollm2: Path) -> None:
    ids = Tokenizer(find_model(str(smollm2)).path).encode(TEXT)[:PERPLEXITY_TOKENS]
    found = {}
    for dtype in ("auto", "q8"):
        part = build_part(config_of(str(smollm2), dtype, len(ids)), find_model(str(smollm2)), None)
        found[dtype] = math.exp(predict(part, ids).losses.mean())
    for reference, tolerance in REFERENCES.items():
        assert found["auto"] == pytest.approx(
            figures_of(reference, SMOLLM2)["perplexity"], rel=tolerance
        )
    assert found["q8"] == pytest.approx(found["auto"], rel=0.005)


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
