"""Converts a GGUF file's metadata to config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlxserve.core.errors import UnsupportedModel, in_one_line
from mlxserve.hub.gguf.completions import COMPLETIONS
from mlxserve.hub.gguf.families import FAMILIES
from mlxserve.hub.gguf.family import COMMON_FLAGS, COMMON_KEYS, Family
from mlxserve.hub.gguf.reader import Header
from mlxserve.hub.gguf.rotary import rope_scaling

# Ends of an answer or of its turn, by their texts, as llama.cpp finds them: files name only one of them.
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581turn\uff5c>",
    }
)
_NOT_TEXT = (3, 4)  # kinds of tokens: control, user-defined
_NEEDED = {"block_count": 2_000, "embedding_length": 1 << 24, "attention.head_count": 1 << 24}
# Defaults of llama.cpp (common_params_sampling in common.h), by its keys.
_SAMPLING: Mapping[str, tuple[str, float]] = {
    "temp": ("temperature", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "penalty_repeat": ("repetition_penalty", 1.0),
}
_ODD = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


def architecture(header: Header) -> str:
    """Raises UnsupportedModel for what is not a language model of a known architecture."""
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(
            f"This GGUF file is not a model, but says that it is of type {kind!r:.40}. Name the "
            "model's file."
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModel(
            f"GGUF files of the architecture {name!r:.40} are not supported, only of "
            f"{', '.join(sorted(FAMILIES))}. Take the model's MLX conversion."
        )
    return name


def family(header: Header) -> Family:
    return FAMILIES[architecture(header)]


def model_config(header: Header) -> dict[str, Any]:
    """Return the metadata as config.json. Raises UnsupportedModel for missing or odd values."""
    try:
        return _config(header)
    except _ODD as error:
        raise UnsupportedModel(
            f"A value in the GGUF file's header is not of its kind: {in_one_line(error)}. Take another "
            "conversion of the model."
        ) from error


def _config(header: Header) -> dict[str, Any]:
    name, rules = architecture(header), family(header)
    values = {
        key.removeprefix(f"{name}."): _plain(value)
        for key, value in header.metadata.items()
        if key.startswith(f"{name}.")
    }
    if "token_embd.weight" not in header.tensors:
        raise UnsupportedModel(
            "The GGUF file has no token_embd.weight, so it is not a whole model. If the model is "
            "split into several files, all of them must be in one folder."
        )
    if missing := sorted(_NEEDED.keys() - values.keys()):
        raise UnsupportedModel(
            f"The GGUF file does not say {', '.join(f'{name}.{key}' for key in missing)}. Take "
            "another conversion of the model."
        )
    is_recurrent = "ssm.inner_size" in values
    for key, maximum in _NEEDED.items():
        minimum = 0 if is_recurrent and key == "attention.head_count" else 1
        if not isinstance(values[key], int) or not minimum <= values[key] <= maximum:
            raise UnsupportedModel(
                f"The GGUF file's {name}.{key} must be a whole number from {minimum} to {maximum}, got "
                f"{values[key]!r:.40}."
            )
    config: dict[str, Any] = {}
    for keys in (COMMON_KEYS, rules.keys):
        config |= {option: values[key] for key, option in keys.items() if key in values}
    config |= {
        "model_type": rules.model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": end_tokens(header),
        **{
            option: tensor in header.tensors
            for option, tensor in {**COMMON_FLAGS, **rules.flags}.items()
        },
        **{
            option: _some_layer_has(first, second, header)
            for option, (first, second) in rules.without.items()
        },
        **rules.fixed,
    }
    # The last blocks may be a head that drafts.
    layers = values["block_count"] - int(values.get("nextn_predict_layers", 0))
    config["num_hidden_layers"] = layers
    if config["num_attention_heads"] == 0:
        del config["num_attention_heads"]
    else:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if (scaling := rope_scaling(header, values)) is not None:
        config["rope_scaling"] = scaling
    complete = COMPLETIONS.get(name)
    return config if complete is None else complete(config, values)


def _some_layer_has(first: str, second: str, header: Header) -> bool:
    """True if a layer has the first tensor without the second one."""
    end = f".{first}.weight"
    return any(
        f"{name.removesuffix(end)}.{second}.weight" not in header.tensors
        for name in header.tensors
        if name.endswith(end)
    )


def end_tokens(header: Header) -> list[int]:
    """Return the ids of the end tokens, the file's own first."""
    named = (header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    tokens = header.metadata.get("tokenizer.ggml.tokens") or ()
    kinds = header.metadata.get("tokenizer.ggml.token_type") or ()
    by_text = (
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in _NOT_TEXT and token in _ENDS
    )
    token_ids = dict.fromkeys(
        token_id for token_id in (*named, *by_text) if isinstance(token_id, int)
    )
    texts = {number: tokens[number] for number in token_ids if 0 <= number < len(tokens)}
    # Gpt-oss, whose <|end|> ends a message.
    if {"<|return|>", "<|call|>"} <= set(texts.values()):
        texts = {number: text for number, text in texts.items() if text != "<|end|>"}
    return list(texts)


def generation_config(header: Header) -> Mapping[str, Any]:
    """Return end tokens and default sampling: the file's values, else llama.cpp's defaults."""
    sampling = {
        option: _plain(header.metadata.get(f"general.sampling.{key}", default))
        for key, (option, default) in _SAMPLING.items()
    }
    return {"eos_token_id": end_tokens(header), **sampling}


def _plain(value: Any) -> Any:
    """Round a float32 to its shortest decimal: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
