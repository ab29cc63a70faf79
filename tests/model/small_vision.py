"""Small models that see, with random weights, as folders; and what mlx-vlm answers with them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.hub.embedded import model_path
from mlxserve.images.image import Image
from mlxserve.model.definitions import ModelArguments, defer_mlx_vlm, module_of
from mlxserve.model.image_processor import load_processor

_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# What the templates of Qwen's models do with parts, and no more.
_TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "out_hidden_size": 128,
    "num_heads": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {  # as published: what is of the text is beside the parts
        **_TEXT,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {**_VISION, "model_type": "qwen2_5_vl", "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [12, 10, 10],
            },
        },
        "vision_config": {
            **_VISION,
            "model_type": "qwen3_vl",
            "patch_size": 16,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
        },
        "vision_config": {
            **_VISION,
            "model_type": "qwen3_5",
            "num_position_embeddings": 256,
            "patch_size": 16,
            "deepstack_visual_indexes": [],
        },
    },
}


def write_vision_model(folder: Path, kind: str) -> Path:
    """A random model as a folder that its library's `load` reads."""
    names = _write_tokenizer(folder)
    ids = {
        "vision_start_token_id": names["<|vision_start|>"],
        "vision_end_token_id": names["<|vision_end|>"],
        "image_token_id": names["<|image_pad|>"],
        "video_token_id": names["<|video_pad|>"],
    }
    vocab_size = max(names.values()) + 1
    config = {**KINDS[kind], "model_type": kind, "vocab_size": vocab_size, **ids}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": 56 * 56, "max_pixels": 224 * 224})
    )
    arrays = dict(tree_flatten(_random(whole_model(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    return folder


def whole_model(config: dict[str, Any]) -> Any:
    """mlx-vlm's, with the weights that it makes."""
    defer_mlx_vlm()
    module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    model = module.Model(ModelArguments(module).from_dict(json.loads(json.dumps(config))))
    model.eval()
    return model


def read_whole(folder: Path) -> Any:
    """mlx-vlm's model of a folder."""
    model = whole_model(json.loads((folder / "config.json").read_text()))
    model.load_weights(str(folder / "model.safetensors"))
    return model


def image(seed: int, height: int = 80, width: int = 110) -> Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3))
    return Image.of(pixels.astype(np.uint8))


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """The embedded model's with Qwen's tokens of images: their ids."""
    content = json.loads((model_path() / "tokenizer.json").read_text())
    known = [*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]
    names = {token: max(known) + 1 + n for n, token in enumerate(_TOKENS)}
    like = content["added_tokens"][0]
    content["added_tokens"] += [{**like, "id": n, "content": token} for token, n in names.items()]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((model_path() / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return names


def _random(model: Any) -> Any:
    mx.random.seed(1)

    def drawn(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.random.normal(array.shape)
        return noise * 0.3 + 1.0 if array.ndim <= 1 else noise * array.shape[-1] ** -0.5

    model.update(tree_map(drawn, model.parameters()))
    mx.eval(model.parameters())
    return model


def rendered(*said: str | Image) -> str:
    """One user's message in the folder's template."""
    parts = [
        "<|vision_start|><|image_pad|><|vision_end|>" if isinstance(part, Image) else part
        for part in said
    ]
    return f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"


def answer_of_mlx_vlm(
    folder: Path, whole: Any, *said: str | Image, num_tokens: int
) -> tuple[int, ...]:
    """With mlx-vlm's own processor, and as it generates: a prompt by its embeddings, then token after token."""
    from PIL import Image as Pillow

    module = module_of(json.loads((folder / "config.json").read_text()))
    assert module is not None
    images = [Pillow.fromarray(part.pixels) for part in said if isinstance(part, Image)]
    processor = load_processor(module, folder)
    inputs = dict(processor(text=[rendered(*said)], images=images or None))
    ids = mx.array(inputs.pop("input_ids"))
    inputs.pop("attention_mask")
    text = whole.language_model
    for name in ("_position_ids", "_rope_deltas"):  # of the last prompt
        setattr(text, name, None)
    features = whole.get_input_embeddings(ids, **inputs).to_dict()
    given = {name: value for name, value in features.items() if value is not None}
    rope_deltas = {name: given[name] for name in ("rope_deltas",) if name in given}
    cache, found = make_prompt_cache(text), []
    logits = text(ids, cache=cache, **given).logits
    for _ in range(num_tokens):
        found.append(int(mx.argmax(logits[0, -1]).item()))
        logits = text(mx.array([[found[-1]]]), cache=cache, **rope_deltas).logits
    return tuple(found)
