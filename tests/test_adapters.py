"""Answers with an adapter are those of mlx-lm's own LoRALinear, whatever else the engine does. The oracle is
its dense path, greedy, in float32."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from mlxserve import LLM, AsyncLLM, InvalidConfig, InvalidParameter, SamplingParams
from mlxserve.build import build_text_model
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import UnsupportedModel
from tests.adapters import dense_tokens, train_adapter, write_adapter
from tests.conftest import ARCHITECTURES
from tests.oracle import MAX_TOKENS, Oracle
from tests.together import begun_together

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_pages": 200, "page_size": 16, "disable_log_stats": True}
Asked: TypeAlias = list[tuple[str | None, list[int]]]  # (adapter, prompt)


class Tuned:
    """A model, its adapters, and the right answers."""

    def __init__(self, base: Path, adapters: dict[str, Path], prompts: list[list[int]]) -> None:
        self.base = str(base)
        self.adapters = adapters
        self.prompts = prompts
        names: list[str | None] = [None, *adapters]
        self.asked: Asked = [(name, prompt) for prompt in prompts for name in names]
        found = {
            name: dense_tokens(base, name and adapters[name], prompts, NUM_TOKENS)  # type: ignore[arg-type]
            for name in names
        }
        self.expected = [found[name][at] for at in range(len(prompts)) for name in names]
        assert len({answers[0] for answers in found.values()}) == len(names), "they differ"


def prompts_of(*lengths: int) -> list[list[int]]:
    """They begin with the same tokens."""
    draw = random.Random(3)
    tokens = [draw.randrange(500) for _ in range(max(lengths))]
    return [[*tokens[: length - 1], length] for length in lengths]


@pytest.fixture(scope="module")
def tuned(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Three adapters of different ranks, scales and layers; one of them was trained."""
    base, folder = model_folder("llama"), tmp_path_factory.mktemp("adapters")
    adapters = {
        "trained": train_adapter(folder / "trained", base),
        "all": write_adapter(folder / "all", base, seed=1),
        "head": write_adapter(
            folder / "head",
            base,
            seed=2,
            rank=3,
            scale=7.0,
            num_layers=1,
            keys=("self_attn.v_proj", "model.embed_tokens"),
        ),
    }
    return Tuned(base, adapters, prompts_of(3, 40, 70))


def together(llm: AsyncLLM, asked: Asked, **options: Any) -> list[tuple[int, ...]]:
    async def answers() -> list[tuple[int, ...]]:
        outputs = await asyncio.gather(
            *(llm.generate(prompt, GREEDY, adapter=name, **options) for name, prompt in asked)
        )
        await llm.check()
        return [output.token_ids for output in outputs]

    return asyncio.run(answers())


@pytest.fixture
def load(tuned: Tuned) -> Iterator[Callable[..., AsyncLLM]]:
    loaded: list[AsyncLLM] = []

    def start(**options: Any) -> AsyncLLM:
        loaded.append(AsyncLLM(tuned.base, adapters=tuned.adapters, **{**OPTIONS, **options}))
        return loaded[-1]

    yield start
    for llm in loaded:
        llm.close()


@pytest.mark.slow
def test_an_adapter_answers_as_mlx_lm_alone_cached_and_beside_others(
    tuned: Tuned, load: Callable[..., AsyncLLM]
) -> None:
    llm = load()
    alone = [together(llm, [one])[0] for one in tuned.asked]
    assert alone == tuned.expected, "alone"
    assert together(llm, tuned.asked) == tuned.expected, "from the cache, all in one batch"
    assert asyncio.run(llm.reset_prefix_cache())
    assert together(llm, tuned.asked) == tuned.expected, "all in one batch"


