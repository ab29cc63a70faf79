"""SmolLM2 drafted by itself in 6 bits: how many guesses are accepted, and that the tokens stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlxserve import LLM, SamplingParams
from mlxserve.hub.files import find_model
from mlxserve.hub.gguf.weights import load_gguf
from tests.drafting import accepted_share, similar_model, total_variation

pytestmark = pytest.mark.long

PROMPTS = ["Once upon a time there was a small robot", "Three ways to save water at home are"]
PARAMS = SamplingParams(max_tokens=100, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a folder of float32 weights."""
    files, folder = find_model(str(smollm2)), tmp_path_factory.mktemp("smollm2")
    assert files.gguf is not None
    model = load_gguf(files.gguf, files.config, is_metal=False)
    if any(isinstance(module, nn.QuantizedLinear) for _, module in model.named_modules()):
        model = dequantize_model(model)
    for file in files.path.glob("*.json"):
        shutil.copy(file, folder)
    config = {key: value for key, value in files.config.items() if "quantization" not in key}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: array.astype(mx.float32) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def test_shared_noise_is_accepted_as_often_as_the_distributions_are_alike(
    whole: Path, tmp_path: Path
) -> None:
    """200 tokens at a temperature of 1.0: at least 0.9 of 1 - total variation, and 1.5 times other noise."""
    draft = similar_model(tmp_path / "draft", whole, bits=6)
    shared, ids = accepted_share(str(whole), PROMPTS, PARAMS, draft)
    own, others = accepted_share(str(whole), PROMPTS, PARAMS, draft, shares_noise=False)
    with LLM(str(whole), num_pages=80, page_size=16, disable_log_stats=True) as llm:
        plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.token_ids) for output in plain] == ids == others
    bound = 1 - total_variation(whole, draft, ids, 1.0)
    assert shared >= 0.9 * bound, (shared, bound)
    assert shared >= 1.5 * own, (shared, own)
