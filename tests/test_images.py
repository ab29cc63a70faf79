"""Answers about images are mlx-vlm's own, however they are scheduled, cached and cut."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from PIL import Image as Pillow
from tokenizers import Tokenizer

from metal_kernels.metal import MetalBackend
from mlxserve import LLM, SamplingParams
from mlxserve.chat.answers import RequestOutput
from mlxserve.core.errors import InvalidParameter
from mlxserve.hub.files import find_model
from mlxserve.model.attention import load_probed
from mlxserve.model.image_encoder import compute
from mlxserve.model.image_encoder_pieces import METAL_WORK
from mlxserve.model.vision import ImageEncoding, Vision
from tests.adapters import fuse, write_adapter
from tests.emulated import emulated_factory
from tests.model.small_vision import (
    IN_16_BITS,
    VISION_MODELS,
    Said,
    answer_of_mlx_vlm,
    below_best,
    bidirectional_layers,
    conversation,
    image,
    read_whole,
    write_vision_model,
)
from tests.model.test_image_probe import write_in_16_bits
from tests.test_emulated_engine import give
from tests.together import begun_together

_MARKS: dict[str, Any] = {
    "qwen3_vl": (),
    "qwen3_5": pytest.mark.slow,
}
ONE_BY_ONE = {"glm4v"}  # mlx-vlm's tower is not right for four images
WITHOUT_LAYERS = {"gemma4_unified"}
NUM_TOKENS = 24
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
A, B, WIDE = image(1), image(2), image(3, 60, 200)
TEXT: Said = ("Tell me about pages, prefixes and the cache.",)
QUESTIONS: dict[str, Said] = {
    "an image in a text": ("What is this? ", A, " Say it in a few words."),
    "another image in the same text": ("What is this? ", B, " Say it in a few words."),
    "two images": ("Compare ", WIDE, " and ", A, " now."),
    "an image first": (B, "Describe it."),
    "the same image twice": (A, A, "Which one?"),
    "no image": TEXT,
}


class Model:
    """A folder, and what mlx-vlm answers with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Said, tuple[int, ...]] = {}

    @cached_property
    def _whole(self) -> Any:
        return read_whole(self.folder)

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def marker(self) -> str:
        """The token that its template writes for an image."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        whole: str = VISION_MODELS[self.config["model_type"]]["image"]
        if tokenizer.token_to_id(whole) is not None:
            return whole
        names = ("image_token_id", "image_token_index")
        token = next(self.config[name] for name in names if name in self.config)
        return str(tokenizer.id_to_token(token))

    def answer(self, said: Said) -> tuple[int, ...]:
        if said not in self._known:
            self._known[said] = answer_of_mlx_vlm(
                self.folder, self._whole, *said, num_tokens=NUM_TOKENS
            )
        return self._known[said]


def ask(llm: LLM, questions: Sequence[Said], **options: Any) -> list[RequestOutput]:
    asked = [conversation(said) for said in questions]
    return llm.chat(asked, PARAMS, use_tqdm=False, **options)


def agree(model: Model, llm: LLM, questions: Sequence[Said]) -> list[RequestOutput]:
    outputs = ask(llm, questions)
    assert [o.token_ids for o in outputs] == [model.answer(said) for said in questions]
    llm.check()
    return outputs


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=_MARKS.get(kind, pytest.mark.long)) for kind in VISION_MODELS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind: str = request.param
    return Model(write_vision_model(tmp_path_factory.mktemp(kind), kind))


Serve: TypeAlias = Callable[..., LLM]


SIZES: dict[str, Any] = {
    "num_pages": 96,
    "page_size": 16,
    "max_model_len": 512,
    "num_state_slots": 64,
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def shared(model: Model) -> Iterator[LLM]:
    with LLM(str(model.folder), **SIZES) as llm:
        yield llm


@pytest.fixture
def serve(model: Model) -> Iterator[Serve]:
    opened: list[LLM] = []

    def build(**options: Any) -> LLM:
        opened.append(LLM(str(model.folder), **{**SIZES, **options}))
        return opened[-1]

    yield build
    for llm in opened:
        llm.close()


def test_images_alone_together_and_cached(model: Model, shared: LLM) -> None:
    for said in QUESTIONS.values():
        agree(model, shared, [said])
    shared.reset_prefix_cache()
    agree(model, shared, list(QUESTIONS.values()))
    outputs = agree(model, shared, list(QUESTIONS.values()))
    assert sum(output.usage.cached_tokens for output in outputs) > 64


@pytest.mark.long
def test_an_adapter_of_the_text_answers_about_images(
    model: Model, serve: Serve, tmp_path: Path
) -> None:
    """As mlx-vlm with the adapter in its weights, in one step with the model alone."""
    if find_spec(f"mlx_lm.models.{model.config['model_type']}") is None:
        pytest.skip("mlx-lm, which makes adapters, does not define it")
    adapter = write_adapter(tmp_path / "a", model.folder, seed=1)
    whole = read_whole(model.folder)
    fuse(whole, adapter)
    llm = serve(adapters={"a": adapter})
    for said in QUESTIONS.values():
        [output] = ask(llm, [said], adapter="a")
        expected = answer_of_mlx_vlm(model.folder, whole, *said, num_tokens=NUM_TOKENS)
        assert output.token_ids == expected != model.answer(said)
    agree(model, llm, list(QUESTIONS.values()))


def test_usage_counts_the_rows_of_images(shared: LLM) -> None:
    one, two, none = (output.usage for output in ask(shared, [("a", A), ("a", A, A), ("a",)]))
    assert one.image_tokens > 0
    assert two.image_tokens == 2 * one.image_tokens
    assert none.image_tokens == 0
    # LLaVA's images have no tokens around their rows.
    assert two.prompt_tokens > one.prompt_tokens >= none.prompt_tokens + one.image_tokens


@pytest.mark.slow
def test_images_in_chunks_preempted_and_beside_drafts(
    model: Model, shared: LLM, serve: Serve
) -> None:
    outputs = ask(shared, list(QUESTIONS.values()))
    longest = max(output.usage.prompt_tokens for output in outputs) + NUM_TOKENS
    # Enough pages for one question. With all of them twice, some are preempted in almost every order, which
    # depends on when their images are ready.
    num_pages = -(-longest // SIZES["page_size"])
    llm = serve(
        num_pages=num_pages,
        max_model_len=num_pages * SIZES["page_size"],
        max_num_seqs=5,
        num_state_slots=32,
        # Rows of an image that attend to one another are computed in one step.
        max_num_batched_tokens=22 if bidirectional_layers(model.config) else 14,
        page_aligned_scheduling=False,
        speculative_tokens=3,
    )
    questions = [*QUESTIONS.values(), *reversed(QUESTIONS.values())]
    for _ in range(4):
        with begun_together(len(questions)):
            agree(model, llm, questions)
        if llm.stats().scheduler.num_preemptions:
            break
    assert llm.stats().scheduler.num_preemptions > 0
    agree(model, llm, [QUESTIONS["two images"]])


@pytest.mark.long
def test_images_with_the_emulated_kernels(
    model: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, MetalBackend(emulated_factory()))
    llm = serve(max_num_batched_tokens=24, max_num_seqs=4)
    agree(model, llm, list(QUESTIONS.values()))
    agree(model, llm, list(QUESTIONS.values()))


@pytest.mark.long
def test_in_8_bits_an_answer_does_not_depend_on_what_is_beside_it(serve: Serve) -> None:
    llm = serve(kv_cache_dtype="q8")
    questions = list(QUESTIONS.values())
    alone = [ask(llm, [said])[0].token_ids for said in questions]
    assert len(set(alone)) > 3
    llm.reset_prefix_cache()
    assert [output.token_ids for output in ask(llm, questions)] == alone
    assert [output.token_ids for output in ask(llm, questions)] == alone


def test_conversations_about_one_image_have_it_computed_once(model: Model, serve: Serve) -> None:
    llm = serve()
    agree(model, llm, [("What is this? ", A), ("Which one? ", A), ("A cat? ", B)])
    agree(model, llm, [("And this? ", A)])
    stats = llm.stats().vision
    assert (stats.num_computed, stats.num_kept) == (2, 2)
    assert stats.num_bytes > 0


def _vision(model: Model) -> Vision:
    choice = load_probed(
        find_model(str(model.folder)),
        is_metal=False,
        memory_limit=1 << 32,
        kv_cache_dtype="auto",
        attention_backend="auto",
    )
    assert choice.loaded.vision is not None, choice.loaded.no_vision_reason
    return choice.loaded.vision


def test_a_tower_is_computed_in_pieces_of_its_layers(model: Model) -> None:
    if model.config["model_type"] in WITHOUT_LAYERS:
        pytest.skip("it embeds patches, without layers")
    vision = _vision(model)
    seeing = ImageEncoding(vision, [picture := vision.reader.read(A)])
    assert [seeing.advance(1), seeing.advance(1), vision.stats().num_kept] == [None, None, 0]
    while (result := seeing.advance(1)) is None:
        pass
    assert result == picture.num_rows
    assert vision.stats().num_kept == 1
    seeing.release()
    assert ImageEncoding(vision, [picture]).advance(1) == picture.num_rows
    first, second = (ImageEncoding(vision, [vision.reader.read(B)]) for _ in range(2))
    while first.advance(1) is None:
        assert second.advance(1) is None  # waits for what the first one computes
    assert second.advance(1) is not None
    assert vision.stats().num_computed == 2
    ticks = itertools.count()
    third = ImageEncoding(
        vision, [vision.reader.read(WIDE)], lambda: 10.0, lambda: float(next(ticks))
    )
    assert third.advance(1) is None
    assert (
        next(ticks) == 11
    )  # a piece for each second of ten, by a clock that tells one more each time


def test_a_large_image_is_computed_in_pieces_of_bounded_work(model: Model) -> None:
    """With the features that it has at once."""
    tower = (vision := _vision(model)).tower
    picture = vision.reader.read(image(4, 200, 300))
    [expected], few = tower.features([picture])
    tower.pieces.max_work = 1 << 14
    [found], many = tower.features([picture])
    assert len(many) > 2 * len(few)
    for a, b in zip((found.rows, *found.deep), (expected.rows, *expected.deep), strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_images_of_one_shape_that_wait_are_computed_at_once(model: Model) -> None:
    """Of one request and of another one; each has the features that it has alone."""
    vision = _vision(model)
    pictures = [vision.reader.read(image(seed)) for seed in range(4)]
    alone = [vision.see(picture) for picture in pictures]
    num_pieces = sum(1 for _ in compute(vision.tower, pictures[:1]))
    together = _vision(model)
    together.tower.pieces.max_work = METAL_WORK  # more than four have
    first, second = (ImageEncoding(together, pictures[at : at + 2]) for at in (0, 2))
    left = ImageEncoding(together, [together.reader.read(image(5))])
    left.leave()
    most = together.tower.num_together(pictures[0], 1 << 30)
    assert (most == 1) == (model.config["model_type"] in ONE_BY_ONE)
    num_advances = 1
    while (num_rows := first.advance(1)) is None:
        num_advances += 1
    assert num_rows == sum(picture.num_rows for picture in pictures[:2])
    assert num_advances <= (num_pieces if most > 1 else 2 * num_pieces) + 1
    assert together.stats().num_computed == (4 if most == 4 else 2)
    while second.advance(1) is None:
        assert most < 4
    assert together.stats().num_computed == 4
    for picture, expected in zip(pictures, alone, strict=True):
        found = together.see(picture)
        for a, b in zip((found.rows, *found.deep), (expected.rows, *expected.deep), strict=True):
            assert mx.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_nothing_is_evaluated_while_the_graph_of_a_tower_is_built(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the piece between two steps would be many layers."""
    vision = _vision(model)
    evaluated: list[Any] = []
    seeing = ImageEncoding(vision, [vision.reader.read(A)])
    plain = mx.eval

    def watched(*arrays: Any) -> None:
        evaluated.extend(each for _, each in tree_flatten(arrays) if isinstance(each, mx.array))
        plain(*arrays)

    monkeypatch.setattr(mx, "eval", watched)
    while seeing.advance(1) is None:
        assert len(evaluated) == 1  # a layer
        evaluated.clear()


