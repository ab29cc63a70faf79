"""Writes small GGUF files with `gguf.GGUFWriter`, under llama.cpp's names and in its order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

Array = npt.NDArray[Any]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def byte_level_vocabulary() -> dict[str, Any]:
    """A vocabulary of 288 tokens, of which the first three are control tokens."""
    tokens = [*SPECIAL, *byte_alphabet(), "Ġa", "12", *(f"<unused{n}>" for n in range(27))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 258 + [5] * 27,
        "tokenizer.ggml.merges": ["Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    file: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """metadata: keys without a dot before them are the architecture's
    tensors: float32, or bytes: blocks of their kind
    kinds: of blocks, by the ends of tensors' names; F32 for others
    """
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        full = (
            key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        )
        _add(writer, full, value)
    for name, array in tensors.items():
        ends = [end for end in kinds or {} if name.endswith(end)]
        kind = gguf.GGMLQuantizationType[(kinds or {})[ends[0]] if ends else "F32"]
        data = array if array.dtype == np.uint8 else quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def in_pairs(rows: Array, num_heads: int) -> Array:
    """Rows of q or k as llama.cpp's converter stores them (`LlamaModel.permute`)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
