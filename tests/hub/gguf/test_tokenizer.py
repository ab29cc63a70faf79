"""A file's tokenizer splits, joins and begins texts as llama.cpp does, and has no token of its own."""

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.config import end_tokens
from mlxserve.hub.gguf.reader import Header
from mlxserve.hub.gguf.tokenizer import SPLITS, build_tokenizer, tokenizer_config
from tests.hub.gguf.files import byte_level_vocabulary

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "ab", "▁a", "▁ab", "c"]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, *PIECES],
    "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * 7],
    "tokenizer.ggml.scores": [-1000.0] * 260 + [-7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
}
TEXT = "Well, it's 1,234.5 km!\n\n  def f(x):\treturn x\u00b2 # \u4f60\u597d 42 \U0001f600"


def tokenizer(values: dict[str, Any], architecture: str = "llama", **changes: Any) -> Any:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return build_tokenizer(Header({**values, **changed}, {}, ""), architecture)


def test_each_way_to_split_gives_the_text_back() -> None:
    for kind in SPLITS:
        found = tokenizer(byte_level_vocabulary(), pre=kind)
        assert found.decode(found.encode(TEXT).ids) == TEXT, kind


def test_a_text_is_split_as_llama_cpp_splits_it() -> None:
    for kind, parts in [
        ("default", ["abc", "Ġ", "123", "4", "!", "Ġx"]),
        ("smollm", ["abc", "Ġ", "1", "2", "3", "4", "!", "Ġx"]),
        ("gpt-2", ["abc", "Ġ1234", "!", "Ġx"]),
        ("glm4", ["abc", "Ġ", "123", "4", "!", "Ġx"]),
        ("llama-bpe", ["abc", "Ġ", "123", "4", "!", "Ġx"]),
        ("deepseek-v3", ["abc", "Ġ", "123", "4", "!", "Ġx"]),
        ("deepseek-coder", ["abc", "Ġ", "1", "2", "3", "4", "!", "Ġx"]),
        ("qwen2", ["abc", "Ġ", "1", "2", "3", "4", "!", "Ġx"]),
    ]:
        found = tokenizer(byte_level_vocabulary(), pre=kind)
        split = [text for text, _ in found.pre_tokenizer.pre_tokenize_str("abc 1234! x")]
        assert split == parts, kind


def test_an_unknown_way_to_split_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="splits text in a way that is not known"):
        tokenizer(byte_level_vocabulary(), pre="unheard-of")


@pytest.mark.parametrize("missing", ["tokens", "model", "merges"])
def test_a_vocabulary_without_a_part_is_refused(missing: str) -> None:
    values = byte_level_vocabulary()
    del values[f"tokenizer.ggml.{missing}"]
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        tokenizer(values)


def test_no_tokens_are_added_to_the_files() -> None:
    values = byte_level_vocabulary()
    values["tokenizer.ggml.tokens"][0] = "<|begin|>"
    assert tokenizer(values).get_vocab_size(with_added_tokens=True) == 288
    for architecture in ("llama", "gemma3", "phi3"):
        found = tokenizer(SENTENCEPIECE, architecture)
        assert found.get_vocab_size(with_added_tokens=True) == 267


def test_llama_3_takes_a_word_that_is_a_token_before_its_merges() -> None:
    values = byte_level_vocabulary()
    values["tokenizer.ggml.tokens"][-1] = "word"  # no merges lead to it
    assert tokenizer(values, pre="llama-bpe").encode("word").tokens[-1:] == ["word"]
    assert tokenizer(values, pre="qwen2").encode("word").tokens == list("word")


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_begins_with_its_token_unless_the_file_says_no(architecture: str) -> None:
    assert tokenizer(SENTENCEPIECE, architecture).encode("ab").ids[0] == 2
    without = tokenizer(SENTENCEPIECE, architecture, add_bos_token=False)
    assert without.encode("ab").ids[0] != 2
    both = tokenizer(SENTENCEPIECE, architecture, add_eos_token=True).encode("ab").ids
    assert (both[0], both[-1]) == (2, 1)


def test_a_space_is_put_before_a_text_unless_the_file_says_no() -> None:
    assert tokenizer(SENTENCEPIECE).encode("ab").tokens == ["<bos>", "▁ab"]
    without = tokenizer(SENTENCEPIECE, add_space_prefix=False)
    assert without.encode("ab").tokens == ["<bos>", "ab"]
    assert without.decode(without.encode(" ab").ids) == " ab"


def test_a_space_is_put_before_each_part_between_control_tokens() -> None:
    """What llama.cpp v0.5.0 answers with Llama 2's vocabulary, too."""
    found = tokenizer(SENTENCEPIECE)
    for text, tokens in [
        (" ab", ["\u2581", "\u2581ab"]),
        ("<eos>ab", ["<eos>", "\u2581ab"]),
        ("c<eos>a", ["\u2581", "c", "<eos>", "\u2581a"]),
    ]:
        assert found.encode(text, add_special_tokens=False).tokens == tokens, text
    assert found.decode(found.encode("ab c").ids) == "ab c"


def test_bytes_without_a_token_are_spelled() -> None:
    found = tokenizer(SENTENCEPIECE)
    assert found.encode("é").tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert found.decode(found.encode("é").ids) == "é"


def test_special_tokens_are_named_in_the_configuration() -> None:
    config = tokenizer_config(Header(SENTENCEPIECE, {}, ""))
    assert (config["bos_token"], config["eos_token"]) == ("<bos>", "<eos>")
    assert "pad_token" not in config
    assert "chat_template" not in config


def test_all_tokens_that_end_an_answer_are_found() -> None:
    for tokens, named, expected in [
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos": 1}, [1, 0, 2]),
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], {"eos": 1}, [1, 2]),
        (["<|return|>", "<|end|>", "<|call|>"], {"eos": 0}, [0, 2]),
        (["<|user|>", "<|assistant|>", "<|end|>"], {"eos": 2}, [2]),
        (["[gMASK]", "<|user|>", "<|endoftext|>"], {"eos": 2, "eot": 1}, [2, 1]),
        (["a", "b", "c"], {"eos": 77}, []),
    ]:
        metadata = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3],
            **{f"tokenizer.ggml.{name}_token_id": number for name, number in named.items()},
        }
        assert end_tokens(Header(metadata, {}, "")) == expected, tokens
