"""Loading a GGUF file takes little more memory at any time than its weights do afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from metal_kernels.reading import view
from mlxserve.hub.gguf.memory import unwritten
from tests.hub.gguf.random_files import write_llama

CHILD = """
import json, resource, sys
from pathlib import Path
import mlx.core as mx, psutil
from mlx.utils import tree_flatten
from mlxserve.hub.gguf.config import model_config
from mlxserve.hub.gguf.reader import read_header
from mlxserve.hub.gguf.weights import load_gguf
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


# With 16 bits for what is 16 or 32 bits in the file, as on a Mac.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("Q4_0", "Q6_K", "F16"),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("Q5_K", "MXFP4", "F32")),
    ],
)
def test_the_peak_is_the_weights_and_a_few_pieces(tmp_path: Path, kind: str) -> None:
    file = write_llama(tmp_path / "large.gguf", kind, num_layers=6)
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


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint32, mx.float16, mx.float32], ids=str)
def test_an_unwritten_array_holds_what_numpy_writes(dtype: mx.Dtype) -> None:
    array = unwritten((3, 5, 1000), dtype)
    assert (array.shape, array.dtype) == ((3, 5, 1000), dtype)
    view(array)[:] = 7
    assert mx.array_equal(array, mx.full((3, 5, 1000), 7, dtype))
