"""A model whose images cannot be served has a sentence that says why, and its text is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from tokenizers.processors import TemplateProcessing

from mlxserve import LLM, SamplingParams
from mlxserve.core.errors import InvalidParameter
from mlxserve.hub.files import ModelFiles, find_model
from mlxserve.model import registered_processors, vision_check
from mlxserve.model.attention import AttentionChoice, choose_attention, load_probed
from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.image_processor import ImageProcessor
from mlxserve.model.load import load
from mlxserve.model.registered_processors import load_processor, processor_class
from mlxserve.model.vision import Vision
from mlxserve.model.vision_check import NoVision, vision_of
from mlxserve.system.extras import package_command
from tests.model.small_vision import image, write_vision_model

Model = tuple[ModelFiles, AttentionChoice]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """For refusals before the probe, which changes a model's layers."""
    return read(folder)


def read(folder: Path) -> Model:
    files = find_model(str(folder))
    loaded = load(files, is_metal=False, memory_limit=1 << 32)
    return files, choose_attention("cpu", loaded, may_fuse=False)


def vision(model: Model) -> Vision | None:
    files, choice = model
    return vision_of(files, choice.loaded, choice.backends, is_metal=False, memory_limit=1 << 32)


def refusal(model: Model) -> str:
    with pytest.raises(NoVision) as refused:
        vision(model)
    begin, _, reason = str(refused.value).partition(" cannot be served: ")
    assert begin == "the vision of this qwen3_vl model"
    return reason


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


def test_a_model_with_its_processor_sees(folder: Path) -> None:
    assert vision(read(folder)) is not None


def test_no_registered_processor(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_processors, "registrations", lambda _: ())
    assert refusal(model) == "mlx-vlm registers no processor of images for 'qwen3_vl'"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ModuleNotFoundError("No module named 'no_such'", name="no_such"),
            "its processor cannot be loaded: the package no_such is missing "
            f"({package_command('no-such')}, and restart)",
        ),
        (Exception("odd"), "its processor cannot be loaded: Exception: odd"),
        (RecursionError("deep"), "its processor cannot be loaded: deep"),
    ],
)
def test_a_processor_that_cannot_be_loaded(
    error: Exception, sentence: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3VLProcessor, "from_pretrained", fail(error))
    assert refusal(model) == sentence


def test_a_tower_that_cannot_be_loaded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_check, "load_whole", fail(ValueError("weights lack a.b")))
    assert refusal(model) == "mlx-vlm cannot load its tower: weights lack a.b"


def test_a_processor_that_fails_on_an_image(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3VLProcessor, "__call__", fail(KeyError("size")))
    assert refusal(model) == "its processor cannot be used: KeyError: 'size'"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<|image_pad|>b", "<|image_pad|> b"),  # as Idefics 2 writes text after an image
        ("<|image_pad|><|image_pad|>", "<|image_pad|> <|image_pad|>"),
        ("a<|image_pad|>", "<|image_pad|>a"),  # as InternVL's older processor writes images
    ],
)
def test_a_processor_that_changes_what_is_beside_an_image(
    before: str, after: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Qwen3VLProcessor.__call__

    def changing(self: Any, *, text: list[str], **others: Any) -> Any:
        return plain(self, text=[each.replace(before, after) for each in text], **others)

    monkeypatch.setattr(Qwen3VLProcessor, "__call__", changing)
    assert refusal(model) == (
        "its processor cannot be used: it does not write an image in place of the placeholder alone"
    )


def test_a_probe_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = vision_check.dense_logits
    monkeypatch.setattr(vision_check, "dense_logits", lambda *given: dense(*given)[::-1])
    assert refusal(read(folder)).startswith(
        "the probe of an image fails: its logits beside an image are not mlx-vlm's"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "gemma4_31b"])
def test_a_probe_that_looks_back_only_is_not_that_of_both_directions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = read(write_vision_model(tmp_path, kind))
    monkeypatch.setattr(Bidirectional, "from_config", lambda _: None)
    dense = vision_check.dense_logits
    layers = Bidirectional.ALL_LAYERS if kind == "gemma3" else Bidirectional.WINDOW_LAYERS

    def both_ways(whole: Any, sample: Any, image_token: int, _: Any) -> Any:
        picture = replace(sample.picture, is_bidirectional=True)
        return dense(whole, replace(sample, picture=picture), image_token, layers)

    monkeypatch.setattr(vision_check, "dense_logits", both_ways)
    with pytest.raises(NoVision, match="its logits beside an image are not mlx-vlm's"):
        vision(choice)


def test_text_is_served_whatever_the_vision_raises(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_check, "module_of", fail(Exception("odd")))
    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(str(folder), disable_log_stats=True, num_pages=32, page_size=16) as llm:
        [output] = llm.chat([{"role": "user", "content": "What?"}], params, use_tqdm=False)
        assert output.token_ids
        asked = [{"role": "user", "content": [{"type": "image", "image": image(1).pixels}]}]
        with pytest.raises(InvalidParameter, match="cannot be served: Exception: odd"):
            llm.chat(asked, params, use_tqdm=False)


@pytest.mark.parametrize("ends_with_token", [False, True])
def test_ids_of_an_image_have_none_of_the_tokens_around_a_text(
    ends_with_token: bool, tmp_path: Path
) -> None:
    """LLaVA's processor takes no `add_special_tokens`."""
    folder = write_vision_model(tmp_path, "llava")
    processor = load_processor(processor_class({"model_type": "llava"}), folder)
    token = int(processor.tokenizer.convert_tokens_to_ids("<image>"))
    plain = ImageProcessor(processor, token, has_grid=False).make(image(1))
    begin = "<|im_start|>"
    whole = f"{begin} $A {begin}" if ends_with_token else f"{begin} $A"
    ids = [(begin, processor.tokenizer.convert_tokens_to_ids(begin))]
    processor.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=whole, special_tokens=ids
    )
    reader = ImageProcessor(processor, token, has_grid=False)
    assert reader.make(image(1)).ids == plain.ids
    reader.check_neighbours(image(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe"])
def test_a_model_with_experts_sees(kind: str, tmp_path: Path) -> None:
    choice = load_probed(
        find_model(str(write_vision_model(tmp_path, kind))),
        is_metal=False,
        memory_limit=1 << 32,
        kv_cache_dtype="auto",
        attention_backend="cpu",
    )
    assert choice.loaded.dtype == mx.float32
    assert choice.loaded.vision is not None, choice.loaded.no_vision_reason