def test_an_adapter_answers_as_mlx_lm_in_chunks_of_a_page_and_preempted(
    tuned: Tuned, load: Callable[..., AsyncLLM]
) -> None:
    llm = load(max_num_batched_tokens=16, max_num_seqs=16, num_pages=14)
    with begun_together(len(tuned.asked)):
        assert together(llm, tuned.asked) == tuned.expected
    assert llm.stats().scheduler.num_preemptions > 0


def test_drafts_and_choices_keep_the_adapter(tuned: Tuned, load: Callable[..., AsyncLLM]) -> None:
    llm = load(speculative_tokens=4)
    repeated = [(name, prompt * 2) for name, prompt in tuned.asked[4:8]]
    expected = [
        dense_tokens(Path(tuned.base), name and tuned.adapters[name], [prompt], NUM_TOKENS)[0]  # type: ignore[arg-type]
        for name, prompt in repeated
    ]
    assert together(llm, repeated) == expected
    twice = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, n=2)
    name, prompt = tuned.asked[5]
    output = asyncio.run(llm.generate(prompt, twice, adapter=name))
    assert [output.token_ids, output.alternatives[0].token_ids] == 2 * [tuned.expected[5]]


def test_pages_are_shared_within_an_adapter_and_not_across(
    tuned: Tuned, load: Callable[..., AsyncLLM]
) -> None:
    llm, prompt = load(), tuned.prompts[2]

    def num_cached(name: str | None) -> int:
        return asyncio.run(llm.generate(prompt, GREEDY, adapter=name)).usage.cached_tokens

    names = [None, *tuned.adapters]
    assert [num_cached(name) for name in names] == [0, 0, 0, 0]
    assert all(num_cached(name) >= 64 for name in names)


def test_a_named_prefix_belongs_to_its_adapter(
    tuned: Tuned, load: Callable[..., AsyncLLM], tmp_path: Path
) -> None:
    kept = {"disk_cache_size": 0.1, "disk_cache_dir": str(tmp_path)}
    llm, prompt = load(**kept), tuned.prompts[2]
    asyncio.run(llm.add_prefix("p", prompt[:64], adapter="all"))
    assert llm.list_prefixes() == {}
    assert llm.list_prefixes(adapter="all") == {"p": 64}
    output = asyncio.run(llm.generate(prompt[64:], GREEDY, adapter="all", prefix_name="p"))
    assert (output.token_ids, output.usage.cached_tokens) == (tuned.expected[10], 64)
    llm.close()
    again = load(**kept)
    asyncio.run(again.restore_prefixes())
    assert again.list_prefixes(adapter="all") == {"p": 64}
    assert again.list_prefixes(adapter="head") == {}


@pytest.mark.slow
def test_pages_of_adapters_are_found_on_disk_after_a_restart(tuned: Tuned, tmp_path: Path) -> None:
    """By the digest of the weights: other ones under the same name find none, and the model alone finds its
    own, which are those of before there were adapters."""
    options = {**OPTIONS, "disk_cache_size": 0.1, "disk_cache_dir": str(tmp_path)}

    def run(adapters: dict[str, Path], asked: Asked) -> tuple[list[tuple[int, ...]], list[int]]:
        with LLM(tuned.base, adapters=adapters, **options) as llm:
            outputs = [
                llm.generate([prompt], GREEDY, adapter=name, use_tqdm=False)[0]
                for name, prompt in asked
            ]
        return [o.token_ids for o in outputs], [o.usage.cached_tokens for o in outputs]

    asked, expected = tuned.asked[8:], tuned.expected[8:]
    assert run({}, asked[:1]) == (expected[:1], [0])
    assert run(tuned.adapters, asked) == (expected, [64, 0, 0, 0])
    assert run(tuned.adapters, asked) == (expected, [64, 64, 64, 64])
    renamed = {"other": tuned.adapters["all"], "all": tuned.adapters["head"]}
    found, cached = run(renamed, [("other", asked[2][1]), ("all", asked[3][1])])
    assert (found, cached) == (expected[2:], [64, 64])


