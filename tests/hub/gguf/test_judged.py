"""A small file of each architecture is answered as llama.cpp answered it (`judge.py` asked it once)."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import find_model
from mlxserve.hub.gguf import actions
from mlxserve.hub.gguf.config import model_config
from mlxserve.hub.gguf.families import FAMILIES
from mlxserve.hub.gguf.reader import Header, TensorInfo
from mlxserve.model.load import read_model
from tests.hub.gguf.inverse import INVERSES, undone
from tests.hub.gguf.judge import JUDGED, TOLERANCE, difference, ours
from tests.hub.gguf.page import on_page, table
from tests.hub.gguf.small_files import FILES, fingerprint, write_small

CONFIG = {"heads": 4, "groups": 2, "size": 8, "factor": 3.0}
# Named first, or with an action of its own; others are run with the slow suite.
QUICK = (
    "qwen35",
    "mistral3",
    "glm4moe",
    "lfm2moe",
    "internlm2",
    "gemma4/experts",
    "nemotron_h_moe",
)


@pytest.fixture(autouse=True)
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in FILES],
)
def test_a_small_file_is_answered_as_llama_cpp_answers_it(tmp_path: Path, case: str) -> None:
    judged = json.loads(JUDGED.read_text(encoding="utf-8"))[case]
    file = write_small(case, tmp_path / "small.gguf")
    names, total = fingerprint(file)
    assert names == judged["file"][0], "llama.cpp read tensors of other names or shapes"
    assert total == pytest.approx(judged["file"][1], abs=0.05), "llama.cpp read other values"
    assert difference(ours(file), judged["best"]) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("qwen35", ("in_proj_qkv", "in_proj_z", "out_proj")),
        ("qwen3next", ("in_proj_qkvz",)),
        ("internlm2", ("wqkv",)),
        ("gemma4/experts", ("gate_proj", "up_proj", "down_proj")),
        ("granitehybrid", ("input_linear", "q_proj")),
    ],
)
def test_actions_leave_quantised_tensors_packed(
    tmp_path: Path, case: str, parts: tuple[str, ...]
) -> None:
    """Rows and groups of columns are moved as they are, on codes, scales and biases."""
    packed = write_small(case, tmp_path / "packed.gguf", "Q8_0")
    rounded = write_small(case, tmp_path / "rounded.gguf", "Q8_0", is_rounded=True)
    model, _ = read_model(find_model(str(packed)), is_metal=False)
    kinds = {
        path.split(".")[-2]: array.dtype
        for path, array in tree_flatten(model.parameters())
        if path.endswith(".weight")
    }
    assert {kinds[part] for part in parts} == {mx.uint32}
    np.testing.assert_allclose(ours(packed), ours(rounded), atol=1e-5)


def test_every_architecture_was_judged_by_llama_cpp() -> None:
    judged = json.loads(JUDGED.read_text(encoding="utf-8"))
    assert judged.keys() == FILES.keys()
    assert {case.partition("/")[0] for case in judged} == FAMILIES.keys()
    assert len(FAMILIES) >= 60
    assert max(each["off"] for each in judged.values()) < TOLERANCE


def test_the_page_has_the_rows_of_data() -> None:
    assert on_page() == table()


@pytest.mark.parametrize(
    "action",
    [
        actions.SwapPairs("heads"),
        actions.SwapPairs("heads", "size*1"),
        actions.Plus(-1.0),
        actions.NegativeLog(),
        actions.Interleave("groups", ("heads*4", "heads*2", "heads*2+groups*4")),
        actions.GroupHeads("groups", "heads", ("heads*2",)),
        actions.GroupHeads("groups", "heads", axis=-1),
    ],
    ids=str,
)
def test_an_action_undoes_what_the_converter_did(action: actions.Action) -> None:
    array = np.random.default_rng(2).normal(size=(40, 16)).astype(np.float32)
    written = undone(array, (action,), CONFIG)
    assert not np.array_equal(written, array)
    found = action.apply(mx.array(np.ascontiguousarray(written)), CONFIG)
    np.testing.assert_allclose(np.array(found), array, rtol=1e-4, atol=1e-6)


def test_every_action_has_an_inverse() -> None:
    kinds = {
        type(each)
        for rules in FAMILIES.values()
        for chain in rules.actions.values()
        for each in chain
    }
    assert kinds - {actions.TensorPart} <= INVERSES.keys()


def _config(architecture: str, **values: object) -> dict[str, object]:
    written = {
        "block_count": 2,
        "embedding_length": 64,
        "attention.head_count": 4,
        "ssm.inner_size": 128,
    }
    written |= {key.replace("__", "."): value for key, value in values.items()}
    metadata = {f"{architecture}.{key}": value for key, value in written.items()}
    tensor = TensorInfo("token_embd.weight", (288, 64), "F32", Path(), 0, 0)
    header = Header({"general.architecture": architecture, **metadata}, {tensor.name: tensor}, "")
    return model_config(header)


def test_what_a_definition_computes_otherwise_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Jamba with experts"):
        _config("jamba", expert_count=4, attention__head_count_kv=[0, 2])
    with pytest.raises(UnsupportedModel, match="Mamba 2 with several groups"):
        _config("mamba2", ssm__group_count=2, ssm__time_step_rank=8)


def test_blocks_of_a_drafting_head_are_not_layers() -> None:
    values = {"expert_count": 4, "rope__dimension_count": 8, "attention__key_length": 16}
    assert _config("glm4moe", nextn_predict_layers=1, **values)["num_hidden_layers"] == 1
