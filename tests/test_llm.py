"""The library as its users call it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxserve import (
    LLM,
    AssistantTurn,
    AsyncLLM,
    EngineConfig,
    EngineStopped,
    FinishReason,
    InvalidConfig,
    InvalidParameter,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    SamplingParams,
    Structure,
    StructureKind,
    ToolChoice,
    UnknownPrefix,
)
from mlxserve.api.metrics import Metrics, metrics_page
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.output_stream import OutputStream
from mlxserve.request import Request
from tests.together import begun_together

OPTIONS: Any = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(
        str(model_folder("qwen3")), num_pages=128, page_size=16, disable_log_stats=True
    ) as built:
        yield built


def test_one_prompt_or_many_of_text_or_of_tokens(llm: LLM) -> None:
    (one,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    texts = llm.generate(["Hello", "World"], GREEDY, use_tqdm=False)
    tokens = llm.generate([[1, 2], [3], [1, 2]], GREEDY, use_tqdm=False)
    assert texts[0].token_ids == one.token_ids
    assert tokens[0].token_ids == tokens[2].token_ids
    assert [len(output.token_ids) for output in (one, *texts, *tokens)] == [6] * 6
    assert one.finish_reason is FinishReason.LENGTH
    assert one.finish_reason == "length"
    assert one.logprobs is None
    assert llm.generate([], GREEDY) == []


def test_suppressed_tokens_that_a_model_does_not_have_do_not_fail_its_requests(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder("qwen3"), tmp_path / "suppressing"))
    generation = {"suppress_tokens": [5, 10**6], "temperature": 0.5, "top_k": -1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with LLM(str(folder), num_pages=8, page_size=16, disable_log_stats=True) as built:
        assert built.default_params == SamplingParams(temperature=0.5, logit_bias={5: -1e4})
        [output] = built.generate([[1, 2]], replace(built.default_params, max_tokens=2))
        assert output.finish_reason is not None


def test_an_answer_has_its_minimum_of_tokens_and_then_ends(llm: LLM) -> None:
    end = 7
    params = [
        SamplingParams(
            n=2, min_tokens=minimum, max_tokens=20, logit_bias={end: 1e4}, stop_token_ids=(end,)
        )
        for minimum in (0, 1, 5, 20)
    ]
    outputs = llm.generate(["Hello"] * 4, params, use_tqdm=False)
    for output, minimum in zip(outputs, (0, 1, 5, 20), strict=True):
        for answer in (output, *output.alternatives):
            assert len(answer.token_ids) == min(minimum + 1, 20)
            assert end not in answer.token_ids[:minimum]
            assert answer.finish_reason == ("length" if minimum == 20 else "stop")


@pytest.mark.parametrize("length", [40, 48, 49])  # a tail of half a page, of all but one, none
def test_n_answers_are_those_of_n_requests_with_their_seeds(llm: LLM, length: int) -> None:
    prompt = [(7 * i + length) % 90 for i in range(length)]
    params = SamplingParams(n=4, seed=11, **OPTIONS)
    before = llm.stats().engine.prefill_tokens
    (answer,) = llm.generate([prompt], params, use_tqdm=False)
    num_prefilled = llm.stats().engine.prefill_tokens - before
    alone = [
        llm.generate([prompt], SamplingParams(seed=11 + number, **OPTIONS), use_tqdm=False)[0]
        for number in range(4)
    ]
    together = [answer, *answer.alternatives]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in together}) == 4
    assert num_prefilled == length + 3
    llm.check()


def test_a_stream_is_of_one_answer(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="n: must be 1"):
        list(llm.stream("Hello", SamplingParams(n=2)))


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    (one,) = llm.chat(hello, GREEDY, use_tqdm=False)
    several = llm.chat([hello, hello], GREEDY, use_tqdm=False)
    assert [output.token_ids for output in several] == [one.token_ids] * 2
    raw = llm.generate("Hello", GREEDY, use_tqdm=False)[0]
    assert one.usage.prompt_tokens > raw.usage.prompt_tokens


def test_a_stream_is_the_same_answer_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("Once", GREEDY, use_tqdm=False)
    deltas = list(llm.stream("Once", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(t for delta in deltas for t in delta.token_ids) == whole.token_ids
    assert deltas[-1].usage is not None


def test_leaving_a_stream_early_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.generate("after", GREEDY, use_tqdm=False)
    llm.check()
    assert llm.stats().engine.request_success["abort"] >= 1


def test_params_can_differ_by_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 4)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [1, 4]
    with pytest.raises(InvalidParameter, match="2 for 1"):
        llm.generate(["a"], params, use_tqdm=False)


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    other = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, ignore_eos=True)
    (alone,) = llm.generate("seeded", params, use_tqdm=False)
    batch = llm.generate(["x", "seeded", "y"], [other, params, other], use_tqdm=False)
    assert batch[1].token_ids == alone.token_ids
    (elsewhere,) = llm.generate(
        "seeded", SamplingParams(max_tokens=12, seed=8, ignore_eos=True), use_tqdm=False
    )
    assert elsewhere.token_ids != alone.token_ids


def test_logprobs_come_one_per_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert output.logprobs is not None
    assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.token_id  # greedy takes the best
        assert math.isclose(entry.top[0][1], entry.logprob, abs_tol=1e-6)
        assert sorted(entry.top, key=lambda pair: -pair[1]) == list(entry.top)


def test_four_requests_with_one_long_prefix_hold_its_pages_once(
    model_folder: Callable[[str], Path],
) -> None:
    prefix = list(range(20, 20 + 16 * 20))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(
        str(model_folder("llama")), num_pages=40, page_size=16, disable_log_stats=True
    ) as small:
        outputs = small.generate([[*prefix, n] for n in range(4)], params, use_tqdm=False)
        stats = small.stats()
    # 20 shared pages and 2 for each request's own: apart they would need 88, and there are 40.
    assert stats.scheduler.num_preemptions == 0
    assert sorted(output.usage.cached_tokens for output in outputs) == [0, 320, 320, 320]


# ---- more than there is memory for

CROWD = [[n, *range(30, 50)] for n in range(8)]
LONG = SamplingParams(max_tokens=44, temperature=0, ignore_eos=True)
SMALL: Any = {"num_pages": 9, "page_size": 16, "disable_log_stats": True}


@pytest.fixture(scope="module")
def answers(model_folder: Callable[[str], Path]) -> list[tuple[int, ...]]:
    """The answers to CROWD from a cache that has room for all of them."""
    folder = str(model_folder("llama"))
    with LLM(folder, num_pages=200, page_size=16, disable_log_stats=True) as roomy:
        outputs = roomy.generate(CROWD, LONG, use_tqdm=False)
        assert roomy.stats().scheduler.num_preemptions == 0
    return [output.token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
def test_three_times_more_demand_than_pages_is_served_in_both_modes(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    answers: list[tuple[int, ...]],
    mode: str,
) -> None:
    demand = sum(-(-(len(prompt) + 44) // 16) for prompt in CROWD)
    assert demand > 3 * SMALL["num_pages"]
    folder = str(model_folder("llama"))
    options = {**SMALL, "disable_log_stats": False, "log_stats_interval": 1e-6}
    caplog.set_level("INFO", "mlxserve.engine")
    with LLM(folder, preemption_mode=mode, disk_cache_dir=str(tmp_path), **options) as tight:
        with begun_together(len(CROWD)):
            outputs = tight.generate(CROWD, LONG, use_tqdm=False)
        tight.check()
        stats = tight.stats()
        page = bytes(metrics_page([Metrics(tight.model_name, tight.stats)]).body).decode()
    assert [output.token_ids for output in outputs] == answers
    assert stats.scheduler.num_preemptions > 0
    assert stats.pool.num_used == 0
    if mode == "swap":
        assert stats.scheduler.restored_tokens > 0
    for counter in ("num_preemptions", "recomputed_tokens", "swapped_tokens", "restored_tokens"):
        value = float(getattr(stats.scheduler, counter))
        assert re.search(rf"^mlxserve:{counter}_total{{[^}}]*}} {value}$", page, re.MULTILINE)
    last_line = [r.message for r in caplog.records if "Prompt throughput" in r.message][-1]
    assert last_line.endswith(f", preemptions since the start: {stats.scheduler.num_preemptions}")
    said = [re.sub(r"Request \S+ is", "Request 7 is", r.message) for r in caplog.records]
    for number in range(1, stats.scheduler.num_preemptions + 1, 50):
        warning = (
            f"Request 7 is preempted by PreemptionMode.{mode.upper()} mode because there is not "
            "enough KV cache space. This can affect the end-to-end performance. Increase "
            "gpu_memory_utilization or tensor_parallel_size, or decrease max_num_seqs or "
            "max_num_batched_tokens. "
            f"total_cumulative_preemption_cnt={number}"
        )
        # A victim without a full page of its own has nothing to swap.
        assert warning in said or warning.replace("SWAP", "RECOMPUTE") in said


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda content: None,
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "changed": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "of another format": lambda content: b"mlxpage1" + content[8:],
}


@pytest.mark.parametrize(
    "damage",
    [
        "changed",
        *(pytest.param(d, marks=pytest.mark.slow) for d in [*DAMAGES, "foreign"] if d != "changed"),
    ],
)
@pytest.mark.usefixtures("unhurried_disk")
def test_damaged_pages_on_disk_change_no_answer(
    model_folder: Callable[[str], Path], tmp_path: Path, damage: str
) -> None:
    folder, prompt = str(model_folder("llama")), [5] * 100
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}
    with LLM(folder, **disk, **SMALL) as before:
        [wanted] = before.generate([prompt], LONG, use_tqdm=False)
    files = sorted(tmp_path.rglob("*.page"))
    assert len(files) >= 6
    contents = [file.read_bytes() for file in files]
    for number, file in enumerate(files):
        if damage == "foreign":
            file.write_bytes(contents[number - 1])
        elif (content := DAMAGES[damage](contents[number])) is None:
            file.unlink()
        else:
            file.write_bytes(content)
    with LLM(folder, **disk, **SMALL) as after:
        [found] = after.generate([prompt], LONG, use_tqdm=False)
        after.check()
    assert found.token_ids == wanted.token_ids
    assert found.usage.cached_tokens == 0


@pytest.mark.usefixtures("unhurried_disk")
def test_what_was_computed_is_read_from_disk_after_a_restart(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, prompt = str(model_folder("llama")), [5] * 100
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path)}
    with LLM(folder, **disk, **SMALL) as before:
        [wanted] = before.generate([prompt], LONG, use_tqdm=False)
    with LLM(folder, **disk, **SMALL) as after:
        [found] = after.generate([prompt], LONG, use_tqdm=False)
        [other] = after.generate([prompt], LONG, use_tqdm=False, cache_salt="mine")
        stats = after.stats()
        assert after.reset_prefix_cache(disk=True)
        after.check()  # and the stats are those after the reset
        assert after.stats().disk.num_pages == 0
        [again] = after.generate([prompt], LONG, use_tqdm=False)
    assert found.token_ids == other.token_ids == again.token_ids == wanted.token_ids
    assert found.usage.cached_tokens == 96
    assert found.usage.cache is not None
    assert found.usage.cache.num_from_disk == 96
    assert other.usage.cached_tokens == again.usage.cached_tokens == 0
    assert (stats.disk.num_read, stats.disk.num_lost) == (6, 0)
    with LLM(folder, **disk, **{**SMALL, "page_size": 32}) as larger:
        [found] = larger.generate([prompt], LONG, use_tqdm=False)
    assert found.token_ids == wanted.token_ids
    assert found.usage.cached_tokens == 0  # pages of another size are other pages


def test_usage_says_where_a_prompt_differs_from_what_was_cached(llm: LLM) -> None:
    prompt = [3] * 200
    llm.generate([prompt], GREEDY, use_tqdm=False)
    [output] = llm.generate([[*prompt[:150], *[4] * 50]], GREEDY, use_tqdm=False)
    report = output.usage.cache
    assert report is not None
    assert report.num_tokens == output.usage.cached_tokens > 0
    assert report.differs_at == 150
    assert report.reason == "new_text"


def test_named_prefixes_are_prepended_and_cached(llm: LLM) -> None:
    text = "A long text that many prompts begin with, again and again. " * 6
    llm.add_prefix("terms", text)
    (output,) = llm.generate("And then?", GREEDY, prefix_name="terms", use_tqdm=False)
    assert output.usage.cached_tokens > 0
    assert output.usage.cached_tokens >= llm.list_prefixes()["terms"] - 16
    llm.add_prefix("persona", [{"role": "system", "content": "You are a pirate. " * 8}])
    (output,) = llm.chat(
        [{"role": "user", "content": "Hello"}], GREEDY, prefix_name="persona", use_tqdm=False
    )
    assert output.usage.cached_tokens > 0
    with pytest.raises(UnknownPrefix, match="persona, terms"):
        llm.generate("x", GREEDY, prefix_name="nobody", use_tqdm=False)
    llm.remove_prefix("terms")
    llm.remove_prefix("persona")
    assert llm.list_prefixes() == {}


def test_several_prefixes_are_added_in_one_call_or_none(llm: LLM) -> None:
    texts = {f"p{number}": f"{number} is a number. " * 12 for number in range(3)}
    llm.add_prefixes(texts)
    assert llm.list_prefixes().keys() == texts.keys()
    for name in texts:
        (output,) = llm.generate("And?", GREEDY, prefix_name=name, use_tqdm=False)
        assert output.usage.cached_tokens > 0
    with pytest.raises(PromptTooLong):
        llm.add_prefixes({"p0": texts["p0"], "new": "text", "long": [5] * 100_000})
    assert llm.list_prefixes().keys() == texts.keys()
    for name in texts:
        llm.remove_prefix(name)


def test_a_prefix_named_under_another_salt_is_warned_of_once(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm.add_prefix("rules", "Answer in one word, please. " * 12, cache_salt="a")
    options = {"prefix_name": "rules", "use_tqdm": False}
    (same,) = llm.generate("And?", GREEDY, **options)
    assert same.usage.cached_tokens > 0
    assert not caplog.records
    (other,) = llm.generate("And?", GREEDY, cache_salt="b", **options)
    assert other.usage.cached_tokens == 0
    assert other.usage.cache is not None
    assert other.usage.cache.reason == "other_salt"
    llm.generate("And?", GREEDY, cache_salt="c", **options)
    (record,) = caplog.records
    assert "names the prefix 'rules', but has another cache_salt" in record.getMessage()
    llm.remove_prefix("rules")


def test_the_page_a_prefix_ends_in_is_copied_or_computed_again_for_the_same_answers(
    model_folder: Callable[[str], Path],
) -> None:
    prefix = [20 + n * n % 300 for n in range(57)]  # 3 pages, and 9 tokens
    questions = [[5, 6, 7], [8], [9, 10]]
    answers, computed = {}, {}
    for tail in ("copy", "recompute"):
        with LLM(
            str(model_folder("llama")),
            num_pages=40,
            page_size=16,
            page_tail=tail,
            disable_log_stats=True,
        ) as llm:
            cold = llm.generate([[*prefix, *q] for q in questions], GREEDY, use_tqdm=False)
            assert llm.reset_prefix_cache()
            llm.add_prefix("p", prefix)
            before = llm.stats().engine.prefill_tokens
            named = llm.generate(questions, GREEDY, prefix_name="p", use_tqdm=False)
            named += llm.generate([prefix[:48]], GREEDY, use_tqdm=False)
            computed[tail] = llm.stats().engine.prefill_tokens - before
            llm.check()
        answers[tail] = [output.token_ids for output in named]
        assert answers[tail][:3] == [output.token_ids for output in cold]
    assert answers["copy"] == answers["recompute"]
    # What follows the prefix, and one token of the prompt that is cached whole.
    assert computed["copy"] == 3 + 1 + 2 + 1
    assert computed["recompute"] == computed["copy"] + 3 * 9 + 15


def test_request_options_reach_the_engine_and_the_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    submit = AsyncEngine.submit

    async def watched(engine: AsyncEngine, requests: Sequence[Request]) -> OutputStream:
        seen.extend((request.priority, request.client) for request in requests)
        return await submit(engine, requests)

    monkeypatch.setattr(AsyncEngine, "submit", watched)

    def cached(**options: Any) -> int:
        (output,) = llm.generate([[9] * 100], GREEDY, use_tqdm=False, **options)
        return output.usage.cached_tokens

    assert cached(cache_salt="a", client="ann") == cached(cache_salt="b", priority=2) == 0
    assert cached(cache_salt="a", priority=-1) == 96
    llm.add_prefix("nines", [9] * 100, cache_salt="c")
    assert cached(cache_salt="c") == 99
    assert cached(prefix_name="nines") == 100
    llm.remove_prefix("nines")
    assert seen[:3] == [(0, "ann"), (2, ""), (-1, "")]


@pytest.mark.parametrize(
    "option", [{"priority": "high"}, {"priority": True}, {"client": None}, {"cache_salt": b"a"}]
)
def test_an_invalid_request_option_is_refused(llm: LLM, option: Any) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(option))):
        llm.generate("x", GREEDY, use_tqdm=False, **option)
    with pytest.raises(TypeError, match="salt"):
        llm.generate("x", GREEDY, use_tqdm=False, salt="a")


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ("", InvalidRequest),
        ([[]], InvalidRequest),
        ([[1] * 600], PromptTooLong),
        (["fine", [1] * 600], PromptTooLong),
        ([["a"]], InvalidParameter),
        ([7], InvalidParameter),
    ],
)
def test_an_invalid_prompt_is_an_error_and_the_next_prompt_works(
    llm: LLM, prompts: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].token_ids) == 6


def test_a_lone_surrogate_is_the_replacement_character(llm: LLM) -> None:
    def ids(half: str) -> list[tuple[int, ...]]:
        said = [{"role": "user", "content": f"a{half}"}]
        outputs = llm.generate(f"a{half}", GREEDY, use_tqdm=False, cache_salt=half)
        outputs += llm.chat(said, GREEDY, use_tqdm=False)
        return [output.token_ids for output in outputs]

    assert ids("\ud83d") == ids("\ufffd")


@pytest.mark.parametrize(
    "messages", [[], [{}], [{"content": "no role"}], "text", [[{"role": "user"}, "x"]]]
)
def test_invalid_messages_are_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(messages, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_an_engine_that_cannot_be_built_is_an_error_that_says_why(
    model_folder: Callable[[str], Path],
) -> None:
    folder = str(model_folder("llama"))
    with pytest.raises(InvalidConfig, match="page_size"):
        LLM(folder, page_size=7)
    with pytest.raises(InvalidConfig, match=r"max_model_len=4096.*512"):
        LLM(folder, max_model_len=4096)
    with pytest.raises(InvalidConfig, match="needs 32 pages of 16"):
        LLM(folder, max_model_len=512, num_pages=8, page_size=16)
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens.*enable_chunked_prefill"):
        LLM(folder, enable_chunked_prefill=False, max_num_batched_tokens=100, num_pages=64)
    with pytest.raises(ModelNotFound, match="nowhere"):
        LLM("/nowhere/at/all")
    with pytest.raises(InvalidConfig, match=r"no option 'max_num_seq'\. Did you mean max_num_seqs"):
        LLM(folder, max_num_seq=3)


def test_options_change_a_config_that_is_given(model_folder: Callable[[str], Path]) -> None:
    config = EngineConfig(num_pages=64, page_size=16, disable_log_stats=True)
    with LLM(str(model_folder("llama")), config=config, num_pages=8) as llm:
        assert llm.max_model_len == 8 * 16


def test_a_closed_llm_raises_engine_stopped(model_folder: Callable[[str], Path]) -> None:
    llm = LLM(str(model_folder("llama")), num_pages=8, disable_log_stats=True)
    llm.close()
    llm.close()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate("x", use_tqdm=False)


def test_a_batch_larger_than_the_queue_is_submitted_as_the_queue_empties(
    model_folder: Callable[[str], Path],
) -> None:
    with LLM(
        str(model_folder("llama")), num_pages=32, max_num_waiting=2, disable_log_stats=True
    ) as llm:
        outputs = llm.generate(
            [[n] for n in range(30)],
            SamplingParams(max_tokens=2, ignore_eos=True),
            use_tqdm=False,
        )
    assert [len(output.token_ids) for output in outputs] == [2] * 30


def test_async_llm_gives_the_same_answers(llm: LLM, model_folder: Callable[[str], Path]) -> None:
    import asyncio

    async def scenario() -> tuple[tuple[int, ...], str]:
        async_llm = AsyncLLM(str(model_folder("qwen3")), num_pages=32, disable_log_stats=True)
        try:
            whole = await async_llm.generate("Once", GREEDY)
            pieces = [delta.text async for delta in async_llm.stream("Once", GREEDY)]
            chat = await async_llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
            assert len(chat.token_ids) == 6
        finally:
            async_llm.close()
        return whole.token_ids, "".join(pieces)

    (expected,) = llm.generate("Once", GREEDY, use_tqdm=False)
    assert asyncio.run(scenario()) == (expected.token_ids, expected.text)


# ---- tools and structures

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}


def test_a_required_call_is_made_as_its_schema_says(llm: LLM) -> None:
    turn = AssistantTurn(tools=[TOOL], tool_choice=ToolChoice.REQUIRED, parallel_tool_calls=False)
    params = SamplingParams(max_tokens=100, seed=5)
    hello = [{"role": "user", "content": "Hello"}]
    [one, other] = llm.chat([hello, hello], params, turn=turn, use_tqdm=False)
    assert one.finish_reason is FinishReason.TOOL_CALLS
    assert one.text == ""
    [call] = one.tool_calls
    assert call.name == "look"
    assert json.loads(call.arguments)["n"] in (1, 2)
    assert other.tool_calls[0].arguments == call.arguments
    assert other.tool_calls[0].id != call.id


def test_text_follows_a_structure(llm: LLM) -> None:
    structure = Structure(StructureKind.CHOICE, json.dumps(["yes", "no"]))
    params = SamplingParams(max_tokens=20, structure=structure)
    [output] = llm.generate("Is it?", params, use_tqdm=False)
    assert output.text in ("yes", "no")
    assert output.finish_reason is FinishReason.STOP


def test_a_structure_that_cannot_be_followed_is_refused(llm: LLM) -> None:
    params = SamplingParams(structure=Structure(StructureKind.REGEX, "("))
    with pytest.raises(InvalidParameter, match="structure: cannot be followed"):
        llm.generate("Hi", params, use_tqdm=False)


def test_a_trace_shows_the_parts_of_every_step(
    llm: LLM, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    options: dict[str, Any] = {"num_pages": 128, "page_size": 16, "disable_log_stats": True}
    with LLM(str(model_folder("qwen3")), trace=str(file), **options) as traced:
        found = traced.generate("Hello", GREEDY, use_tqdm=False)
    assert found[0].token_ids == llm.generate("Hello", GREEDY, use_tqdm=False)[0].token_ids
    events = json.loads(file.read_text())
    spans = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    device = {"step", "schedule", "launch", "start", "wait for the device", "update"}
    assert set(spans) == device | {"encode", "detokenise"}
    assert len({spans[name] for name in device}) == 1
    assert spans["detokenise"] != spans["step"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads[spans["step"]] == "mlxserve-engine"
