"""The embedded model gives the same tokens with the emulated Metal kernels as with plain mlx.

Over chunked prefill, cache hits, a batch of 4, forks and a preemption.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.kernels import (
    ALL,
    COOPERATIVE_PREFILL,
    DRAFT_DECODE,
    GATHER_PAGES,
    GROUPED_DECODE,
    GROUPED_DRAFTS,
    PAGED_LATENT,
    QMV_ROWS,
    QUANTISE_KV,
    REPLAY_DELTA,
    REPLAY_SSM,
    ROTATE_AND_WRITE,
    WRITE_KV_PAGES,
    WRITE_KV_TOKENS,
    Kernel,
    KernelSpec,
)
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend, LayerShape
from metal_kernels.x86.backend import X86Backend
from mlxserve import LLM, SamplingParams
from mlxserve.model import attention
from tests.emulated import emulated_factory
from tests.test_equality import dense_tokens, prompts_of, tokens
from tests.together import begun_together

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=70)
QUESTIONS = [
    "What is 17 + 25?",
    "Tell me a short story about a small boat, a lighthouse and a storm that came at night.",
    "Which of these is a fruit: a stone, an apple, a chair? Answer in one word, please.",
    "Count from one to five.",
]
OPTIONS = {"page_size": 16, "disable_log_stats": True}
# Of the included model's float32 heads none are copied; it has no latents, small groups, and its dtype is stored.
# There are no neural accelerators. Nothing is drafted, no weights are quantised, and no layer is recurrent.
UNUSED = {
    COOPERATIVE_PREFILL,
    DRAFT_DECODE,
    GATHER_PAGES,
    GROUPED_DECODE,
    GROUPED_DRAFTS,
    PAGED_LATENT,
    QMV_ROWS,
    QUANTISE_KV,
    REPLAY_DELTA,
    REPLAY_SSM,
}

Tokens = list[tuple[int, ...]]


class CountingFactory:
    """Emulated kernels; counts how often each is dispatched, and requires float32."""

    def __init__(self) -> None:
        self.dispatches: Counter[str] = Counter()
        self._make = emulated_factory()

    def __call__(self, spec: KernelSpec, source: str) -> Kernel:
        kernel = self._make(spec, source)

        def dispatch(**arguments: Any) -> list[mx.array]:
            self.dispatches[spec.name] += 1
            assert ("T", mx.float32) in arguments["template"]
            return kernel(**arguments)

        return dispatch


def conversations(
    llm: LLM, questions: Sequence[str], params: SamplingParams = GREEDY
) -> Iterator[tuple[int, ...]]:
    messages = [[{"role": "user", "content": question}] for question in questions]
    for output in llm.chat(messages, params, use_tqdm=False):
        yield output.token_ids
    llm.check()


def forks(llm: LLM, questions: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Two answers to each at once: the second starts from a copy of the first one's last page."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    for output in llm.chat(messages, replace(GREEDY, n=2), use_tqdm=False):
        assert [other.token_ids for other in output.alternatives] == [output.token_ids]
        yield output.token_ids
    llm.check()


def answers() -> dict[str, Tokens]:
    """Tokens by what the engine had to do."""
    found: dict[str, Tokens] = {}
    with LLM(num_pages=64, **OPTIONS) as llm:
        found["one by one"] = [t for q in QUESTIONS for t in conversations(llm, [q])]
        hits = llm.stats().scheduler.prefix_hits
        found["from the cache, in a batch of 4"] = list(conversations(llm, QUESTIONS))
        assert llm.stats().scheduler.prefix_hits > hits
    with LLM(num_pages=64, max_num_batched_tokens=20, max_num_seqs=4, **OPTIONS) as llm:
        found["in chunks next to decodes"] = list(conversations(llm, QUESTIONS))
        assert llm.stats().engine.num_steps > len(QUESTIONS) + GREEDY.max_tokens
        found["each twice"] = list(forks(llm, QUESTIONS))
    with LLM(num_pages=9, max_model_len=112, **OPTIONS) as llm:
        with begun_together(len(QUESTIONS)):
            found["with a preemption"] = list(conversations(llm, QUESTIONS, LONG))
        assert llm.stats().scheduler.num_preemptions > 0
    return found


def give(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
    """Give the layers of models these backends in turns."""

    def select(_name: str, layers: Sequence[LayerShape]) -> list[Backend]:
        return list(itertools.islice(itertools.cycle(backends), len(layers)))

    monkeypatch.setattr(attention, "select_backends", select)


@pytest.mark.usefixtures("on_a_cpu")  # weights become float32
def test_layers_on_kernels_and_on_plain_mlx_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second answer that copies a page, next to a chunk; the pool's memory grows."""

    def tokens() -> Tokens:
        with LLM(max_num_batched_tokens=20, max_num_seqs=4, num_pages=64, **OPTIONS) as llm:
            return list(forks(llm, QUESTIONS[:2]))

    expected = tokens()
    factory = CountingFactory()
    give(monkeypatch, MetalBackend(factory), X86Backend())
    with caplog.at_level(logging.INFO, "mlxserve"):
        assert tokens() == expected
    assert re.search(r"attention by metal \(\d layers\) and cpu \(\d layers\)", caplog.text)
    unused = UNUSED | {ROTATE_AND_WRITE}  # layers are fused where all are on kernels
    assert set(factory.dispatches) == {spec.name for spec in ALL if spec not in unused}


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_emulated_kernels_give_the_tokens_that_plain_mlx_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = answers()
    factory = CountingFactory()
    give(monkeypatch, MetalBackend(factory))
    found = answers()
    for name, wanted in expected.items():
        assert found[name] == wanted, name
    begun = {tuple(tokens[: GREEDY.max_tokens] for tokens in each) for each in found.values()}
    assert len(begun) == 1, "the configuration changed a token"
    unused = UNUSED | {WRITE_KV_PAGES, WRITE_KV_TOKENS}
    assert set(factory.dispatches) == {spec.name for spec in ALL if spec not in unused}


# Every kind of layer with attention, in head dimensions that the kernels take.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"head_dim": 64},
    "lfm2": {"hidden_size": 256, "block_dim": 256},
    "falcon_h1": {"head_dim": 64},
    "gemma4_text": {"head_dim": 64, "global_head_dim": 128},
    "glm4_moe_lite": {"kv_lora_rank": 256, "qk_rope_head_dim": 64},
}


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if number else pytest.mark.slow)
        for number, kind in enumerate(KINDS)
    ],
)
def test_states_latents_and_shared_keys_beside_emulated_kernels(
    kind: str, write_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, kind, **KINDS[kind])
    prompts = prompts_of(vocabulary=500)[::3]
    expected = dense_tokens(folder, prompts)
    factory = CountingFactory()
    give(monkeypatch, MetalBackend(factory))
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "num_pages": 11, **OPTIONS}
    with LLM(str(folder), **options) as llm:
        for _ in range(2):  # the second from the cache
            with begun_together(len(prompts)):
                assert tokens(llm, prompts) == expected
        assert llm.stats().scheduler.num_preemptions > 0
    assert factory.dispatches
