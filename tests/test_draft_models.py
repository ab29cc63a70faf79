"""A draft model never changes a token: each kind of attention and of sampling, alone, together, cached, short of
pages, resized and restarted from disk. Its cache may hold anything."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlxserve import LLM, SamplingParams
from mlxserve.build import build_text_model
from mlxserve.chat.embedding.build import refuse_options
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.core.stats import SchedulerStats
from mlxserve.hub.embedded import MODEL_NAME, model_path
from mlxserve.model import attention
from mlxserve.system import machine
from mlxserve.text.tokenizer import Tokenizer
from tests import heads
from tests.adapters import write_adapter
from tests.assistants import always_drafting
from tests.drafting import accepted_share, similar_model, spoiled_pages, total_variation
from tests.emulated import emulated_backend
from tests.test_speculation import SENTENCES
from tests.together import begun_together

PAGE = 16
OPTIONS: dict[str, Any] = {"page_size": PAGE, "disable_log_stats": True}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.8, seed=5)
# One of each kind of sampling, of different lengths, so that answers begin and end beside others.
SAMPLING = [
    GREEDY,
    replace(WARM, top_p=0.9, max_tokens=28),
    replace(WARM, top_k=20, max_tokens=20),
    replace(WARM, min_p=0.05, temperature=1.0, max_tokens=31),
    replace(WARM, ignore_eos=False, min_tokens=18, max_tokens=26),
    replace(GREEDY, logit_bias={17: 1.5, 31: -2.0}, max_tokens=17),
]
TWO = replace(WARM, n=2, temperature=1.0, max_tokens=20)
# Of half the length, for the slow tests.
BRIEF = [replace(one, max_tokens=one.max_tokens // 2, min_tokens=one.min_tokens // 2) for one in SAMPLING]  # fmt: skip
_TEXT = [draw % 500 + 40 for draw in range(7, 60_000, 1_009)]  # 60 tokens
PROMPTS = [
    _TEXT[:45],
    [*_TEXT, *_TEXT[:20]],
    _TEXT[5:11],
    [*_TEXT[:32], *_TEXT[40:]],
    [9],
    [*_TEXT, 3, 4],
]

# Their draft models are of another kind, as a drafter's own states would have to go back.
HYBRIDS = ("lfm2", "qwen3_next", "gear")

Tokens = list[tuple[int, ...]]


def tokens(llm: LLM, prompts: Sequence[Any], params: Any) -> Tokens:
    """The tokens of all answers, those of `n` included; the engine is audited."""
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    llm.check()
    return [one.token_ids for output in outputs for one in (output, *output.alternatives)]


def stats(llm: LLM) -> SchedulerStats:
    return llm.stats().scheduler


class Scenarios:
    """What servers compute without drafts, and with them: the tokens of answers, by the scenario."""

    def __init__(
        self,
        model: str,
        drafts: dict[str, Any],
        folder: Path,
        sampling: Sequence[SamplingParams] = SAMPLING,
    ) -> None:
        """drafts: options; folder: for the cache on disk; sampling: of the six prompts."""
        self.model = model
        self.drafts = drafts
        self.sampling = sampling
        self.may_end_early = "draft_model" not in drafts  # an answer, before it runs out of pages
        self.folder = folder
        self.accepted: dict[str, int] = {}
        self.num_drafted = 0

    def run(self, *, is_drafted: bool) -> dict[str, Tokens]:
        # A head drafts unless it is told not to.
        options = {**OPTIONS, **(self.drafts if is_drafted else {"speculative_tokens": 0})}
        disk = {
            "disk_cache_dir": str(self.folder / f"disk-{is_drafted}"),
            "disk_cache_size": 1,
        }
        found: dict[str, Tokens] = {}
        # The same for both servers, as they decide whether windows have a pool of their own.
        sizes = {"num_pages": 300, "max_num_batched_tokens": 40, "max_num_seqs": 8}
        with LLM(self.model, **sizes, **options, **disk) as llm:
            found["alone"] = [
                t
                for prompt, params in zip(PROMPTS, self.sampling, strict=True)
                for t in tokens(llm, [prompt], params)
            ]
            self._count("alone", llm)
            for size in (40, 300):
                llm.resize_cache(size)
                found[f"resized to {size}"] = tokens(llm, PROMPTS, self.sampling)
            self._count("resized", llm)
            assert llm.reset_prefix_cache()
            outputs = llm.generate(PROMPTS, self.sampling, use_tqdm=False)
            found["six together"] = [output.token_ids for output in outputs]
            self._count("six together", llm)
            found["n = 2"] = tokens(llm, PROMPTS[:2], TWO)
            hits = stats(llm).prefix_hits
            next_turns = [
                [*prompt, *output.token_ids, 21, 33, 8]
                for prompt, output in zip(PROMPTS, outputs, strict=True)
            ]
            found["next turns"] = tokens(llm, next_turns, self.sampling)
            assert stats(llm).prefix_hits - hits > 6 * PAGE
            self._count("next turns", llm)
        with LLM(self.model, **sizes, **options, **disk) as llm:
            found["from disk"] = tokens(llm, next_turns, self.sampling)
            assert llm.stats().disk.num_read > 0
            self._count("from disk", llm)
        with LLM(self.model, num_pages=12, max_model_len=12 * PAGE, **options) as llm:
            with begun_together(4):  # of full length, as half of it is found pages for
                found["12 pages"] = tokens(llm, PROMPTS[:4], SAMPLING[:4])
            # Drafts of earlier text may end answers before they run out of pages.
            assert stats(llm).num_preemptions > 0 or (is_drafted and self.may_end_early)
        return found

    def _count(self, name: str, llm: LLM) -> None:
        """Note how many drafted tokens this server has accepted until now."""
        self.accepted[name] = stats(llm).accepted_tokens
        self.num_drafted += stats(llm).drafted_tokens


Undrafted = Callable[..., dict[str, Tokens]]


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> Undrafted:
    """A function that runs the scenarios without drafts, once for each model and sampling."""
    found: dict[tuple[str, bool], dict[str, Tokens]] = {}

    def run(model: str, sampling: Sequence[SamplingParams] = SAMPLING) -> dict[str, Tokens]:
        key = model, sampling is BRIEF
        if key not in found:
            scenarios = Scenarios(model, {}, tmp_path_factory.mktemp("undrafted"), sampling)
            found[key] = scenarios.run(is_drafted=False)
        return found[key]

    return run


def drafts_for(
    source: str, kind: str, model_folder: Callable[[str], Path], folder: Path
) -> tuple[str, dict[str, Any]]:
    """Return (a model of this kind, options that draft from this source); what is written goes into `folder`."""
    if source == "head":
        return str(heads.write(folder / kind, kind, noise=0.05)), {}
    model, drafts = model_folder(kind), {"speculative_tokens": 4}
    if source == "lookup":
        return str(model), drafts
    like = model_folder("llama") if kind in HYBRIDS else model
    draft = similar_model(folder / "draft", like, noise=0.05)
    return str(model), {**drafts, "draft_model": str(draft)}


def are_accepted_everywhere(scenarios: Scenarios) -> bool:
    """Return True if guesses were accepted in each of the scenarios that count them."""
    *counts, from_disk = scenarios.accepted.values()
    return from_disk > 0 and all(after > before for before, after in pairwise([0, *counts]))


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried_disk")
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("draft model", "llama"),
        ("lookup", "llama"),
        ("head", "qwen3_next"),
    ],
    ids=lambda name: name,
)
def test_no_token_of_half_the_answers_differs(
    source: str,
    kind: str,
    model_folder: Callable[[str], Path],
    undrafted: Undrafted,
    tmp_path: Path,
) -> None:
    """Every step drafts as many tokens as there is room for."""
    model, drafts = drafts_for(source, kind, model_folder, tmp_path)
    scenarios = Scenarios(model, drafts, tmp_path, BRIEF)
    expected = undrafted(model, BRIEF)
    with always_drafting():
        assert scenarios.run(is_drafted=True) == expected
    assert scenarios.num_drafted > (0 if source == "lookup" else 500)
    if source != "lookup":
        assert are_accepted_everywhere(scenarios), scenarios.accepted


def cases() -> Iterator[Any]:
    """Sources and kinds of attention."""
    for source in ("draft model", "lookup"):
        for kind in ("gemma3_text", "llama", "qwen3_moe", "glm4_moe_lite", *HYBRIDS):
            yield pytest.param(source, kind, id=f"{source}, {kind}")
    for kind in heads.KINDS:
        yield pytest.param("head", kind, id=f"head, {kind}")


@pytest.mark.long
@pytest.mark.usefixtures("unhurried_disk")
@pytest.mark.parametrize(("source", "kind"), list(cases()))
def test_no_token_differs(
    source: str,
    kind: str,
    model_folder: Callable[[str], Path],
    undrafted: Undrafted,
    tmp_path: Path,
) -> None:
    """How much is drafted is what the controller chooses by measured times."""
    model, drafts = drafts_for(source, kind, model_folder, tmp_path)
    scenarios = Scenarios(model, drafts, tmp_path)
    assert scenarios.run(is_drafted=True) == undrafted(model)
    if source != "lookup":
        assert scenarios.num_drafted > 50
    if source == "head" or (source == "draft model" and kind not in HYBRIDS):
        assert are_accepted_everywhere(scenarios), scenarios.accepted


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(num_pages=200, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def own() -> Iterator[LLM]:
    """The included model, drafted for by itself: every guess is right, on a CPU also bit by bit."""
    with LLM(num_pages=200, draft_model=MODEL_NAME, **OPTIONS) as llm:
        yield llm


def drafted_by(llm: LLM, prompts: Sequence[Any], params: Any) -> tuple[Tokens, int, int]:
    """(tokens, drafted tokens, accepted ones) of these answers alone, which begin in one step."""
    before = stats(llm)
    with begun_together(len(prompts)):
        found = tokens(llm, prompts, params)
    after = stats(llm)
    return (
        found,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


@pytest.mark.parametrize(
    "params",
    [
        SAMPLING[1],
        *(pytest.param(each, marks=pytest.mark.slow) for each in SAMPLING[::5] + SAMPLING[2:4]),
    ],
    ids=["top-p", "greedy", "bias", "top-k", "min-p"],
)
def test_a_model_that_drafts_for_itself_guesses_every_token(
    plain: LLM, own: LLM, params: SamplingParams
) -> None:
    """The guess is drawn with the noise of its seed and position, through the same filters."""
    prompts = ["A robot wants", "Once upon a time there was"]
    found, num_drafted, num_accepted = drafted_by(own, prompts, params)
    assert found == tokens(plain, prompts, params)
    assert num_drafted == num_accepted > 20


def test_the_next_turn_is_drafted_from_cached_pages(plain: LLM, own: LLM) -> None:
    """The rows of cached prompts and of accepted guesses are those of their tokens: guesses stay right."""
    own.reset_prefix_cache()
    params = replace(WARM, max_tokens=40)
    [first] = own.generate(["The little girl had a"], params, use_tqdm=False)
    turn = [[5, *first.token_ids, 40, 41], [6, 7, 8]]
    for prompts in ([turn[0]], [[*turn[0], 50], turn[1]]):
        found, num_drafted, num_accepted = drafted_by(own, prompts, params)
        assert found == tokens(plain, prompts, params)
        assert num_drafted == num_accepted > 25
    [again] = own.generate([turn[0]], params, use_tqdm=False)
    assert again.usage.cached_tokens == (len(turn[0]) - 1) // PAGE * PAGE


@pytest.mark.long
@pytest.mark.parametrize("source", ["draft model", "head", "lookup"])
def test_500_cached_tokens_are_drafted_after_as_computed_ones(source: str, tmp_path: Path) -> None:
    """As many are found as without drafts, and as many guesses after them are right, within 3 of 100."""
    drafts: dict[str, Any] = {"speculative_tokens": 3}
    model, warmer = None, WARM.temperature
    prompt = [draw % 900 + 40 for draw in range(7, 520_000, 1_009)]
    if source == "head":
        model = str(heads.write(tmp_path, "mimo", noise=0.3, max_position_embeddings=2048))
    elif source == "draft model":
        drafts["draft_model"] = str(similar_model(tmp_path / "draft", model_path(), bits=3))
    else:
        prompt = (Tokenizer(model_path()).encode_here(SENTENCES) * 30)[:515]
        warmer = 2.0  # an answer that leaves the text of its prompt and returns to it
    params = replace(WARM, max_tokens=60, temperature=warmer)
    found, shares = [], []
    for each in ({"speculative_tokens": 0}, drafts):
        with always_drafting(), LLM(model, num_pages=80, **OPTIONS, **each) as llm:
            [first] = llm.generate([prompt], params, use_tqdm=False)
            for is_cached in (True, False):
                if not is_cached:
                    llm.reset_prefix_cache()
                before = stats(llm)
                turn = [*prompt, *first.token_ids, 40, 41]
                [output] = llm.generate([turn], params, use_tqdm=False)
                after = stats(llm)
                found.append((output.token_ids, output.usage.cached_tokens))
                num_accepted = after.accepted_tokens - before.accepted_tokens
                num_drafted = after.drafted_tokens - before.drafted_tokens
                shares.append(num_accepted / max(1, num_drafted))
    assert found[:2] == found[2:]
    assert [cached >= 500 for _, cached in found] == [True, False] * 2
    assert num_drafted > 10
    assert 0 < shares[2] < 1
    assert shares[2] == pytest.approx(shares[3], abs=0.03)


@pytest.mark.slow
def test_pages_behind_rejected_guesses_are_those_of_the_answer(plain: LLM) -> None:
    """Guesses are rejected at every place of a page, and the next turns continue on the pages that are left."""
    prompts = [[7, 8, 9, number] for number in range(40, 43)]
    with (
        LLM(num_pages=80, draft_model=MODEL_NAME, **OPTIONS) as llm,
        spoiled_pages(None, every=1),
    ):
        answers, num_drafted, num_accepted = drafted_by(llm, prompts, WARM)
        assert num_accepted < num_drafted // 2
        next_turns = [[*one, *other, 50] for one, other in zip(prompts, answers, strict=True)]
        hits = stats(llm).prefix_hits
        found = tokens(llm, next_turns, WARM)
        assert stats(llm).prefix_hits == hits + PAGE * len(prompts)
    plain.reset_prefix_cache()
    assert found == tokens(plain, next_turns, WARM)


@pytest.mark.slow
def test_answers_end_within_drafts_where_they_end_without(plain: LLM, own: LLM) -> None:
    prompt = ["One day a bird"]
    [whole] = plain.generate(prompt, GREEDY, use_tqdm=False)
    params = [replace(GREEDY, max_tokens=number) for number in (1, 2, 3, 5, 6)]
    params += [replace(GREEDY, stop_token_ids=(whole.token_ids[at],)) for at in (6, 7, 8, 9)]
    size = len(whole.text)
    params += [
        replace(GREEDY, stop=(whole.text[at : at + 5],))
        for at in (size // 4, size // 2, size * 3 // 4)
    ]
    for each in params:
        [found] = own.generate(prompt, each, use_tqdm=False)
        [expected] = plain.generate(prompt, each, use_tqdm=False)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.finish_reason == expected.finish_reason
        own.check()


def test_two_answers_to_a_prompt_are_those_without_drafts(plain: LLM, own: LLM) -> None:
    found, num_drafted, num_accepted = drafted_by(own, ["The sun and"], TWO)
    assert found == tokens(plain, ["The sun and"], TWO)
    assert found[0] != found[1]
    assert num_drafted == num_accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLING[1]], ids=["greedy", "top-p"])
def test_guesses_of_guided_answers_are_cut_where_their_grammar_refuses_them(
    plain: LLM, own: LLM, params: SamplingParams
) -> None:
    """Beside an answer without a grammar; most guesses after the first are drawn without a mask."""
    structure = Structure(StructureKind.REGEX, "([a-z]{1,8} ){6,12}[a-z]{1,9}[.]")
    guided = replace(params, structure=structure, ignore_eos=False, max_tokens=60)
    prompts = ["A robot wants", "The cat", "The dog"]
    asked = [guided, replace(guided, n=2), params]
    expected = tokens(plain, prompts, asked)
    with always_drafting():
        found, num_drafted, num_accepted = drafted_by(own, prompts[:2], asked[:2])
        assert found == expected[:3]
        assert 10 < num_accepted < num_drafted
        assert drafted_by(own, prompts, asked)[0] == expected


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["draft model", "lookup"])
def test_answers_that_may_call_tools_are_drafted(plain: LLM, own: LLM, source: str) -> None:
    """No grammar limits their text, in which drafts end before the marker of a call."""
    questions = [
        "Repeat: the cat sat on the mat. The cat sat on the mat.",
        "Look up the word tree.",
    ]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = replace(GREEDY, max_tokens=48)
    expected = plain.chat(messages, params, tools=[TOOL], use_tqdm=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(always_drafting())
        llm = own
        if source == "lookup":
            llm = stack.enter_context(LLM(num_pages=200, speculative_tokens=8, **OPTIONS))
        found = llm.chat(messages, params, tools=[TOOL], use_tqdm=False)
        llm.check()
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    reports = [output.usage.speculation for output in found]
    assert sum(report.num_accepted for report in reports if report is not None) > 10


@pytest.mark.slow
def test_answers_that_cannot_be_drafted_run_beside_others(plain: LLM, own: LLM) -> None:
    params = [replace(GREEDY, repetition_penalty=1.2), GREEDY]
    found, num_drafted, num_accepted = drafted_by(own, ["The cat", "The dog"], params)
    assert found == tokens(plain, ["The cat", "The dog"], params)
    assert num_drafted == num_accepted > 10


@pytest.mark.slow
def test_pages_that_are_computed_again_are_drafted_as_before(plain: LLM) -> None:
    prompts = ["The quick brown fox", "Tell me a story about a cat.", "A robot", "Rain in the"]
    params = [replace(one, max_tokens=60, ignore_eos=True) for one in SAMPLING[:4]]
    expected = tokens(plain, prompts, params)
    with LLM(num_pages=14, draft_model=MODEL_NAME, speculative_tokens=3, **OPTIONS) as llm:
        with begun_together(4):
            found, num_drafted, num_accepted = drafted_by(llm, prompts, params)
        assert found == expected
        assert stats(llm).num_preemptions > 0
        assert num_drafted == num_accepted > 60


@pytest.mark.slow
def test_a_cache_on_disk_has_the_rows_of_both_models(plain: LLM, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_cache_dir": str(tmp_path), "disk_cache_size": 1}
    prompt = [draw % 900 + 40 for draw in range(7, 90_000, 1_009)]
    with LLM(num_pages=60, draft_model=MODEL_NAME, **OPTIONS, **disk) as llm:
        [first] = llm.generate([prompt], WARM, use_tqdm=False)
    turn = [*prompt, *first.token_ids, 40]
    with LLM(num_pages=60, draft_model=MODEL_NAME, **OPTIONS, **disk) as llm:
        found, num_drafted, num_accepted = drafted_by(llm, [turn], WARM)
        assert llm.stats().disk.num_read > 4
    assert found == tokens(plain, [turn], WARM)
    assert num_drafted == num_accepted > 15
    with LLM(num_pages=60, **OPTIONS, **disk) as llm:
        assert tokens(llm, [turn], WARM) == found
        assert llm.stats().disk.num_read == 0, "these records have the drafter's rows as well"


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, None], ids=["nan", "noise"])
def test_whatever_is_in_a_drafters_cache_changes_no_token(plain: LLM, value: float | None) -> None:
    prompts = ["The quick brown fox", "Tell me a story", "A robot"]
    params = [replace(one, max_tokens=30) for one in SAMPLING[:3]]
    expected = tokens(plain, prompts, params)
    with (
        LLM(num_pages=40, draft_model=MODEL_NAME, **OPTIONS) as llm,
        spoiled_pages(value, every=3) as times,
    ):
        found, num_drafted, num_accepted = drafted_by(llm, prompts, params)
    assert found == expected
    assert len(times) > 3
    assert num_accepted < num_drafted


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")  # weights become float32
def test_the_emulated_metal_kernels_draft_and_verify(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pools are written in place: a guess's row is there before the next guess attends to it."""
    prompts = ["What is 17 + 25?", "The boat"]
    params = [replace(GREEDY, max_tokens=14), replace(WARM, max_tokens=12)]
    expected = tokens(plain, prompts, params)
    monkeypatch.setattr(
        attention, "select_backends", lambda _name, layers: [emulated_backend()] * len(layers)
    )
    with LLM(num_pages=20, draft_model=MODEL_NAME, speculative_tokens=3, **OPTIONS) as llm:
        found, num_drafted, num_accepted = drafted_by(llm, prompts, params)
        assert found == expected
        assert num_drafted == num_accepted > 10
        longer = [[*found[0], *found[1], number] for number in (5, 6)]
        expected = tokens(plain, longer, params)
        assert tokens(llm, longer, params) == expected


