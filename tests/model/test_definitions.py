"""Models of kinds that only mlx-vlm defines are loaded from folders, or refused by a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import find_model
from mlxserve.model import definitions, refusals
from mlxserve.model.definitions import VlmLanguageModel, stands_for
from mlxserve.model.load import LoadedModel, load
from mlxserve.model.rank_group import RankGroup
from mlxserve.system.extras import extra_command
from tests.model.coverage import rows

IDS = mx.array([[5, 9, 100, 7, 7, 300]])
SMALL = rows("mlx-vlm")
ModelFolder = Callable[[str], Path]


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A folder with a tokenizer, and a llama's weights and config."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def write(folder: Path, kind: str, **config: Any) -> Any:
    """Save mlx-vlm's whole model of this kind, images and all, in the folder; the model."""
    written = {**SMALL[kind]["config"], **config}
    (folder / "config.json").write_text(json.dumps(written))
    mx.random.seed(3)
    arguments = definitions.definition_of(written).arguments
    whole = arguments.module.Model(arguments.from_dict(written))
    weights = dict(tree_flatten(whole.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return whole


def loaded(folder: Path, **options: Any) -> LoadedModel:
    return load(find_model(str(folder)), is_metal=False, memory_limit=1 << 30, **options)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        loaded(folder, **options)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["step3p7", "mimo_v2", "k2_horizon", "moondream2"])
def test_the_language_model_of_a_whole_model_is_loaded_from_its_folder(
    kind: str, folder: Path
) -> None:
    whole = write(folder, kind)
    model = loaded(folder)
    assert isinstance(model.model, VlmLanguageModel)
    expected = whole.language_model(IDS, cache=model.model.make_cache()).logits
    found = model.model(IDS, cache=model.model.make_cache())
    assert np.allclose(np.array(found), np.array(expected), atol=1e-5)
    assert {name.split(".")[0] for name, _ in tree_flatten(model.model.parameters())} == {
        "language_model"
    }


def test_quantised_weights_are_loaded(folder: Path) -> None:
    whole = write(folder, "step3p7", quantization={"group_size": 32, "bits": 8})
    nn.quantize(
        whole,
        32,
        8,
        class_predicate=lambda path, module: (
            path.startswith("language_model.")
            and hasattr(module, "to_quantized")
            and module.weight.shape[-1] % 32 == 0
        ),
    )
    weights = dict(tree_flatten(whole.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    model = loaded(folder)
    expected = np.array(whole.language_model(IDS, cache=model.model.make_cache()).logits)
    found = np.array(model.model(IDS, cache=model.model.make_cache()))
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_a_prompt_is_not_given_the_positions_of_the_one_before(folder: Path) -> None:
    write(folder, "glm_ocr")
    model = loaded(folder).model
    alone = np.array(model(IDS, cache=model.make_cache()))
    model(mx.array([list(range(20))]), cache=model.make_cache())
    assert np.array_equal(np.array(model(IDS, cache=model.make_cache())), alone)


def test_importing_a_definition_imports_neither_a_server_nor_data_sets(tmp_path: Path) -> None:
    program = """
import sys
from mlxserve.system import machine
machine.import_mlx_lm()
from mlxserve.model import definitions
config = {"model_type": "step3p7"}
definitions.definition_of(config).arguments.from_dict(config)
run = [name for name in sys.modules if name.startswith("mlx_vlm.server.")]
other = {"cv2", "datasets", "fastapi", "miniaudio", "mlx_audio", "torch"} & sys.modules.keys()
print([*run, *other, type(sys.modules["mlx_vlm"]).__name__])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['_DeferredPackage']"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("deepseek_v4", "keep what they have read in a form of their own (PoolingCache)"),
        ("llada2_moe", "not one that writes a token after another: it writes by diffusion"),
        ("sam3", "not one that writes a token after another: it has no language model of its own"),
    ],
)
def test_what_cannot_be_served_is_refused_by_what_it_is(
    kind: str, sentence: str, folder: Path
) -> None:
    if "PoolingCache" in sentence:
        write(folder, kind)
    else:
        (folder / "config.json").write_text(json.dumps(SMALL[kind]["config"]))
    assert sentence in refusal(folder)


def test_a_kind_that_neither_library_has(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_kind"}))
    assert "neither mlx-lm" in (sentence := refusal(folder))
    assert "nor mlx-vlm" in sentence


def test_without_the_extra_its_name_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "step3p7")
    for module in (definitions, refusals):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    assert extra_command("vlm") in refusal(folder)


def test_a_package_that_a_definition_needs_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "step3p7")

    def importing(config: object) -> None:
        raise ModuleNotFoundError("No module named 'PIL'", name="PIL")

    monkeypatch.setattr(definitions, "module_of", importing)
    assert "needs the package 'PIL', which mlx-vlm's definition of step3p7" in refusal(folder)


def test_weights_that_mlx_vlm_would_convert_are_refused(folder: Path) -> None:
    write(folder, "step3p7")
    config = {**SMALL["step3p7"]["config"], "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "is quantised with FP8" in refusal(folder)


def test_it_is_not_divided_among_ranks(folder: Path) -> None:
    write(folder, "step3p7")
    group = RankGroup.__new__(RankGroup)  # which has no other ranks
    assert "are not divided among ranks" in refusal(folder, group=group)


def test_caches_stand_for_mlx_lms_of_the_same_name_only() -> None:
    from mlx_lm.models import cache as of_mlx_lm

    definitions.defer_mlx_vlm()
    from mlx_vlm.models import cache as of_mlx_vlm

    assert stands_for(of_mlx_vlm.KVCache) is of_mlx_lm.KVCache
    assert stands_for(of_mlx_vlm.ArraysCache) is of_mlx_lm.ArraysCache
    assert stands_for(of_mlx_lm.KVCache) is of_mlx_lm.KVCache
    assert stands_for(of_mlx_vlm.PoolingCache) is of_mlx_vlm.PoolingCache