@pytest.fixture
def chat(tuned: Tuned) -> Iterator[TextModel]:
    given = tuple(f"{name}={folder}" for name, folder in tuned.adapters.items())
    chat = build_text_model(EngineConfig().with_options(model=tuned.base, adapter=given, **OPTIONS))
    yield chat
    chat.close()


def test_texts_are_embedded_and_scored_with_the_adapter(tuned: Tuned, chat: TextModel) -> None:
    prompt = tuned.prompts[1]

    async def vectors() -> list[list[float]]:
        names = None, "all", "head", "all"
        parts = [chat.with_adapter(name).vectors for name in names]
        return [vector for part in parts for vector in await part.embed([prompt])]

    base, every, head, again = asyncio.run(vectors())
    assert every == again
    assert len({tuple(vector) for vector in (base, every, head)}) == 3
    [logprobs, of_base] = [
        asyncio.run(chat.with_adapter(name).writer.score([*prompt, *tuned.expected[6]], num_top=1))
        for name in ("all", None)
    ]
    chosen = [one.top[0][0] for one in logprobs[-NUM_TOKENS:]]
    assert tuple(chosen) == tuned.expected[6]
    assert [one.logprob for one in of_base] != [one.logprob for one in logprobs]


# What differs in kind is in the slow suite, the rest in the long one.
MARKS = {
    "qwen3_moe": (),
    **dict.fromkeys(("qwen3_next", "deepseek_v3", "deepseek_v32"), pytest.mark.slow),
}
KINDS = [
    pytest.param(kind, marks=MARKS.get(kind, pytest.mark.long))
    for kind in ARCHITECTURES
    if kind != "llama"
]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_every_kind_of_layer_answer_as_mlx_lm(
    kind: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Experts, recurrent layers, latent attention, and one sequence at a time."""
    base = model_folder(kind)
    adapters = {
        "one": write_adapter(tmp_path / "one", base, seed=1),
        "two": write_adapter(tmp_path / "two", base, seed=2, rank=3, scale=9.0, num_layers=2),
    }
    tuned = Tuned(base, adapters, prompts_of(5, 75))
    llm = AsyncLLM(tuned.base, adapters=adapters, speculative_tokens=MAX_TOKENS, **OPTIONS)
    oracle = Oracle()  # its drafts are wrong for the others
    oracle.learn_answers(tuned.prompts, None, tuned.expected[1::3])
    try:
        assert together(llm, tuned.asked) == tuned.expected
        assert together(llm, tuned.asked) == tuned.expected, "from the cache"
        with oracle.drafting():
            assert together(llm, tuned.asked) == tuned.expected, "with drafts"
        assert any(accepted > 0 for _, accepted in oracle.accepted)
    finally:
        llm.close()


# ---- what is refused


def test_an_unknown_adapter_is_refused_by_its_name(
    tuned: Tuned, load: Callable[..., AsyncLLM]
) -> None:
    llm = load()
    with pytest.raises(
        InvalidParameter, match=r"adapter: 'no' is not loaded\. Loaded: trained, all"
    ):
        together(llm, [("no", [1, 2, 3])])


def test_an_adapter_of_another_model_is_refused(
    tuned: Tuned, model_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedModel, match="all was trained from another model than"):
        LLM(str(model_folder("qwen2")), adapters={"all": tuned.adapters["all"]}, **OPTIONS)


def test_an_adapter_of_layers_that_the_model_lacks_is_refused(
    tuned: Tuned, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", model_folder("qwen3_moe"), seed=1)
    with pytest.raises(UnsupportedModel, match=r"changes model\.layers.*no such layer"):
        LLM(tuned.base, adapters={"a": adapter}, **OPTIONS)


def test_adapters_are_given_by_name_and_folder() -> None:
    for given in [("a",), ("=b",), ("a=",), ("a:b=c",), ("a=b", "a=c")]:
        with pytest.raises(InvalidConfig, match="adapter"):
            LLM(adapter=given)