# ---- options


def test_drafts_have_four_tokens_where_nothing_else_is_asked() -> None:
    assert EngineConfig().max_draft == 0
    assert EngineConfig(draft_model="m").max_draft == 4
    assert EngineConfig().with_options(draft_model="m", speculative_tokens=0).max_draft == 0
    assert EngineConfig().with_options(draft_model="m", speculative_tokens=7).max_draft == 7


def test_no_draft_model_is_loaded_where_drafts_are_off(plain: LLM) -> None:
    with LLM(num_pages=60, draft_model=MODEL_NAME, speculative_tokens=0, **OPTIONS) as llm:
        [output] = llm.generate(["The cat"], GREEDY, use_tqdm=False)
        assert output.usage.speculation is None
        assert llm.stats().planned.weights == plain.stats().planned.weights
        assert llm.stats().planned.page == plain.stats().planned.page


def test_weights_and_pages_of_both_models_are_planned(plain: LLM, own: LLM) -> None:
    before, planned = plain.stats().planned, own.stats().planned
    assert planned.weights == 2 * before.weights
    assert planned.page == 2 * before.page
    assert planned.pool == 200 * planned.page


@pytest.mark.slow
def test_pages_that_fit_into_memory_are_counted_for_both_models() -> None:
    options = {**OPTIONS, "max_num_seqs": 4, "max_model_len": 256}
    planned = []
    for drafts in ({}, {"draft_model": MODEL_NAME}):
        with LLM(**options, **drafts) as llm:
            planned.append(llm.stats().planned)
            assert llm.stats().pool.num_pages == 4 * 256 // PAGE
    plain, both = planned
    assert both.pool == 2 * plain.pool
    assert both.step > 1.5 * plain.step > 0, "both compute the prompts of a step"


