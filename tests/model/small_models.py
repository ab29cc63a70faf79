"""Small models with random weights, of every definition of mlx-lm and mlx-vlm, and what they answer."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.errors import in_one_line
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.model import definitions
from mlxserve.model.attention import AttentionChoice, choose_attention
from mlxserve.model.load import prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Request
from mlxserve.scheduler.scheduler import Scheduler

PAGE_SIZE, NUM_PAGES = 16, 64
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
# The prompts of plamo3 see one position more than its single tokens do, and mlx-lm's own answers then
# depend on how a prompt is cut.
CONTRADICTS_ITSELF = ("plamo3",)
_MAX_PARAMETERS = 30_000_000

_DRAW = random.Random(5)
_SHARED = [_DRAW.randrange(400) for _ in range(40)]
PROMPTS = [_SHARED + [7] * 7, _SHARED + [9] * 12, _SHARED[:19], [3] * 20 + _SHARED]

Dense = Callable[[list[int]], list[int]]


class NotBuilt(Exception):
    """The library itself cannot build or run the definition here."""


def build(name: str, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(mlx-lm's model with random float32 weights, its config)."""
    module = importlib.import_module(f"mlx_lm.models.{name.split('.')[0]}")
    model = module.Model(module.ModelArgs.from_dict(config))
    randomise(model)
    return model, {**config, "max_position_embeddings": 512}


def build_of_mlx_vlm(config: dict[str, Any]) -> tuple[Any, Dense]:
    """(the model as it is served, mlx-vlm's own answers). Raises NotBuilt."""
    try:
        found = definitions.definition_of(config)
        model = found.model(found.arguments.from_dict(config))
        whole = found.arguments.module.Model(found.arguments.from_dict(config))
    except definitions.NotText as error:
        raise NotBuilt(str(error)) from error
    except ImportError as error:
        raise NotBuilt(f"needs the package {error.name!r}") from error
    assert sum(array.size for _, array in tree_flatten(model.parameters())) < _MAX_PARAMETERS
    randomise(model)
    text = whole.language_model
    text.update(model.language_model.parameters())

    def answer(prompt: list[int]) -> list[int]:
        """As mlx-vlm generates: a prompt by its embeddings, then token after token."""
        cache, found = model.make_cache(), []
        ids = mx.array([prompt])
        features = whole.get_input_embeddings(ids, None).to_dict()
        given = {name: value for name, value in features.items() if value is not None}
        logits = text(ids, cache=cache, **given).logits
        for _ in range(NUM_TOKENS):
            found.append(int(mx.argmax(logits[0, -1]).item()))
            logits = text(mx.array([[found[-1]]]), cache=cache).logits
        return found

    return model, answer


def randomise(model: Any) -> None:
    """Give it weights that are the same in every run."""
    mx.random.seed(1)

    def drawn(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.random.normal(array.shape)
        return noise * 0.3 + 1.0 if array.ndim <= 1 else noise * array.shape[-1] ** -0.5

    model.update(tree_map(drawn, model.parameters()))
    mx.eval(model.parameters())


def dense_answer(model: Any, prompt: list[int]) -> list[int]:
    """By mlx-lm's own path."""
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
        pool = PagePool(NUM_PAGES, PAGE_SIZE)
        ends = [StateSlots(64, pool)] if loaded.states else []
        scheduler = Scheduler(config, pool, ends=ends)
        self.engine = Engine(scheduler, ModelRunner(loaded, kv), StepTimeModel(None))

    def answers(self, *prompts: list[int]) -> list[list[int]]:
        added = self.engine.add_all([Request(str(i), ids, GREEDY) for i, ids in enumerate(prompts)])
        while self.engine.has_work:
            self.engine.step()
        self.engine.check()
        return [list(request.token_ids[request.num_prompt :]) for request in added]


def served(library: str, name: str, config: dict[str, Any]) -> str:
    """How a definition is served, after its greedy tokens were those of its library.

    Raises UnsupportedModel, NotBuilt, and AssertionError.
    """
    try:
        if library == "mlx-lm":
            model, config = build(name, config)
            expected = [dense_answer(model, prompt) for prompt in PROMPTS]
        else:
            model, answer = build_of_mlx_vlm(config)
            expected = [answer(prompt) for prompt in PROMPTS]
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{library} itself fails on text alone: {in_one_line(error)}") from error
    choice = choose_attention("auto", prepare(model, config, name))
    how = "by sequence" if choice.loaded.by_sequence else "rows"
    if name in CONTRADICTS_ITSELF:
        return how
    in_pages = Served(choice, max_num_batched_tokens=PAGE_SIZE)
    assert [in_pages.answers(prompt)[0] for prompt in PROMPTS] == expected, "in one-page chunks"
    together = Served(choice)
    assert together.answers(*PROMPTS) == expected, "in a batch"
    before = together.engine.monitor.stats().scheduler.prefix_hits
    assert together.answers(*PROMPTS) == expected, "from the cache"
    assert together.engine.monitor.stats().scheduler.prefix_hits - before >= 3 * PAGE_SIZE
    return how
