"""Every architecture of mlx-lm that can be built small: greedy tokens are those of its dense path.

`architectures.json` has a small configuration of each (their shapes follow mlx-lm's own model tests) and
whether its rows are computed together or one sequence at a time.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.config import SchedulerConfig
from mlxserve.engine.engine import Engine
from mlxserve.engine.pace import Pace
from mlxserve.model.attention import AttentionChoice, choose_attention
from mlxserve.model.load import prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Request
from mlxserve.sampling_params import SamplingParams
from mlxserve.scheduler.scheduler import Scheduler

ARCHITECTURES = json.loads(Path(__file__).with_name("architectures.json").read_text())
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "models.md"
PAGE_SIZE, NUM_PAGES = 16, 64
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
# The prompts of plamo3 see one position more than its single tokens do, and mlx-lm's own answers then
# depend on how a prompt is cut.
CONTRADICTS_ITSELF = ("plamo3",)

_DRAW = random.Random(5)
_SHARED = [_DRAW.randrange(400) for _ in range(40)]
PROMPTS = [_SHARED + [7] * 7, _SHARED + [9] * 12, _SHARED[:19], [3] * 20 + _SHARED]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """(a model with random float32 weights, its config)."""
    config = ARCHITECTURES[name]["config"]
    module = importlib.import_module(f"mlx_lm.models.{name.split('.')[0]}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))

    def drawn(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.random.normal(array.shape)
        return noise * 0.3 + 1.0 if array.ndim <= 1 else noise * array.shape[-1] ** -0.5

    model.update(tree_map(drawn, model.parameters()))
    mx.eval(model.parameters())
    return model, {**config, "max_position_embeddings": 512}


def dense_answer(model: Any, prompt: list[int]) -> list[int]:
    cache, ids, answer = make_prompt_cache(model), mx.array([prompt]), []
    for _ in range(NUM_TOKENS):
        token = int(mx.argmax(model(ids, cache=cache)[0, -1]).item())
        answer.append(token)
        ids = mx.array([[token]])
    return answer


class Served:
    """An engine over a model in memory."""

    def __init__(self, choice: AttentionChoice, **options: Any) -> None:
        loaded = choice.loaded
        kv = KVPool(loaded.layers, NUM_PAGES, PAGE_SIZE, choice.backends)
        config = SchedulerConfig(max_model_len=512, max_num_seqs=4, **options)
        slots = 64 if loaded.states else None
        scheduler = Scheduler(config, PagePool(NUM_PAGES, PAGE_SIZE), slots)
        self.engine = Engine(scheduler, ModelRunner(loaded, kv), Pace(None))

    def answers(self, *prompts: list[int]) -> list[list[int]]:
        added = self.engine.add_all([Request(str(i), ids, GREEDY) for i, ids in enumerate(prompts)])
        while self.engine.has_work:
            self.engine.step()
        self.engine.check()
        return [list(request.token_ids[request.num_prompt :]) for request in added]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_greedy_tokens_are_those_of_the_dense_path(name: str) -> None:
    model, config = build(name)
    expected = [dense_answer(model, prompt) for prompt in PROMPTS]
    choice = choose_attention("auto", prepare(model, config, name))
    assert choice.loaded.by_sequence == (ARCHITECTURES[name]["served"] == "by sequence")
    if name in CONTRADICTS_ITSELF:
        return
    in_pages = Served(choice, max_num_batched_tokens=PAGE_SIZE)
    assert [in_pages.answers(prompt)[0] for prompt in PROMPTS] == expected, "in one-page chunks"
    served = Served(choice)
    assert served.answers(*PROMPTS) == expected, "in a batch"
    before = served.engine.stats().scheduler.prefix_hits
    assert served.answers(*PROMPTS) == expected, "from the cache"
    assert served.engine.stats().scheduler.prefix_hits - before >= 3 * PAGE_SIZE


def test_no_architecture_is_left_out_without_a_reason() -> None:
    """All modules of mlx-lm that define a model, but for those listed here."""
    left_out = {
        "bitnet": "calls Metal kernels of its own",
        "muse_spark": "calls Metal kernels of its own",
        "phi3small": "its answers depend on how a prompt is cut: refused",
        "deepseek_v41": "keeps a kind of cache of its own: refused",
        "olmo": "needs a package of its own",
    }
    models = importlib.import_module("mlx_lm.models")
    [folder] = models.__path__
    defined = {
        path.stem
        for path in Path(folder).glob("*.py")
        if "class ModelArgs" in path.read_text(encoding="utf-8")
    }
    known = {name.split(".")[0] for name in ARCHITECTURES}
    assert defined - known == left_out.keys() & defined


@pytest.mark.parametrize(
    ("served", "heading"),
    [("rows", "All rows of a step at once"), ("by sequence", "One sequence at a time")],
)
def test_the_documentation_lists_what_is_compared(served: str, heading: str) -> None:
    text = DOCUMENTATION.read_text(encoding="utf-8")
    listed = text.split(f"**{heading}**: ")[1].split("\n\n")[0]
    names = {name.split(".")[0] for name, one in ARCHITECTURES.items() if one["served"] == served}
    assert set(re.findall(r"`([^`]+)`", listed)) == names