def test_a_draft_model_with_other_tokens_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = similar_model(tmp_path / "other", model_folder("llama"))
    file = folder / "tokenizer.json"
    # Every second token has another name.
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    names = [name for name in vocabulary if len(name) > 2][::2]
    ids = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, ids[1:] + ids[:1], strict=True))
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidConfig, match=r"has another vocabulary: .* tokens differ"):
        LLM(num_pages=60, draft_model=str(folder), **OPTIONS)


def test_a_draft_model_with_recurrent_states_is_refused(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(InvalidConfig, match="keeps a recurrent state"):
        LLM(num_pages=60, draft_model=str(model_folder("mamba2")), **OPTIONS)


def test_models_that_embed_have_no_draft_model() -> None:
    with pytest.raises(InvalidConfig, match="for which nothing is drafted"):
        refuse_options(EngineConfig(draft_model="m"), "a model of vectors")


# ---- how many are accepted


@pytest.mark.slow
def test_shared_noise_is_accepted_as_often_as_the_distributions_are_alike(tmp_path: Path) -> None:
    """At a temperature at which the included model is unsure; SmolLM2 is in `tests/real/test_drafts.py`."""
    draft = similar_model(tmp_path / "draft", model_path(), bits=4)
    params = replace(GREEDY, temperature=2.0, seed=3, max_tokens=100)
    prompts = ["Once upon a time", "The best way to save water"]
    shared, ids = accepted_share(None, prompts, params, draft)
    own, _ = accepted_share(None, prompts, params, draft, shares_noise=False)
    assert shared > 0.9 * (1 - total_variation(model_path(), draft, ids, 2.0))
    assert shared > 1.5 * own


# ---- heads


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files have a head that is always right."""
    return heads.write(tmp_path_factory.mktemp("mimo"), "mimo")


def test_a_head_drafts_unless_it_is_told_not_to(headed: Path) -> None:
    with LLM(str(headed), num_pages=20, **OPTIONS) as llm:
        found, num_drafted, num_accepted = drafted_by(llm, PROMPTS[2:3], GREEDY)
        assert num_accepted > 10
        # On a Mac the head has 4 bits, and is not always right.
        assert num_drafted == num_accepted or machine.is_metal()
        with_head = llm.stats().planned
    with LLM(str(headed), num_pages=20, speculative_tokens=0, **OPTIONS) as llm:
        assert drafted_by(llm, PROMPTS[2:3], GREEDY) == (found, 0, 0)
        without = llm.stats().planned
    assert with_head.weights > without.weights
    assert with_head.page > without.page
    assert with_head.pool == 20 * with_head.page


def other_head(folder: Path) -> Path:
    """Write a model with a head that guesses nothing right."""
    weights = dict(tree_flatten(heads.build("mimo", seed=5)[0].parameters()))
    parts = heads.random_parts(weights["model.norm.weight"].shape[0], seed=2)
    return heads.write(folder, "mimo", head=heads.head_of("mimo", weights, parts))


async def test_a_head_that_fails_the_probe_is_named_where_nothing_is_drafted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = other_head(tmp_path / "other")
    chat = build_text_model(EngineConfig().with_options(model=str(folder), num_pages=20, **OPTIONS))
    try:
        snapshot = await chat.engine.snapshot()
    finally:
        chat.close()
    assert "its head does not draft, because" in snapshot.no_draft_reason
    assert f"Nothing is drafted: {snapshot.no_draft_reason}" in caplog.text


def test_a_head_that_is_named_and_fails_the_probe_is_refused(headed: Path, tmp_path: Path) -> None:
    other = other_head(tmp_path / "other")
    with pytest.raises(InvalidConfig, match="draft_model: other: its head does not draft"):
        LLM(str(headed), draft_model=str(other), num_pages=20, **OPTIONS)


@pytest.mark.slow
def test_a_head_drafts_beside_adapters(headed: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", headed, seed=3)
    options = {**OPTIONS, "num_pages": 40, "adapter": (f"own={adapter}",)}
    found = []
    each: tuple[dict[str, Any], ...] = ({"speculative_tokens": 0}, {})
    for drafts in each:
        with LLM(str(headed), **options, **drafts) as llm:
            found.append(tokens(llm, PROMPTS[:2], GREEDY))
            assert (stats(llm).accepted_tokens > 10) == (not drafts)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")  # weights become float32
def test_the_emulated_metal_kernels_verify_a_heads_guesses(
    headed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [replace(GREEDY, max_tokens=14), replace(WARM, max_tokens=12)]
    with LLM(str(headed), num_pages=20, speculative_tokens=0, **OPTIONS) as llm:
        expected = tokens(llm, PROMPTS[1:3], params)
    monkeypatch.setattr(
        attention, "select_backends", lambda _name, layers: [emulated_backend()] * len(layers)
    )
    with LLM(str(headed), num_pages=20, **OPTIONS) as llm:
        found, num_drafted, num_accepted = drafted_by(llm, PROMPTS[1:3], params)
    assert found == expected
    assert num_drafted == num_accepted > 10
