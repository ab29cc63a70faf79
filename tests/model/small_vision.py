"""Small models that see, with random weights, as folders; and what mlx-vlm answers with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxserve.hub.embedded import model_path
from mlxserve.images.image import Image
from mlxserve.model.definitions import ModelArguments, module_of
from mlxserve.model.registered_processors import load_processor, processor_class
from tests.model.small_models import randomise

Said: TypeAlias = tuple[str | Image, ...]  # by a user, in this order

# By kind: what a template writes for an image, its tokens, which of them the configuration names, and files.
VISION_MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("vision_models.json").read_text()
)
# mlx's product over experts takes 32 bits only on a CPU.
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
IN_16_BITS = [kind for kind in VISION_MODELS if not kind.endswith("_moe")]
_TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- IMAGE }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def write_vision_model(folder: Path, kind: str, files: dict[str, Any] | None = None) -> Path:
    """A random model as a folder that its library's `load` reads; with other `files` than the kind's."""
    files = files or VISION_MODELS[kind]
    names = _write_tokenizer(folder, files)
    vocab_size = max(names.values()) + 1
    ids = {name: names[token] for name, token in files["ids"].items()}
    config = {"model_type": kind, **files["config"], "vocab_size": vocab_size, **ids}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": vocab_size}
    for name in ("preprocessor", "processor"):
        (folder / f"{name}_config.json").write_text(json.dumps(files[name]))
    (folder / "config.json").write_text(json.dumps(config))
    whole = whole_model(config)
    randomise(whole)
    arrays = dict(tree_flatten(whole.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    return folder


def whole_model(config: dict[str, Any]) -> Any:
    """mlx-vlm's, with the weights that it makes."""
    module = module_of(config)
    assert module is not None
    model = module.Model(ModelArguments(module).from_dict(json.loads(json.dumps(config))))
    model.eval()
    return model


def read_whole(folder: Path) -> Any:
    """mlx-vlm's model of a folder."""
    model = whole_model(json.loads((folder / "config.json").read_text()))
    model.load_weights(str(folder / "model.safetensors"))
    return model


def bidirectional_layers(config: dict[str, Any]) -> str | None:
    """Layers in which rows of an image attend in both directions: "all", "windows" or None."""
    if config["model_type"] == "gemma3":
        return "all"
    is_asked = config.get("text_config", {}).get("use_bidirectional_attention") == "vision"
    return "windows" if is_asked else None


class _TwoWayCache(KVCache):  # type: ignore[misc]  # mlx-lm's has no types
    """Gives mlx-vlm's layers the masks of transformers' `create_masks_for_vision_model`, of Gemma 3 and of Gemma 4,
    position by position."""

    def __init__(self, is_image: list[bool], layers: str) -> None:
        super().__init__()
        self._layers = layers
        begins = [inside and not before for before, inside in pairwise([False, *is_image])]
        numbers = zip(is_image, accumulate(begins), strict=True)
        # As `get_block_sequence_ids_for_mask`: the number of an image, or -1.
        self._groups = [number if inside else -1 for inside, number in numbers]

    def make_mask(
        self, num_rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        end = self.offset + num_rows
        rows = range(self.offset, end)
        return mx.array(
            [[self._sees(row, seen, window_size) for seen in range(end)] for row in rows]
        )

    def _sees(self, row: int, seen: int, window: int | None) -> bool:
        is_same = (
            max(row, seen) < len(self._groups) and self._groups[row] == self._groups[seen] > -1
        )
        if self._layers == "windows" and window is None:
            is_same = False
        return (seen <= row or is_same) and (window is None or seen > row - window)


def image(seed: int, height: int = 80, width: int = 110) -> Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3))
    return Image.from_pixels(pixels.astype(np.uint8))