def test_an_image_whose_rows_are_cached_is_not_computed_again(
    model: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.model.vision_check.MAX_FEATURES", 1)
    said = ("What is this? ", A, " Say it in a few words, and then say it once more, please.")
    other = ("And this? ", B, " Say it in a few words, and then say it once more, please.")
    llm = serve()
    agree(model, llm, [said])
    agree(model, llm, [other])  # whose features are the only ones that are kept
    assert agree(model, llm, [said])[0].usage.cached_tokens > 0
    assert llm.stats().vision.num_computed == 2


def test_features_that_were_given_up_are_computed_again(
    model: Model, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.model.vision_check.MAX_FEATURES", 1)
    llm = serve(max_num_batched_tokens=64, max_num_seqs=8)
    agree(model, llm, list(QUESTIONS.values()))
    stats = llm.stats().vision
    assert stats.num_computed > 3
    assert stats.num_kept == 1


def test_answers_to_one_prompt_share_its_image(model: Model, shared: LLM) -> None:
    said = QUESTIONS["two images"]
    [output] = shared.chat(
        conversation(said),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, n=3),
        use_tqdm=False,
    )
    for each in (output, *output.alternatives):
        assert each.token_ids == model.answer(said)


@pytest.mark.slow
def test_pages_of_an_image_are_found_on_disk_after_a_restart(
    model: Model, serve: Serve, tmp_path: Path, unhurried_disk: None
) -> None:
    said = ("What is this? ", A, " Say it in a few words, and then say it once more, please.")
    disk = {"disk_cache_dir": str(tmp_path), "disk_cache_size": 0.1}
    with serve(**disk) as llm:
        agree(model, llm, [said])
    with serve(**disk) as llm:
        [output] = agree(model, llm, [said])
        assert output.usage.cache is not None
        assert output.usage.cache.num_from_disk > 0
        assert llm.stats().vision.num_computed == 0  # no row of the image is computed
        other = ("What is this? ", B, *said[2:])
        [output] = agree(model, llm, [other])
        assert output.usage.cached_tokens <= 16
        assert llm.stats().vision.num_computed == 1


def test_a_marker_of_images_in_a_text_is_text(model: Model, shared: LLM) -> None:
    marker = model.marker
    said = {"role": "assistant", "content": marker}
    asked = [*conversation(("a", A)), said, *conversation(("b",))]
    with pytest.raises(InvalidParameter, match="marker of images"):
        shared.chat(asked, PARAMS, use_tqdm=False)
    [typed] = ask(shared, [(f"a{marker}", A)])
    [plain] = ask(shared, [("a", A)])
    assert typed.usage.image_tokens == plain.usage.image_tokens


def test_the_library_takes_files_bytes_and_pixels(shared: LLM, tmp_path: Path) -> None:
    pillow = Pillow.fromarray(A.pixels)
    path = tmp_path / "a.png"
    pillow.save(path)
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image", "path": path},
        {"type": "image", "path": str(path)},
        {"type": "image", "bytes": path.read_bytes()},
        {"type": "image", "image": pillow},
        {"type": "image", "image": A.pixels},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    text = {"type": "text", "text": "What?"}
    [expected] = ask(shared, [("What?", A)])
    asked = [[{"role": "user", "content": [text, part]}] for part in parts]
    for output in shared.chat(asked, PARAMS, use_tqdm=False):
        assert output.token_ids == expected.token_ids


def test_an_image_that_cannot_be_read_is_refused(shared: LLM) -> None:
    for part, said in (
        ({"type": "image"}, "needs one of path, bytes, image"),
        ({"type": "image", "path": "/nowhere/cat.png"}, "cannot be read: .*/nowhere/cat.png"),
        ({"type": "image", "bytes": b"GIF89a"}, "the image"),
        ({"type": "image", "bytes": "cat"}, "must be bytes, got str"),
        ({"type": "image", "image": "cat"}, "neither Pillow's nor an array of pixels"),
        ({"type": "image_url", "image_url": {"url": "cat.png"}}, "needs a URL"),
    ):
        content = [{"type": "text", "text": "What?"}, part]
        with pytest.raises(InvalidParameter, match=said) as caught:
            shared.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
        assert caught.value.name == "messages[0].content[1]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "gemma4_31b"])
def test_rows_of_an_image_see_all_of_it_where_windows_have_pages_of_their_own(
    kind: str, tmp_path: Path
) -> None:
    """The images are larger than the window."""
    model = Model(write_vision_model(tmp_path, kind))
    sizes = {**SIZES, "num_pages": 12, "num_window_pages": 7, "max_model_len": 192}
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 5}
    questions = [*QUESTIONS.values(), *reversed(QUESTIONS.values())]
    with LLM(str(model.folder), **{**sizes, **options}) as llm:
        with begun_together(len(questions)):
            agree(model, llm, questions)
        agree(model, llm, [QUESTIONS["two images"]])


