"""Drafts over recurrent states, right and wrong ones, give the tokens of undrafted decode."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta

from metal_kernels.replay import PlainReplay, ReplayOps
from mlxserve import LLM, SamplingParams, engine_part
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.model import replay_choice
from mlxserve.model.draft_rows import use_draft_rows
from mlxserve.model.load import LoadedModel
from tests.conftest import STATEFUL, each_of
from tests.emulated import emulated_backend
from tests.metal_kernels.mlx_recurrences import emulated_recurrences
from tests.model import coverage
from tests.model.small_models import build
from tests.oracle import MAX_TOKENS, Oracle
from tests.test_emulated_engine import give
from tests.together import begun_together

NUM_TOKENS = 28  # of an answer
PAGE = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "page_size": PAGE,
    "num_pages": 200,
    "num_state_slots": 80,
    "disable_log_stats": True,
}
DRAFTED = {**OPTIONS, "speculative_tokens": MAX_TOKENS}

ARCHITECTURES = (
    *("falcon_h1", "gear", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2"),
    *("nemotron_h", "qwen3_5", "qwen3_next", "rwkv7"),
)
Tokens = tuple[int, ...]
Prompts = Sequence[Sequence[int]]

_DRAW = random.Random(7)
_SHARED = [_DRAW.randrange(400) for _ in range(40)]
PROMPTS = [
    _SHARED[: 40 if number % 2 else 20] + [_DRAW.randrange(400) for _ in range(5 + 4 * number)]
    for number in range(4)
]


def answers(llm: LLM, prompts: Prompts, params: SamplingParams) -> list[Tokens]:
    """Of prompts that run together."""
    with begun_together(len(prompts)):
        outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    llm.check()
    return [output.token_ids for output in outputs]


def next_turns(found: Sequence[Tokens]) -> Prompts:
    return [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(PROMPTS, found, strict=True)]


def write_covered(write_model: Callable[..., Path], folder: Path, name: str) -> Path:
    """Write the model of an architecture that kernels take."""
    mx.random.seed(5)
    model, config = build(name, coverage.rows("mlx-lm")[name]["config"])
    write_model(folder, "lfm2")  # its tokenizer
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


class Expected(NamedTuple):
    """Undrafted decode of prompts that run together, and of the next turns after them."""

    answers: list[Tokens]
    next_answers: list[Tokens]
    num_cached: list[int]  # tokens of each next turn


Undrafted = Callable[[str, SamplingParams], tuple[Path, Expected]]


@pytest.fixture(scope="module")
def undrafted(
    write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Undrafted:
    """A function that writes a small model of an architecture, and decodes without drafts, once for each of both."""
    folders: dict[str, Path] = {}
    found: dict[tuple[str, int | None], Expected] = {}

    def decoded(name: str, params: SamplingParams) -> tuple[Path, Expected]:
        if name not in folders:
            write = write_model if name in STATEFUL else partial(write_covered, write_model)
            folders[name] = write(tmp_path_factory.mktemp(name), name)
        key = name, params.seed
        if key not in found:
            found[key] = decode(folders[name], params)
        return folders[name], found[key]

    return decoded


def decode(folder: Path, params: SamplingParams) -> Expected:
    with LLM(str(folder), **OPTIONS) as llm:
        found = answers(llm, PROMPTS, params)
        outputs = llm.generate(next_turns(found), params, use_tqdm=False)
    next_answers = [output.token_ids for output in outputs]
    return Expected(found, next_answers, [output.usage.cached_tokens for output in outputs])


@contextmanager
def oracle_of(expected: Expected, params: SamplingParams) -> Iterator[None]:
    """Let engines draft from the answers of undrafted decode, mostly."""
    oracle = Oracle()
    oracle.learn_answers(PROMPTS, params.seed, expected.answers)
    turns = next_turns(expected.answers)
    oracle.learn_answers(turns, params.seed, expected.next_answers)
    with oracle.drafting():
        yield
    numbers = oracle.accepted
    assert any(0 < accepted < drafted for drafted, accepted in numbers), "partly right"
    assert any(accepted == 0 for _, accepted in numbers), "wrong at once"
    assert any(accepted == drafted > 3 for drafted, accepted in numbers), "right"


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, marks=pytest.mark.long), SEEDED], ids=["greedy", "top-p"]
)
@pytest.mark.parametrize("name", each_of(ARCHITECTURES))
def test_tokens_are_those_of_undrafted_decode(
    name: str, params: SamplingParams, undrafted: Undrafted
) -> None:
    folder, expected = undrafted(name, params)
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 48}
    with oracle_of(expected, params), LLM(str(folder), **DRAFTED, **sizes) as llm:
        alone = [answers(llm, [prompt], params)[0] for prompt in PROMPTS]
        assert alone == expected.answers, "alone"
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS, params) == expected.answers, "staggered"
        outputs = llm.generate(next_turns(expected.answers), params, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected.next_answers, "next turns"
        assert [output.usage.cached_tokens for output in outputs] == expected.num_cached
        llm.resize_cache(80)
        assert answers(llm, PROMPTS, params) == expected.answers, "resized"
        assert llm.stats().states.num_restored > 0
        assert llm.stats().scheduler.accepted_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
@pytest.mark.parametrize("name", each_of(ARCHITECTURES))
def test_tokens_are_the_same_where_pages_are_short_and_after_a_restart(
    name: str, mode: str, undrafted: Undrafted, tmp_path: Path
) -> None:
    folder, expected = undrafted(name, SEEDED)
    disk: dict[str, Any] = {}
    if mode == "swap":
        disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_size": 0.1}
    sizes = {"num_pages": 11, "num_state_slots": 40, "preemption_mode": mode, "growth_pages": 0}
    with oracle_of(expected, SEEDED):
        with LLM(str(folder), **{**DRAFTED, **sizes, **disk}) as llm:
            assert answers(llm, PROMPTS, SEEDED) == expected.answers
            assert llm.stats().scheduler.num_preemptions > 0
        for _ in range(2 if disk else 0):
            with LLM(str(folder), **{**DRAFTED, **disk}) as llm:
                turns = next_turns(expected.answers)
                assert answers(llm, turns, SEEDED) == expected.next_answers
                num_restored = llm.stats().scheduler.restored_tokens
        assert not disk or num_restored > 0, "from disk"


PATTERN = "(temperature: [0-9]{2} degrees; ){3}"
REQUESTS = {
    "logprobs": replace(GREEDY, logprobs=3),
    "penalties": replace(SEEDED, frequency_penalty=0.5, repetition_penalty=1.2),
    "two answers": replace(SEEDED, n=2),
    "structure": replace(
        SEEDED, structure=Structure(StructureKind.REGEX, PATTERN), ignore_eos=False, max_tokens=60
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in ("gear", "qwen3_next"))],
)
def test_what_a_request_asks_for_is_the_same(name: str, undrafted: Undrafted) -> None:
    folder, _ = undrafted(name, SEEDED)
    prompts = PROMPTS[:2]
    with LLM(str(folder), **OPTIONS) as plain, LLM(str(folder), **DRAFTED) as llm:
        for kind, params in REQUESTS.items():
            oracle, before = Oracle(), llm.stats().scheduler.accepted_tokens
            expected = plain.generate(prompts, params, use_tqdm=False)
            oracle.learn_answers(prompts, params.seed, [one.token_ids for one in expected])
            with oracle.drafting():
                found = llm.generate(prompts, params, use_tqdm=False)
            llm.check()
            assert llm.stats().scheduler.accepted_tokens > before, kind
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids == other.token_ids, kind
                assert [each.token_ids for each in one.alternatives] == [
                    each.token_ids for each in other.alternatives
                ]
                for logprob, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
                    assert logprob.logprob == pytest.approx(wanted.logprob, abs=1e-4)


# Whose states are of kinds that rows of drafts compute together.
TOGETHER = ("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "qwen3_5", "qwen3_next")  # fmt: skip


@contextmanager
def rows_together(ops: ReplayOps) -> Iterator[None]:
    """Let models compute all rows of drafts in one call, as on a Mac where that is faster."""

    def take(loaded: LoadedModel, *_: object) -> LoadedModel:
        use_draft_rows(loaded.model)
        return replace(loaded, replay=ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_part, "with_replay", take)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", each_of(TOGETHER))
def test_rows_together_give_the_tokens_of_undrafted_decode(name: str, undrafted: Undrafted) -> None:
    folder, expected = undrafted(name, SEEDED)
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 48}
    with oracle_of(expected, SEEDED), rows_together(PlainReplay()):
        with LLM(str(folder), **DRAFTED, **sizes) as llm:
            alone = [answers(llm, [prompt], SEEDED)[0] for prompt in PROMPTS]
            assert alone == expected.answers, "alone"
            assert llm.reset_prefix_cache()
            assert answers(llm, PROMPTS, SEEDED) == expected.answers, "staggered"
            outputs = llm.generate(next_turns(expected.answers), SEEDED, use_tqdm=False)
            assert [output.token_ids for output in outputs] == expected.next_answers, "next turns"
            assert [output.usage.cached_tokens for output in outputs] == expected.num_cached
            assert llm.stats().states.num_restored > 0
            assert llm.stats().scheduler.accepted_tokens > 100
        short = {"num_pages": 11, "num_state_slots": 40, "growth_pages": 0}
        with LLM(str(folder), **{**DRAFTED, **short}) as llm:
            assert answers(llm, PROMPTS, SEEDED) == expected.answers, "short of pages"
            assert llm.stats().scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(n, marks=pytest.mark.long) for n in ("kimi_linear", "mamba2"))],
)
def test_the_emulated_kernels_give_the_tokens_of_undrafted_decode(
    name: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder, params = write_covered(write_model, tmp_path, name), replace(GREEDY, max_tokens=16)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = answers(llm, PROMPTS, params)
    oracle = Oracle()
    oracle.learn_answers(PROMPTS, params.seed, expected)
    ops = emulated_backend().replay
    with oracle.drafting(), rows_together(ops), LLM(str(folder), **DRAFTED) as llm:
        assert answers(llm, PROMPTS, params) == expected
        assert llm.stats().scheduler.accepted_tokens > 20


@pytest.mark.slow
def test_a_trial_with_a_macs_kernels_takes_rows_together(
    write_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Single rows by mlx-lm's kernels, rows of drafts by ours, attention by ours: all of them emulated."""
    folder, params = (
        write_covered(write_model, tmp_path, "qwen3_next"),
        replace(GREEDY, max_tokens=16),
    )

    def with_replay(loaded: LoadedModel, *others: Any) -> LoadedModel:
        return replay_choice.with_replay(
            loaded, *others, seconds=lambda tried, *_: 2.0 if tried.replay is None else 1.0
        )

    give(monkeypatch, emulated_backend())
    monkeypatch.setattr(gated_delta, "gated_delta_ops", gated_delta.gated_delta_kernel)
    monkeypatch.setattr(engine_part, "with_replay", with_replay)
    oracle = Oracle()
    with emulated_recurrences(), caplog.at_level(logging.INFO, "mlxserve.replay"):
        with LLM(str(folder), **OPTIONS) as llm:
            expected = answers(llm, PROMPTS[:2], params)
        assert "rows of" not in caplog.text, "nothing is tried without drafts"
        oracle.learn_answers(PROMPTS[:2], params.seed, expected)
        with oracle.drafting(), LLM(str(folder), **DRAFTED) as llm:
            assert answers(llm, PROMPTS[:2], params) == expected
            assert llm.stats().scheduler.accepted_tokens > 10
    assert "rows of drafts are one call of recurrent layers" in caplog.text
