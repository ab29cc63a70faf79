"""Models of real geometries with random weights: measure speed without a download.

They are written once as ordinary model folders, with a tokenizer and a chat template, so that any
server can load them. Their answers are noise but countable: token 17 is the word `w17`, so a prompt
of n words has n tokens, and every token of an answer is visible in its text.

A model that counts answers `w17` with `w18 w19 ...`, for loads that need a known answer. Its layers
add nothing to a token's embedding, at the full cost of their geometry, and its head knows the
embedding of `w17` as `w18`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.core.config import data_home
from mlxserve.core.errors import ModelNotFound
from mlxserve.system.files import make_marked_folder
from mlxserve.system.machine import prepare

if TYPE_CHECKING:
    import mlx.core as mx

PREFIX = "synthetic:"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last ids
_ROLES = ("system", "user", "assistant")  # the words before them
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
_COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}
_LLAMA_100M = {
    **_COMMON,
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 26000,
    "max_position_embeddings": 32768,
}
_COUNTING = "counting-"  # prefix of models that count
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-100m": _LLAMA_100M,
    "counting-100m": {
        **_LLAMA_100M,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
}


def synthetic_model(name: str) -> Path:
    """The folder of a synthetic model, written on first use. Raises ModelNotFound."""
    kind = name.removeprefix(PREFIX)
    if kind not in GEOMETRIES:
        known = ", ".join(PREFIX + known for known in GEOMETRIES)
        raise ModelNotFound(f"there is no synthetic model {name!r}; there are {known}")
    folder = data_home() / "synthetic" / f"{kind}-words"
    if not (folder / "config.json").exists():
        _write(folder, GEOMETRIES[kind], counts=kind.startswith(_COUNTING))
    return folder


def _write(folder: Path, config: dict[str, Any], *, counts: bool) -> None:
    """Write a temporary folder and rename it, so that an interrupted run leaves no partial model."""
    prepare()
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_flatten

    make_marked_folder(folder.parent)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    if counts:
        _let_count(weights)
    mx.save_safetensors(str(draft / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_tokenizer(draft, config["vocab_size"])
    end = config["vocab_size"] - 1
    (draft / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    draft.rename(folder)


def _let_count(weights: dict[str, mx.array]) -> None:
    """Make a llama count, in place; its head must not be its embedding."""
    import mlx.core as mx

    for name, array in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(array)
    weights["lm_head.weight"] = mx.roll(weights["model.embed_tokens.weight"], 1, 0)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    last = (*_ROLES, *_SPECIAL)
    words = [f"w{index}" for index in range(vocab_size - len(last))]
    ids = {word: index for index, word in enumerate((*words, *last))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[-1],
        "pad_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
