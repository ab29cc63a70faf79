"""Blocks of each kind with random content, and large files of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.hub.gguf.architectures import METADATA
from tests.hub.gguf.files import Array, byte_level_vocabulary, write_gguf

WIDTH, INNER = 1024, 2816
# Where the float16 numbers of a block are.
SCALES = {
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
}


def random_blocks(kind: str, count: int = 512) -> np.ndarray:
    """Random bytes, but for the scales, which are finite."""
    draw = np.random.default_rng(11)
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in SCALES.get(kind, (0, 2)):
        scale = draw.normal(scale=0.1, size=(count, 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    if kind == "IQ1_M":
        raw[:, 55] = raw[:, 55] & 15 | 0x20  # the end of a scale that is spread over four numbers
    if kind == "MXFP4":
        raw[:, 0] = draw.integers(100, 150, count)  # an exponent
    return raw


def write_llama(
    file: Path, kind: str, num_layers: int, width: int = WIDTH, inner: int = INNER
) -> Path:
    """A llama whose projections are random numbers, or blocks of this kind; all layers have the same ones."""
    shapes = {f"attn_{one}": (width, width) for one in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    layer = {name: _data(kind, shape) for name, shape in shapes.items()}
    layer |= {name: np.ones(width, np.float32) for name in ("attn_norm", "ffn_norm")}
    tensors = {
        f"blk.{n}.{name}.weight": one for n in range(num_layers) for name, one in layer.items()
    }
    tensors["token_embd.weight"] = np.ones((288, width), np.float32)
    tensors["output_norm.weight"] = np.ones(width, np.float32)
    sizes = {"embedding_length": width, "feed_forward_length": inner, "block_count": num_layers}
    sizes |= {"attention.head_count": 16, "attention.head_count_kv": 16}
    metadata = {**METADATA, **byte_level_vocabulary(), **sizes}
    kinds = {f"{name}.weight": kind for name in shapes}
    return write_gguf(file, "llama", metadata, tensors, kinds)


def _data(kind: str, shape: tuple[int, int]) -> Array:
    if kind in ("F16", "F32"):
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)
    num_values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return random_blocks(kind, shape[0] * shape[1] // num_values).reshape(shape[0], -1)
