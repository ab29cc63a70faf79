"""SmolLM2 drafted by itself and from earlier text: how many guesses are accepted, and that the tokens stay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlxserve import LLM, SamplingParams
from mlxserve.hub.files import find_model
from mlxserve.hub.gguf.weights import load_gguf
from tests.assistants import always_drafting
from tests.drafting import accepted_share, similar_model, total_variation
from tests.real.prompts import QUESTIONS, TEXT, chat_of
from tests.together import begun_together

pytestmark = pytest.mark.long

PROMPTS = ["Once upon a time there was a small robot", "Three ways to save water at home are"]
PARAMS = SamplingParams(max_tokens=100, temperature=1.0, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=7)
OPTIONS: dict[str, Any] = {"num_pages": 200, "page_size": 16, "disable_log_stats": True}
# Questions, prose, and a text that has been there before, which earlier text drafts.
MIXED = [chat_of(QUESTIONS[0]), PROMPTS[0], TEXT[:300], TEXT[:400] + "\n\n" + TEXT[:60]]


@pytest.fixture(scope="module")
def whole(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a folder of float32 weights."""
    files, folder = find_model(str(smollm2)), tmp_path_factory.mktemp("smollm2")
    assert files.gguf is not None
    model = load_gguf(files.gguf, files.config, is_metal=False)
    if any(isinstance(module, nn.QuantizedLinear) for _, module in model.named_modules()):
        model = dequantize_model(model)
    for file in files.path.glob("*.json"):
        shutil.copy(file, folder)
    config = {key: value for key, value in files.config.items() if "quantization" not in key}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: array.astype(mx.float32) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def test_shared_noise_is_accepted_as_often_as_the_distributions_are_alike(
    whole: Path, tmp_path: Path
) -> None:
    """200 tokens at a temperature of 1.0: at least 0.9 of 1 - total variation, and 1.5 times other noise."""
    draft = similar_model(tmp_path / "draft", whole, bits=6)
    shared, ids = accepted_share(str(whole), PROMPTS, PARAMS, draft)
    own, others = accepted_share(str(whole), PROMPTS, PARAMS, draft, shares_noise=False)
    with LLM(str(whole), num_pages=80, page_size=16, disable_log_stats=True) as llm:
        plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.token_ids) for output in plain] == ids == others
    bound = 1 - total_variation(whole, draft, ids, 1.0)
    assert shared >= 0.9 * bound, (shared, bound)
    assert shared >= 1.5 * own, (shared, own)


@pytest.fixture(scope="module")
def undrafted(smollm2: Path) -> dict[bool, list[tuple[int, ...]]]:
    """Tokens of greedy answers (True) and sampled ones, and of the next turns after each."""
    with LLM(str(smollm2), **OPTIONS) as llm:
        return {is_greedy: turns(llm, is_greedy=is_greedy) for is_greedy in (True, False)}


def turns(llm: LLM, *, is_greedy: bool) -> list[tuple[int, ...]]:
    """Tokens of answers that run together, and of the turns after them, which continue cached pages."""
    params = GREEDY if is_greedy else SAMPLED
    with begun_together(len(MIXED)):
        first = llm.generate(MIXED, params, use_tqdm=False)
    again = [prompt + output.text + "\n" for prompt, output in zip(MIXED, first, strict=True)]
    outputs = [*first, *llm.generate(again, params, use_tqdm=False)]
    llm.check()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("source", ["itself", "earlier text"])
def test_tokens_of_a_real_model_are_those_without_drafts(
    source: str, is_greedy: bool, smollm2: Path, undrafted: dict[bool, list[tuple[int, ...]]]
) -> None:
    drafted: dict[str, Any] = {"speculative_tokens": 4}
    if source == "itself":
        drafted["draft_model"] = str(smollm2)
    with always_drafting(), LLM(str(smollm2), **OPTIONS, **drafted) as llm:
        assert turns(llm, is_greedy=is_greedy) == undrafted[is_greedy]
        stats = llm.stats().scheduler
    share = stats.accepted_tokens / stats.drafted_tokens
    assert stats.accepted_tokens > (200 if source == "itself" else 20), stats
    assert share > 0.9 or source != "itself", share
