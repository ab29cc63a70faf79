"""Drafts beside what else a request or a server asks for, in pairs that no other test has: no token differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.engine.engine import Engine
from mlxserve.request import Output
from tests import heads
from tests.adapters import write_adapter
from tests.assistants import always_drafting, write_agreeing_pair
from tests.assistants import unprobed as unprobed
from tests.drafting import similar_model
from tests.model.small_vision import Said, conversation, image, write_vision_model
from tests.oracle import MAX_TOKENS, Oracle
from tests.together import begun_together

PAGE = 16
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=5)
_TEXT = [draw % 500 + 40 for draw in range(7, 60_000, 1_009)]
PROMPTS = [_TEXT[:45], [*_TEXT, *_TEXT[:20]], _TEXT[5:11], [*_TEXT[:32], *_TEXT[40:]]]
PENALISED = replace(SEEDED, frequency_penalty=0.6, presence_penalty=0.2, repetition_penalty=1.1)
GUIDED = replace(
    GREEDY,
    structure=Structure(StructureKind.REGEX, "(temperature: [0-9]{2} degrees; ){3}"),
    ignore_eos=False,
    max_tokens=60,
)
TIGHT: dict[str, Any] = {"num_pages": 11, "max_model_len": 11 * PAGE, "growth_pages": 0}
RESIZES = {6: 150, 13: 18, 24: 120}  # pages, by the step before which the cache gets them
Source = Literal["lookup", "draft model", "head", "assistant"]
Told = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, logprobs


@dataclass(frozen=True)
class Combination:
    """A source and a model, and what is asked of both.

    options   of the server
    params    of each prompt, in turn
    resizes   while answers run
    swaps     preempted answers are written to disk; a restart reads all from there
    adapters  number of them, which requests use in turn with none
    """

    source: Source
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    params: Sequence[SamplingParams] = (GREEDY,)
    resizes: bool = False
    swaps: bool = False
    restarts: bool = False
    adapters: int = 0


Q8 = {"kv_cache_dtype": "q8"}
WINDOWS = {"num_window_pages": 60}
STATES = {"num_state_slots": 60}
LOGGED = replace(PENALISED, logprobs=3)
COMBINATIONS = {
    "head, windows: penalties and logprobs": Combination("head", "step3p5", WINDOWS, (LOGGED,)),
    "draft model, windows: guided, two answers": Combination(
        "draft model", "gemma3_text", WINDOWS, (replace(GUIDED, n=2), replace(SEEDED, n=2))
    ),
    "lookup, windows: all in one step": Combination(
        "lookup", "gpt_oss", WINDOWS, (replace(LOGGED, n=2), GUIDED, SEEDED)
    ),
    "head, hybrid: preempted by swap": Combination(
        "head", "qwen3_next", {**TIGHT, **STATES}, (SEEDED, PENALISED), swaps=True
    ),
    "draft model, hybrid: 8 bits": Combination(
        "draft model", "qwen3_next", {**Q8, **STATES}, (LOGGED, GUIDED)
    ),
    "head: 8 bits and a restart": Combination("head", "mimo", Q8, (SEEDED, LOGGED), restarts=True),
    "assistant, windows: preempted by swap": Combination(
        "assistant",
        "gemma4_text",
        {**TIGHT, "num_window_pages": 24},
        (PENALISED, SEEDED),
        swaps=True,
    ),
    "assistant: guided, two answers, logprobs": Combination(
        "assistant", "gemma4_text", {}, (replace(GUIDED, n=2), replace(LOGGED, n=2))
    ),
    "draft model: adapters and penalties": Combination(
        "draft model", "llama", {}, (PENALISED, replace(SEEDED, n=2), GUIDED), adapters=2
    ),
    "head, hybrid: guided and logprobs in shared memory": Combination(
        "head", "qwen3_5", {}, (GUIDED, replace(LOGGED, n=2))
    ),
    "draft model, windows: 8 bits, swap, restart": Combination(
        "draft model",
        "gpt_oss",
        {**Q8, **TIGHT, "num_window_pages": 24},
        (SEEDED, PENALISED),
        swaps=True,
        restarts=True,
    ),
    "head, hybrid: resized while it runs": Combination(
        "head", "nemotron_h", STATES, (SEEDED, LOGGED), resizes=True
    ),
    "lookup, hybrid: 8 bits, swap, logprobs": Combination(
        "lookup", "qwen3_next", {**Q8, **TIGHT, **STATES}, (LOGGED, SEEDED), swaps=True
    ),
    "head, windows: 8 bits, resized while it runs": Combination(
        "head", "step3p5", {**Q8, **WINDOWS}, (SEEDED, GUIDED), resizes=True
    ),
    "assistant: adapters, resized while it runs": Combination(
        "assistant", "gemma4_text", {}, (LOGGED, GUIDED), resizes=True, adapters=1
    ),
}


@contextmanager
def resized_while_it_runs() -> Iterator[None]:
    """Resize the cache before some of an engine's steps."""
    step, counts = Engine.step, dict[Engine, int]()

    def resized(engine: Engine) -> list[Output]:
        counts[engine] = counts.get(engine, 0) + 1
        if counts[engine] in RESIZES:
            engine.resize_cache(RESIZES[counts[engine]])
        return step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", resized)
        yield


