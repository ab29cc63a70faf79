"""Converts a GGUF file's metadata to tokenizer.json and tokenizer_config.json.

transformers builds the tokenizer (`transformers.integrations.gguf`). It knows the pre-tokenizer of
some families only; the others are here, from llama.cpp's `llama_vocab` (llama-vocab.cpp).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from mlxserve.core.errors import UnsupportedModel, in_one_line
from mlxserve.hub.gguf.reader import Header

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
_SPACE = "\u2581"  # sentencepiece's space
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CHINESE = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SPARK = _DEEPSEEK_3[2].replace(r"+[\r\n]*|\s*[\r\n]+|", r"+|[\r\n]|")
_JAIS_2 = _LLAMA_3.replace(
    r"\s+(?!\S)|\s+",
    "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Digits from the end in threes.
_THREES = r"\d{1,3}(?=(?:\d{3})*(?!\d))"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Words with capitals at their beginning; the rest is how digits and ends of lines are split.
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}"
    r"|%s| ?[^\s\p{L}\p{N}]+%s|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (_CASED % (r"\p{N}{1,3}", r"[\r\n]*")).replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    r"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+"
)
# Regular expressions, one after the other, by what files call them.
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CHINESE,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_3),
    "spark2_5": (*_DEEPSEEK_3[:2], _SPARK, r"\p{N}"),
    **dict.fromkeys(
        (
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ),
        (r"\p{N}", _GPT_2),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "exaone4"),
        (_GPT_2,),
    ),
    **dict.fromkeys(("trillion", "granite-docling", "modern-bert"), (_GPT_2,)),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), (_GPT_2,)),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), (_GPT_2,)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN_2,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA_3,)),
    "jais-2": (_JAIS_2,),
    "laguna": (r"[^\n]+|[\n]+", _QWEN_2),
    "ufakzeka": (_QWEN_2.partition("|'d)|")[2],),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA_3.replace("{1,3}", "+")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "seed-coder": (_QWEN_2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),),
    "exaone-moe": (_EXAONE_MOE,),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "youtu": (_YOUTU, _CASED % (r"\p{N}", "[\r\n/]*")),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (_THREES, _CASED % (r"\p{N}{1,3}", "[\r\n/]*"))),
    "superbpe": (r"\p{N}+", _THREES),
    "kimi-k2": (r"\p{Han}+", _KIMI),
    "afmoe": (_THREES.replace(r"\d", r"\p{N}"), _ASIAN, _DEEPSEEK_3[2]),
}
# A word that is a token stays one, though no merges lead to it.
_LLAMA_3_KINDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
)
_WHOLE_WORDS_FIRST = _LLAMA_3_KINDS | {"tekken", "youtu", "minicpm5"}
_READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, AttributeError)


def build_tokenizer(header: Header, architecture: str) -> Any:
    """Build a `tokenizers.Tokenizer`. Raises UnsupportedModel."""
    # Its advice is to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    values = {
        name: header.metadata[f"tokenizer.ggml.{key}"]
        for key, name in _KEYS.items()
        if f"tokenizer.ggml.{key}" in header.metadata
    }
    try:
        backend, _ = convert_gguf_tokenizer(architecture, values)
    except Exception as error:
        # The Rust library raises a bare Exception for a vocabulary that it cannot read.
        if type(error) is not Exception and not isinstance(error, _READ_ERRORS):
            raise
        raise UnsupportedModel(
            f"The tokenizer in the GGUF file cannot be read: {in_one_line(error)}. Take another "
            "conversion of the model."
        ) from error
    if values["tokenizer_type"] == "gpt2":
        _split_text(backend, values.get("pre_tokenizer_type", "default"))
    elif values["tokenizer_type"] == "llama":
        _set_prefix(backend, bool(values.get("add_prefix_space", True)))
    backend = _without_others(backend, len(values["tokens"]))
    backend.post_processor = _ends(header, values["tokens"])
    return backend


def _ends(header: Header, tokens: list[str]) -> Any:
    """Return the post-processor that adds tokens around each text; None if none is added."""
    from tokenizers import processors

    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.pre")
    # llama.cpp's defaults where files say nothing
    starts = metadata.get("tokenizer.ggml.model") == "llama" or kind in _WHOLE_WORDS_FIRST
    wanted = {"bos": metadata.get("tokenizer.ggml.add_bos_token", starts)}
    wanted["eos"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    ids = {
        name: number
        for name, is_wanted in wanted.items()
        if is_wanted and (number := _special_id(header, name)) is not None
    }
    if not ids:
        return None
    before = [f"{tokens[ids['bos']]}:0"] if "bos" in ids else []
    after = [f"{tokens[ids['eos']]}:0"] if "eos" in ids else []
    special = [(tokens[number], number) for number in ids.values()]
    return processors.TemplateProcessing(
        single=[*before, "$A:0", *after], pair=None, special_tokens=special
    )


def _special_id(header: Header, name: str) -> int | None:
    number = header.metadata.get(f"tokenizer.ggml.{_SPECIAL[name]}_token_id")
    tokens = header.metadata.get("tokenizer.ggml.tokens") or ()
    return number if isinstance(number, int) and 0 <= number < len(tokens) else None


def _split_text(backend: Any, kind: str) -> None:
    """Set llama.cpp's pre-tokenizer of this kind. Raises UnsupportedModel."""
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend.model.ignore_merges = kind in _WHOLE_WORDS_FIRST
    if kind in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if kind not in SPLITS:
        raise UnsupportedModel(
            f"The GGUF file splits text in a way that is not known ({kind!r:.40}). Take the model's "
            "MLX conversion."
        )
    parts = [pre.Split(Regex(pattern), "isolated") for pattern in SPLITS[kind]]
    backend.pre_tokenizer = pre.Sequence([*parts, pre.ByteLevel(False, use_regex=False)])


def _set_prefix(backend: Any, has_prefix: bool) -> None:
    """Put a space before a text and after each control token, as llama.cpp does, or nowhere.

    A normaliser sees each part between two control tokens; transformers' `Metaspace` puts a space
    before the first part only, and none before one that begins with a space.
    """
    from tokenizers import decoders, normalizers
    from tokenizers import pre_tokenizers as pre

    if not isinstance(backend.pre_tokenizer, pre.Metaspace):
        return
    if has_prefix:
        parts = [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        backend.normalizer = normalizers.Sequence(parts)
        backend.pre_tokenizer = None
        return
    backend.pre_tokenizer = pre.Metaspace(prepend_scheme="never", split=False)
    decoded = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(decoded)


def _without_others(backend: Any, num_tokens: int) -> Any:
    """Remove tokens that transformers' classes add and the file does not have."""
    from tokenizers import Tokenizer

    if backend.get_vocab_size(with_added_tokens=True) <= num_tokens:
        return backend
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["id"] < num_tokens
    ]
    # It may name one of them.
    content["post_processor"] = None
    return Tokenizer.from_str(json.dumps(content))


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Return the metadata as tokenizer_config.json."""
    tokens = header.metadata.get("tokenizer.ggml.tokens") or ()
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name in _SPECIAL:
        if (number := _special_id(header, name)) is not None:
            config[f"{name}_token"] = tokens[number]
    if isinstance(template := header.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config