@pytest.mark.slow
def test_an_image_that_no_step_has_room_for_is_refused(tmp_path: Path) -> None:
    """Its rows attend to one another, so that one step computes them."""
    folder = str(write_vision_model(tmp_path, "gemma3"))
    sizes = {"max_num_batched_tokens": 20, "max_num_seqs": 6}
    with LLM(folder, disable_log_stats=True, num_pages=32, page_size=16, **sizes) as llm:
        with pytest.raises(
            InvalidParameter, match=r"an image has 16 rows, .* a step has room for 15"
        ):
            ask(llm, [("What?", A)])
        [output] = llm.chat([{"role": "user", "content": "What?"}], PARAMS, use_tqdm=False)
        assert len(output.token_ids) == NUM_TOKENS


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "qwen3_vl" else pytest.mark.long)
        for kind in IN_16_BITS
    ],
)
def test_in_16_bits_tokens_are_those_of_mlx_vlm_near_ties_apart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_in_16_bits(tmp_path, kind)
    whole = read_whole(folder)
    # Weights and features as they are stored, which a CPU has in 32 bits.
    monkeypatch.setattr(
        "mlxserve.engine_part.load_probed",
        lambda files, **options: load_probed(files, **{**options, "is_metal": True}),
    )
    questions = list(QUESTIONS.values())
    with LLM(str(folder), disable_log_stats=True, num_pages=96, page_size=16) as llm:
        answers = [output.token_ids for output in ask(llm, questions)]
    assert len(set(answers)) > 3
    below = [
        below_best(folder, whole, *said, answer=answer)
        for said, answer in zip(questions, answers, strict=True)
    ]
    assert np.mean([each == 0 for each in itertools.chain(*below)]) > 0.9
    assert max(itertools.chain(*below)) < 0.1
