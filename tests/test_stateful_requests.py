"""What a request can ask for works where layers keep recurrent states, as it does for all models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve import LLM, SamplingParams
from mlxserve.core.sampling_params import Structure, StructureKind
from tests.conftest import STATEFUL, each_of
from tests.test_equality import GREEDY, NUM_TOKENS, dense_tokens, prompts_of, tokens

Folder = Callable[[str], Path]
Answers = Sequence[tuple[int, ...]]

PROMPTS = prompts_of(vocabulary=500)[::3]


@pytest.fixture(scope="module", params=each_of(STATEFUL))
def folder(request: pytest.FixtureRequest, model_folder: Folder) -> Path:
    return model_folder(request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    return dense_tokens(folder, PROMPTS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options = {"num_pages": 64, "page_size": 16, "max_num_seqs": 4, "disable_log_stats": True}
    with LLM(str(folder), **options) as llm:
        yield llm


def test_logprobs_are_those_of_the_dense_path(llm: LLM, folder: Path) -> None:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    prompt = PROMPTS[0]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)
    assert llm.reset_prefix_cache()
    for _ in range(2):  # computed, and from a snapshot
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.logprobs is not None
        for number, entry in enumerate(output.logprobs):
            ids = mx.array([[*prompt, *output.token_ids[:number]]])
            logits = np.array(model(ids)[0, -1].astype(mx.float32), np.float64)
            exact = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert entry.logprob == pytest.approx(exact[entry.token_id], abs=2e-3)
            assert [token for token, _ in entry.top] == np.argsort(-exact)[:2].tolist()


def test_a_structure_is_followed_beside_answers_without_one(llm: LLM, expected: Answers) -> None:
    pattern = "([a-c][d-f]{2,4};){3}"
    guided = SamplingParams(
        max_tokens=60, temperature=0, structure=Structure(StructureKind.REGEX, pattern)
    )
    alone = llm.generate([PROMPTS[1]], guided, use_tqdm=False)[0].text
    assert re.fullmatch(pattern, alone)
    both = llm.generate([PROMPTS[1], PROMPTS[2]], [guided, GREEDY], use_tqdm=False)
    assert both[0].text == alone
    assert both[1].token_ids == expected[2]


def test_a_stopped_answer_leaves_states_that_others_go_on_from(llm: LLM, expected: Answers) -> None:
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        stop = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, stop_token_ids=(answer[5],)
        )
        [stopped] = llm.generate([prompt], stop, use_tqdm=False)
        end = answer.index(answer[5])
        assert stopped.token_ids[:end] == answer[:end]
        assert len(stopped.token_ids) <= end + 1
    assert tokens(llm, PROMPTS) == list(expected)


def test_an_aborted_answer_changes_no_other(llm: LLM, expected: Answers) -> None:
    long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    for prompt in PROMPTS:
        deltas = llm.stream(prompt, long)
        assert list(islice(deltas, 3))
        deltas.close()  # type: ignore[attr-defined]
    assert tokens(llm, PROMPTS) == list(expected)
    assert llm.stats().scheduler.num_running == 0


@pytest.mark.long
def test_a_request_of_a_higher_class_goes_first_and_both_answers_are_right(
    folder: Path, expected: Answers
) -> None:
    """The pool has pages for one of the two, so that the first is computed again, from a state."""
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    options = {"num_pages": 22, "page_size": 16, "max_model_len": 320, "disable_log_stats": True}
    with LLM(str(folder), **options) as llm:
        deltas = llm.stream(PROMPTS[0], long, priority=5)
        found = list(next(deltas).token_ids)
        [urgent] = llm.generate([PROMPTS[1]], long, priority=-1, use_tqdm=False)
        assert urgent.token_ids[:NUM_TOKENS] == expected[1]
        found += [token for delta in deltas for token in delta.token_ids]
        assert tuple(found[:NUM_TOKENS]) == expected[0]
        assert len(found) == 200
        assert llm.generate([PROMPTS[0]], long, use_tqdm=False)[0].token_ids == tuple(found)
        assert llm.stats().scheduler.num_preemptions > 0
        llm.check()


@pytest.mark.usefixtures("unhurried_disk")
def test_states_and_pages_are_read_from_disk_after_a_restart(
    folder: Path, tmp_path: Path, expected: Answers
) -> None:
    options = {"num_pages": 64, "page_size": 16, "max_num_seqs": 4, "disable_log_stats": True}
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}
    prompt = max(PROMPTS, key=len)
    wanted = expected[PROMPTS.index(prompt)]
    for is_first in (True, False):
        with LLM(str(folder), **options, **disk) as llm:
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            llm.check()
            num_restored = llm.stats().states.num_restored
        assert output.token_ids == wanted
        assert output.usage.cache is not None
        num_full = (len(prompt) - 1) // 16 * 16
        assert output.usage.cache.num_from_disk == (0 if is_first else num_full)
        assert num_restored == (not is_first)


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
def test_what_is_lost_on_disk_is_computed(folder: Path, tmp_path: Path, expected: Answers) -> None:
    options = {"num_pages": 64, "page_size": 16, "max_num_seqs": 4, "disable_log_stats": True}
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}
    prompt = max(PROMPTS, key=len)
    for _ in range(2):
        with LLM(str(folder), **options, **disk) as llm:
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            llm.check()
        assert output.token_ids == expected[PROMPTS.index(prompt)]
        assert output.usage.cached_tokens == 0
        for file in tmp_path.rglob("*73.page"):  # states: the hash, and an "s"
            file.write_bytes(file.read_bytes()[:-1])
