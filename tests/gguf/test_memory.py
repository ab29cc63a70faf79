"""Loading a GGUF file takes little more memory at any time than its weights do afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.gguf.architectures import METADATA
from tests.gguf.files import Array, byte_level_vocabulary, write_gguf
from tests.gguf.test_blocks import random_blocks

CHILD = """
import json, resource, sys
from pathlib import Path
import mlx.core as mx, psutil
from mlx.utils import tree_flatten
from mlxserve.gguf.config import model_config
from mlxserve.gguf.reader import read_header
from mlxserve.gguf.weights import load_gguf
import mlx_lm.models.llama
header = read_header(Path(sys.argv[1]))
config = model_config(header)
before = psutil.Process().memory_info().rss
model = load_gguf(header, config, is_metal=True)
if sys.platform == "darwin":
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
else:  # Linux counts in ru_maxrss what the process was before it became this program
    peak = 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
print(json.dumps([peak - before, weights]))
"""
WIDTH, INNER, LAYERS = 1024, 2816, 6


# With 16 bits for what is 16 or 32 bits in the file, as on a Mac.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_K", "Q6_K", "MXFP4", "F16", "F32"])
def test_the_peak_is_the_weights_and_a_few_pieces(tmp_path: Path, kind: str) -> None:
    shapes = {f"attn_{one}": (WIDTH, WIDTH) for one in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    layer = {name: data(kind, shape) for name, shape in shapes.items()}
    layer |= {name: np.ones(WIDTH, np.float32) for name in ("attn_norm", "ffn_norm")}
    tensors = {f"blk.{n}.{name}.weight": one for n in range(LAYERS) for name, one in layer.items()}
    tensors["token_embd.weight"] = np.ones((288, WIDTH), np.float32)
    tensors["output_norm.weight"] = np.ones(WIDTH, np.float32)
    sizes = {"embedding_length": WIDTH, "feed_forward_length": INNER, "block_count": LAYERS}
    sizes |= {"attention.head_count": 16, "attention.head_count_kv": 16}
    metadata = {**METADATA, **byte_level_vocabulary(), **sizes}
    kinds = {f"{name}.weight": kind for name in shapes}
    file = write_gguf(tmp_path / "large.gguf", "llama", metadata, tensors, kinds)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(file)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, weights = json.loads(done.stdout)
    assert weights > 36 << 20
    # A copy of all weights would take as much again; the largest tensor has up to 11.5 MB.
    assert grown < weights + (24 << 20)


def data(kind: str, shape: tuple[int, int]) -> Array:
    """Random numbers, or blocks of them."""
    if kind in ("F16", "F32"):
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)
    num_values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return random_blocks(kind, shape[0] * shape[1] // num_values).reshape(shape[0], -1)
