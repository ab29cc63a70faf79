"""Keys and values in 8 bits: the same tokens in every configuration and by every backend, and pages that
an engine of another dtype never finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_kernels.ops import Backend, LayerShape
from metal_kernels.reference import ReferenceBackend
from metal_kernels.x86.backend import X86Backend
from mlxserve import LLM, InvalidConfig, SamplingParams
from mlxserve.model import attention
from mlxserve.model.load import prepare
from tests.emulated import emulated_backend
from tests.model.coverage import rows
from tests.model.small_models import PROMPTS, Served, build
from tests.test_equality import prompts_of, tokens
from tests.together import begun_together

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
OPTIONS: Any = {"kv_cache_dtype": "q8", "page_size": 16, "disable_log_stats": True}
QUESTIONS = (
    "What is 17 + 25?",
    "Tell me a short story about a small boat, a lighthouse and a storm that came at night.",
)

Tokens = list[tuple[int, ...]]


def twice(llm: LLM) -> Tokens:
    """Two answers to each question: the second starts from a copy of the first one's last page."""
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    found = []
    for output in llm.chat(messages, replace(GREEDY, n=2), use_tqdm=False):
        assert [other.token_ids for other in output.alternatives] == [output.token_ids]
        found.append(output.token_ids)
    llm.check()
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "emulated kernels")],
)
def test_every_backend_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(backend: Backend) -> Tokens:
        def select(_name: str, layers: Sequence[LayerShape]) -> list[Backend]:
            assert all(layer.is_quantised for layer in layers)
            return [backend] * len(layers)

        monkeypatch.setattr(attention, "select_backends", select)
        with LLM(max_num_batched_tokens=20, max_num_seqs=4, num_pages=64, **OPTIONS) as llm:
            return twice(llm)

    other = ReferenceBackend() if name == "reference" else emulated_backend()
    assert answers(other) == answers(X86Backend())


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long) for kind in ("mlxserve-mini", "qwen3_next")]
    + ["gemma3_text"],
)
def test_no_configuration_changes_a_token(
    kind: str, model_folder: Callable[[str], Path], write_model: Callable[..., Path], tmp_path: Path
) -> None:
    if kind == "mlxserve-mini":
        folder = None
    elif kind == "qwen3_next":
        folder = str(write_model(tmp_path, kind))
    else:
        folder = str(model_folder(kind))
    prompts = prompts_of(vocabulary=500)[::2]
    with LLM(folder, num_pages=400, **OPTIONS) as llm:
        expected = [tokens(llm, [prompt])[0] for prompt in prompts]
        assert tokens(llm, prompts) == expected, "from the cache, in a batch"
        assert llm.stats().scheduler.prefix_hits > 0
        llm.resize_cache(40)
        llm.resize_cache(60)
        assert tokens(llm, prompts) == expected, "after the cache was resized"
    with LLM(folder, num_pages=400, max_num_batched_tokens=16, max_num_seqs=16, **OPTIONS) as llm:
        assert tokens(llm, prompts) == expected, "in chunks of one page"
    small = {"num_pages": 14, "num_state_slots": 40}
    with LLM(folder, **small, **OPTIONS) as llm, begun_together(len(prompts)):
        assert tokens(llm, prompts) == expected, "in a pool far too small"
        assert llm.stats().scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
def test_pages_on_disk_are_read_after_a_restart_and_never_by_another_dtype(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = str(model_folder("llama"))
    prompt = [random.Random(1).randrange(500) for _ in range(100)]
    disk = {"num_pages": 40, "disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}

    def answer(dtype: str) -> tuple[tuple[int, ...], int]:
        with LLM(folder, **{**OPTIONS, "kv_cache_dtype": dtype}, **disk) as llm:
            [found] = llm.generate([prompt], GREEDY, use_tqdm=False)
            llm.check()
        return found.token_ids, found.usage.cached_tokens

    cold, num_cached = answer("q8")
    assert num_cached == 0
    in_8_bits = {file.name for file in tmp_path.rglob("*.page")}
    assert len(in_8_bits) >= 6
    assert answer("q8") == (cold, 96)
    assert answer("auto")[1] == 0
    others = {file.name for file in tmp_path.rglob("*.page")} - in_8_bits
    assert len(others) >= 6, "no hash of one dtype is that of another"
    assert answer("auto")[1] == 96
    assert answer("q8") == (cold, 96)


def test_a_model_with_latents_is_refused(write_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(write_model(tmp_path, "glm4_moe_lite"))
    with pytest.raises(
        InvalidConfig, match=r"keeps latents .* leave kv_cache_dtype at auto"
    ) as error:
        LLM(folder, **OPTIONS)
    assert error.value.option == "kv_cache_dtype"


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"])
def test_latents_are_refused_by_one_sentence_however_they_are_attended_over(name: str) -> None:
    """The first two are served one sequence at a time, and choose among their positions."""
    loaded = prepare(*build(name, rows("mlx-lm")[name]["config"]), name)
    with pytest.raises(InvalidConfig, match=f"kv_cache_dtype=q8: {name} keeps latents instead of"):
        loaded.in_8_bits()


def test_keys_and_values_that_are_made_of_latents_at_once_are_stored_in_8_bits() -> None:
    """DeepSeek V2's, as mlx-lm defines it, though its configuration has a rank."""
    loaded = prepare(*build("deepseek_v2", rows("mlx-lm")["deepseek_v2"]["config"]), "small")
    assert loaded.in_8_bits().is_quantised


def test_a_model_that_is_served_one_sequence_at_a_time_works() -> None:
    loaded = prepare(*build("gpt_bigcode", rows("mlx-lm")["gpt_bigcode"]["config"]), "small")
    choice = attention.choose_attention("auto", loaded.in_8_bits())
    assert choice.loaded.by_sequence
    served = Served(choice)
    alone = [served.answers(prompt)[0] for prompt in PROMPTS]
    assert served.answers(*PROMPTS) == alone, "in a batch, from the cache"