def _write_tokenizer(folder: Path, files: dict[str, Any]) -> dict[str, int]:
    """The embedded model's with the kind's tokens of images: their ids."""
    content = json.loads((model_path() / "tokenizer.json").read_text())
    known = [*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]
    names = {token: max(known) + 1 + n for n, token in enumerate(files["tokens"])}
    like = content["added_tokens"][0]
    content["added_tokens"] += [{**like, "id": n, "content": token} for token, n in names.items()]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((model_path() / "tokenizer_config.json").read_text())
    settings |= files["tokenizer"]
    settings["chat_template"] = _TEMPLATE.replace("IMAGE", repr(files["image"]))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return names


def rendered(kind: str, *said: str | Image) -> str:
    """One user's message in the folder's template."""
    mark = VISION_MODELS[kind]["image"]
    parts = [mark if isinstance(part, Image) else part for part in said]
    return f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"


def _as_mlx(value: Any) -> Any:
    """A list of images stays one only if their sizes differ (Gemma 4); Aya's processor makes one of its tiles."""
    if isinstance(value, list) and isinstance(value[0], np.ndarray):
        if len({each.shape for each in value}) > 1:
            return [mx.array(each) for each in value]
        value = np.stack(value)
    return mx.array(value)


def answer_of_mlx_vlm(
    folder: Path, whole: Any, *said: str | Image, num_tokens: int
) -> tuple[int, ...]:
    """With mlx-vlm's own processor, and as it generates: a prompt by its embeddings, then token after token."""
    answer: list[int] = []
    for logits in _logits_of_mlx_vlm(folder, whole, said, answer):
        answer.append(int(mx.argmax(logits).item()))
        if len(answer) == num_tokens:
            break
    return tuple(answer)


def below_best(folder: Path, whole: Any, *said: str | Image, answer: Sequence[int]) -> list[float]:
    """How far each token of an answer is below mlx-vlm's best after those before it, in standard deviations of
    the logits."""
    before: list[int] = []
    found = []
    for token, logits in zip(answer, _logits_of_mlx_vlm(folder, whole, said, before), strict=False):
        wide = logits.astype(mx.float32)
        found.append(float(((wide.max() - wide[token]) / mx.std(wide)).item()))
        before.append(token)
    return found


def _logits_of_mlx_vlm(
    folder: Path, whole: Any, said: Sequence[str | Image], answer: Sequence[int]
) -> Iterator[mx.array]:
    """(vocabulary,) after the prompt, and after each token that is appended to `answer` meanwhile."""
    from PIL import Image as Pillow

    config = json.loads((folder / "config.json").read_text())
    images = [Pillow.fromarray(part.pixels) for part in said if isinstance(part, Image)]
    text = rendered(config["model_type"], *said)
    made = load_processor(processor_class(config), folder)(text=[text], images=images or None)
    inputs = {name: _as_mlx(value) for name, value in made.items() if value is not None}
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask")
    language = whole.language_model
    for name in ("_position_ids", "_rope_deltas"):  # of the last prompt
        setattr(language, name, None)
    found = whole.get_input_embeddings(ids, mask=mx.ones_like(ids), **inputs).to_dict()
    given = {name: value for name, value in found.items() if value is not None}
    rope_deltas = {name: given[name] for name in ("rope_deltas",) if name in given}
    cache = make_prompt_cache(language)
    if (layers := bidirectional_layers(config)) is not None:
        image_token = next(config[name] for name in _IMAGE_TOKENS if name in config)
        is_image = [token == image_token for token in ids[0].tolist()]
        cache = [_TwoWayCache(is_image, layers) for _ in cache]
    logits = language(ids, cache=cache, **given).logits
    while True:
        yield logits[0, -1]
        logits = language(mx.array([[answer[-1]]]), cache=cache, **rope_deltas).logits


def conversation(said: Said) -> list[Mapping[str, Any]]:
    """A conversation of one message, of these texts and images."""
    parts = [
        {"type": "image", "image": part}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in said
    ]
    return [{"role": "user", "content": parts}]
