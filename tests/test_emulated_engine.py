"""The embedded model, its attention computed by the Metal kernels on the emulator, says what it
says with the reference: over chunked prefill, cache hits, a batch of 4, forks and a preemption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.kernels import Kernels, KernelSpec
from mlxserve import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
QUESTIONS = [
    "What is 17 + 25?",
    "Tell me a short story about a small boat, a lighthouse and a storm that came at night.",
    "Which of these is a fruit: a stone, an apple, a chair? Answer in one word, please.",
    "Count from one to five.",
]
OPTIONS = {"page_size": 16, "disable_log_stats": True}

Tokens = list[tuple[int, ...]]


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel ran; and that every one of them ran in float32."""
    counts: Counter[str] = Counter()
    real = Kernels.__call__

    def counting(self: Kernels, spec: KernelSpec, *args: Any, **kwargs: Any) -> list[mx.array]:
        counts[spec.name] += 1
        assert ("T", mx.float32) in args[2]
        return real(self, spec, *args, **kwargs)

    monkeypatch.setattr(Kernels, "__call__", counting)
    return counts


def conversations(llm: LLM, questions: Sequence[str]) -> Iterator[tuple[int, ...]]:
    messages = [[{"role": "user", "content": question}] for question in questions]
    for output in llm.chat(messages, GREEDY, use_tqdm=False):
        yield output.token_ids
    llm.check()


def forks(llm: LLM, questions: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Two answers to each at once: the second starts from a copy of the first one's last page."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    for output in llm.chat(messages, replace(GREEDY, n=2), use_tqdm=False):
        assert [other.token_ids for other in output.alternatives] == [output.token_ids]
        yield output.token_ids
    llm.check()


def answers(backend: str) -> dict[str, Tokens]:
    """By what the engine had to do for them."""
    found: dict[str, Tokens] = {}
    with LLM(num_pages=64, attention_backend=backend, **OPTIONS) as llm:
        found["one by one"] = [t for q in QUESTIONS for t in conversations(llm, [q])]
        hits = llm.stats().prefix_cache_hits
        found["from the cache, in a batch of 4"] = list(conversations(llm, QUESTIONS))
        assert llm.stats().prefix_cache_hits > hits
    with LLM(
        num_pages=64,
        attention_backend=backend,
        max_num_batched_tokens=20,
        max_num_seqs=4,
        **OPTIONS,
    ) as llm:
        found["in chunks beside decodes"] = list(conversations(llm, QUESTIONS))
        assert llm.stats().num_steps > len(QUESTIONS) + GREEDY.max_tokens
        found["each twice"] = list(forks(llm, QUESTIONS))
    with LLM(num_pages=9, attention_backend=backend, max_model_len=112, **OPTIONS) as llm:
        found["with a preemption"] = list(conversations(llm, QUESTIONS))
        assert llm.stats().num_preemptions > 0
    return found


@pytest.mark.slow
def test_the_emulated_kernels_say_what_the_reference_says(dispatched: Counter[str]) -> None:
    expected = answers("reference")
    assert not dispatched
    found = answers("emulator")
    for name, tokens in expected.items():
        assert found[name] == tokens, name
    assert len(set(map(tuple, found.values()))) == 1, "and none of it changes a token"
    assert set(dispatched) == {
        "copy_pages",
        "write_kv_pages",
        "write_kv_tokens",
        "paged_decode",
        "merge_partitions",
        "paged_prefill",
    }