class Served:
    """A combination's server, with drafts and without."""

    def __init__(self, asked: Combination, folder: Path, write: Callable[..., Path]) -> None:
        self.asked = asked
        self.folder = folder
        self.drafts: dict[str, Any] = {"speculative_tokens": MAX_TOKENS}
        (folder / "model").mkdir()
        match asked.source:
            case "head":
                self.model = heads.write(folder / "model", asked.kind, noise=0.05)
            case "assistant":
                like = write(folder / "model", asked.kind)
                self.model, assistant = write_agreeing_pair(folder, like)
                self.drafts["draft_model"] = str(assistant)
            case "draft model":
                self.model = like = write(folder / "model", asked.kind)
                if asked.kind == "qwen3_next":  # a draft model has no states
                    (folder / "like").mkdir()
                    like = write(folder / "like", "llama")
                draft = similar_model(folder / "draft", like, noise=0.05)
                self.drafts["draft_model"] = str(draft)
            case "lookup":
                self.model = write(folder / "model", asked.kind)
        self.adapters = {
            f"adapter-{number}": write_adapter(
                folder / f"adapter-{number}", self.model, seed=number
            )
            for number in range(asked.adapters)
        }
        self.oracle = Oracle()
        self.num_accepted = 0

    def answers(self, *, is_drafted: bool) -> dict[str, list[Told]]:
        options: dict[str, Any] = {
            "page_size": PAGE,
            "disable_log_stats": True,
            "num_pages": 120,
            "max_num_seqs": 12,
            "max_num_batched_tokens": 48,
            **self.asked.options,
            **(self.drafts if is_drafted else {"speculative_tokens": 0}),
        }
        if self.asked.swaps or self.asked.restarts:
            disk = self.folder / f"disk-{is_drafted}"
            options |= {"disk_cache_dir": str(disk), "disk_cache_size": 0.2}
        if self.asked.swaps:
            options["preemption_mode"] = "swap"
        return self._told(options, is_drafted=is_drafted)

    def _told(self, options: Mapping[str, Any], *, is_drafted: bool) -> dict[str, list[Told]]:
        model = str(self.model)
        resizing = resized_while_it_runs() if self.asked.resizes else nullcontext()
        with resizing, LLM(model, adapters=self.adapters or None, **options) as llm:
            found = {"together": self._generate(llm, PROMPTS)}
            prompts = [
                [*prompt, *tokens, 21, 33, 8]
                for prompt, (tokens, _) in zip(
                    PROMPTS, self._firsts(found["together"]), strict=True
                )
            ]
            if "num_pages" not in self.asked.options:
                found["next turns"] = self._generate(llm, prompts)
            else:
                assert llm.stats().scheduler.num_preemptions > 0
            self.num_accepted = llm.stats().scheduler.accepted_tokens
        if self.asked.restarts:
            with LLM(model, adapters=self.adapters or None, **options) as llm:
                found["from disk"] = self._generate(llm, PROMPTS)
                assert llm.stats().disk.num_read > 0
        return found

    def _firsts(self, told: Sequence[Told]) -> list[Told]:
        """The first answer to each prompt."""
        counts = [params.n for params, _ in zip(self._params(), PROMPTS, strict=True)]
        return [told[sum(counts[:at])] for at in range(len(counts))]

    def _params(self) -> list[SamplingParams]:
        return [self.asked.params[at % len(self.asked.params)] for at in range(len(PROMPTS))]

    def _generate(self, llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Told]:
        params = self._params()
        if self.adapters:  # one after the other, as each has its own
            names = [None, *self.adapters]
            outputs = [
                llm.generate([prompt], each, use_tqdm=False, adapter=names[at % len(names)])[0]
                for at, (prompt, each) in enumerate(zip(prompts, params, strict=True))
            ]
        else:
            with begun_together(sum(each.n for each in params)):
                outputs = llm.generate(list(prompts), params, use_tqdm=False)
        llm.check()
        for prompt, each, output in zip(prompts, params, outputs, strict=True):
            self.oracle.learn_answers([prompt], each.seed, [output.token_ids])
        return [
            (one.token_ids, tuple(item.logprob for item in one.logprobs or ()))
            for output in outputs
            for one in (output, *output.alternatives)
        ]


