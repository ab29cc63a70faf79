"""One claim in every configuration: paging, batching, chunking, caching and preemption never
change a token. The oracle is mlx-lm's dense path, greedy, in float32."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxserve import LLM, SamplingParams
from mlxserve.hub.embedded import MODEL_NAME, model_path
from tests.conftest import ATTENDING, each_of
from tests.together import begun_together

pytestmark = pytest.mark.usefixtures("compiled")

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def prompts_of(vocabulary: int) -> list[list[int]]:
    """16 prompts: 8 share 70 tokens, 8 have various lengths around a page of 16."""
    draw = random.Random(7)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    shared = tokens(70)
    siblings = [shared + tokens(length) for length in (1, 3, 9, 10, 11, 26, 27, 40)]
    return siblings + [tokens(length) for length in (1, 15, 16, 17, 31, 33, 64, 100)]


def in_float32(folder: Path) -> Path:
    """The embedded model: on a Mac the engine keeps weights as they are stored, which are in bfloat16."""
    for file in model_path().iterdir():
        if file.suffix == ".safetensors":
            weights = {name: array.astype(mx.float32) for name, array in mx.load(str(file)).items()}
            mx.save_safetensors(str(folder / file.name), weights, metadata={"format": "mlx"})
        elif file.is_file():
            shutil.copy(file, folder / file.name)
    return folder


def dense_tokens(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    answers = []
    for prompt in prompts:
        cache, ids, answer = make_prompt_cache(model), mx.array([prompt]), []
        for _ in range(NUM_TOKENS):
            token = int(mx.argmax(model(ids, cache=cache)[0, -1].astype(mx.float32)))
            answer.append(token)
            ids = mx.array([[token]])
        answers.append(tuple(answer))
    return answers


def tokens(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.check()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "kind", [pytest.param(MODEL_NAME, marks=pytest.mark.slow), *each_of(ATTENDING)]
)
def test_greedy_tokens_are_the_dense_ones_in_every_configuration(
    kind: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = in_float32(tmp_path) if kind == MODEL_NAME else model_folder(kind)
    prompts = prompts_of(vocabulary=500)
    expected = dense_tokens(folder, prompts)
    path = str(folder)
    with LLM(path, num_pages=400, page_size=16, disable_log_stats=True) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
        assert alone == expected, "alone"
        assert tokens(llm, prompts) == expected, "from the cache, in a batch of 16"
        assert llm.reset_prefix_cache()
        assert tokens(llm, prompts) == expected, "in a batch of 16"
    with LLM(
        path,
        num_pages=400,
        page_size=16,
        max_num_batched_tokens=16,
        max_num_seqs=16,
        disable_log_stats=True,
    ) as llm:
        assert tokens(llm, prompts) == expected, "in chunks of one page"
    with LLM(path, num_pages=16, page_size=16, disable_log_stats=True) as llm:
        with begun_together(len(prompts)):
            assert tokens(llm, prompts) == expected, "in a pool far too small"
        assert llm.stats().scheduler.num_preemptions > 0
