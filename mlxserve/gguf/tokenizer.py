"""The tokenizer.json and tokenizer_config.json that a GGUF file's metadata means.

transformers builds the tokenizer (`transformers.integrations.gguf`); how the text is split before, it
knows for some families only, and the others are here, from llama.cpp's `llama_vocab` (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxserve.errors import UnsupportedModel, in_one_line
from mlxserve.gguf.reader import Header

_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, AttributeError)


def build_tokenizer(header: Header, architecture: str) -> Any:
    """A `tokenizers.Tokenizer`. Raises UnsupportedModel."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    given = {
        name: header.metadata[f"tokenizer.ggml.{key}"]
        for key, name in _KEYS.items()
        if f"tokenizer.ggml.{key}" in header.metadata
    }
    try:
        backend, _ = convert_gguf_tokenizer(architecture, given)
    except Exception as error:
        # The Rust library raises a bare Exception for a vocabulary that it cannot read.
        if type(error) is not Exception and not isinstance(error, _READ_ERRORS):
            raise
        raise UnsupportedModel(
            f"The tokenizer in the GGUF file cannot be read: {in_one_line(error)}. Take another "
            "conversion of the model."
        ) from error
    if given["tokenizer_type"] == "gpt2":
        split = _splits().get(given.get("pre_tokenizer_type", "default"))
        if split is not None:
            backend.pre_tokenizer = split()
    return backend


def _splits() -> Mapping[str, Callable[[], Any]]:
    from tokenizers import pre_tokenizers as pre

    def single_digits() -> Any:
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(False)])

    return {"smollm": single_digits}


def tokenizer_config(header: Header) -> dict[str, Any]:
    """As a model folder's tokenizer_config.json."""
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # llama.cpp's default where older files say nothing
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for name, key in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