@pytest.mark.long
@pytest.mark.usefixtures("unprobed", "unhurried_disk")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_no_token_differs(name: str, write_model: Callable[..., Path], tmp_path: Path) -> None:
    asked = COMBINATIONS[name]
    served = Served(asked, tmp_path, write_model)
    expected = served.answers(is_drafted=False)
    drafting = served.oracle.drafting() if asked.source == "lookup" else always_drafting()
    with drafting:
        found = served.answers(is_drafted=True)
    for part, wanted in expected.items():
        assert [tokens for tokens, _ in found[part]] == [tokens for tokens, _ in wanted], part
        for (_, logprobs), (_, others) in zip(found[part], wanted, strict=True):
            assert logprobs == pytest.approx(others, abs=2e-3), part
    assert served.num_accepted > 0


A, B = image(1), image(2, 60, 200)
SAID: list[Said] = [
    ("What is this? ", A, " Say it."),
    ("Compare ", B, " and ", A),
    ("No image.",),
    (B, "x"),
]


@pytest.mark.long
def test_no_token_about_images_differs_beside_a_draft_model(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The draft model sees text alone: penalised, guided and plain answers, preempted."""
    (tmp_path / "model").mkdir()
    folder = write_vision_model(tmp_path / "model", "qwen3_vl")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    (tmp_path / "draft").mkdir()
    draft = write_model(tmp_path / "draft", "llama", vocab_size=text["vocab_size"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, draft / name)
    params = [LOGGED, GUIDED, SEEDED, replace(GREEDY, n=2)]
    options: dict[str, Any] = {"page_size": PAGE, "num_pages": 40, "max_model_len": 40 * PAGE}
    found = []
    each: tuple[dict[str, Any], ...] = (
        {"speculative_tokens": 0},
        {"draft_model": str(draft), "speculative_tokens": 4},
    )
    for drafts in each:
        with (
            always_drafting(),
            LLM(str(folder), disable_log_stats=True, **options, **drafts) as llm,
        ):
            for _ in range(2):  # the second time from the cache
                with begun_together(5):
                    outputs = llm.chat(
                        [conversation(said) for said in SAID], params, use_tqdm=False
                    )
                llm.check()
                answers = [each for one in outputs for each in (one, *one.alternatives)]
                found.append([each.token_ids for each in answers])
            num_drafted = llm.stats().scheduler.drafted_tokens
    assert found[:2] == found[2:]
    assert num_drafted > 100
