"""A GGUF file answers with the tokens of the mlx-lm model whose weights were written into it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlxserve import LLM, SamplingParams
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import find_model
from mlxserve.hub.gguf.blocks import REPACKINGS
from mlxserve.hub.gguf.reader import read_header
from mlxserve.model.load import load, read_model
from mlxserve.text.tokenizer import Tokenizer
from tests.hub.gguf.architectures import ARCHITECTURES, METADATA, VOCAB, Architecture, build
from tests.hub.gguf.files import Array, byte_level_vocabulary, write_gguf

OTHER_KINDS = sorted(
    {kind.name for kind in gguf.GGML_QUANT_SIZES} - REPACKINGS.keys() - {"F32", "F16", "BF16"}
)
PROMPT = [5, 90, 17, 200, 31, 8, 8, 140, 77, 61, 5, 90]


@pytest.fixture(autouse=True)
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LLAMA = ARCHITECTURES[0]
LLAMA_METADATA = {**METADATA, **LLAMA.metadata}


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1])))
    return ids[len(prompt) :]


def llama_file(tmp_path: Path, kinds: Mapping[str, str]) -> tuple[Path, nn.Module]:
    by_path = {
        f"{'embed_tokens' if one == 'embed' else one + '_proj'}.weight": kind
        for one, kind in kinds.items()
    }
    file = tmp_path / "small.gguf"
    model, _ = build(LLAMA, file, by_path)
    return file, model


MIXTURES = {
    "F32": {},
    "F16": dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down", "embed"), "F16"),
    "BF16": dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down", "embed"), "BF16"),
    "Q4_1": {**dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), "Q4_1"), "embed": "Q8_0"},
    "mixed": {"q": "Q4_0", "k": "Q5_0", "v": "Q8_0", "o": "Q5_1", "gate": "Q4_1", "down": "Q8_0"},
}


@pytest.mark.parametrize("kinds", MIXTURES.values(), ids=MIXTURES.keys())
def test_a_llama_file_computes_as_the_model_written_into_it(
    tmp_path: Path, kinds: Mapping[str, str]
) -> None:
    file, model = llama_file(tmp_path, kinds)
    loaded = load(find_model(str(file)), is_metal=False, memory_limit=1 << 30)
    expected = np.array(model(mx.array([PROMPT])))
    assert np.array_equal(np.array(loaded.model(mx.array([PROMPT]))), expected)


def test_a_file_answers_with_the_tokens_of_the_model_written_into_it(tmp_path: Path) -> None:
    file, model = llama_file(tmp_path, MIXTURES["mixed"])
    with LLM(str(file), num_pages=32, disable_log_stats=True) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        [answer] = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(answer.token_ids) == greedy(model, PROMPT, 12)


def saved(tmp_path: Path, one: Architecture, kinds: Mapping[str, str]) -> tuple[Path, nn.Module]:
    file = tmp_path / "small.gguf"
    model, _ = build(one, file, kinds)
    return file, model


@pytest.mark.parametrize("one", ARCHITECTURES, ids=str)
def test_each_architecture_computes_as_the_model_written_into_its_file(
    tmp_path: Path, one: Architecture
) -> None:
    kinds = {"down_proj.weight": "Q4_0", "gate_proj.weight": "Q4_1", "embed_tokens.weight": "Q8_0"}
    file, model = saved(tmp_path, one, kinds)
    files = find_model(str(file))
    assert files.config["model_type"] == one.model_type
    assert files.config["max_position_embeddings"] == 256
    found, _ = read_model(files, is_metal=False)
    found = dequantize_model(found)
    expected = np.array(model(mx.array([PROMPT])))
    assert np.array_equal(np.array(found(mx.array([PROMPT]))), expected)


@pytest.mark.parametrize("one", [one for one in ARCHITECTURES if "deepseek" in one.name], ids=str)
def test_deepseeks_keys_and_values_may_be_in_one_tensor_or_in_two(
    tmp_path: Path, one: Architecture
) -> None:
    """As llama.cpp's converter writes them now, and wrote them before."""
    file = tmp_path / "small.gguf"
    model, config = build(one, file)
    heads, width = config["num_attention_heads"], config["qk_nope_head_dim"]

    def other(tensors: dict[str, Array]) -> None:
        for name in [name for name in tensors if name.endswith("attn_kv_b.weight")]:
            both = tensors.pop(name).reshape(heads, -1, 32)
            tensors[name.replace("kv_b", "k_b")] = both[:, :width].swapaxes(1, 2)
            tensors[name.replace("kv_b", "v_b")] = both[:, width:]
        for name in [
            name
            for name in tensors
            if name.endswith("attn_k_b.weight") and one.model_type.endswith("v3")
        ]:
            keys, values = tensors.pop(name), tensors.pop(name.replace("k_b", "v_b"))
            both = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
            tensors[name.replace("k_b", "kv_b")] = both.reshape(-1, 32)

    build(one, file, change=other)
    found, _ = read_model(find_model(str(file)), is_metal=False)
    expected = np.array(model(mx.array([PROMPT])))
    assert np.array_equal(np.array(found(mx.array([PROMPT]))), expected)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, marks=pytest.mark.long if number % 3 else pytest.mark.slow)
        for number, one in enumerate(ARCHITECTURES)
    ],
    ids=str,
)
def test_each_architecture_answers_as_the_model_written_into_its_file(
    tmp_path: Path, one: Architecture
) -> None:
    file, model = saved(tmp_path, one, {"down_proj.weight": "Q4_0", "embed_tokens.weight": "Q8_0"})
    with LLM(str(file), num_pages=32, disable_log_stats=True) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        [answer] = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(answer.token_ids) == greedy(model, PROMPT, 12)


@pytest.mark.parametrize("one", ARCHITECTURES, ids=str)
def test_each_architecture_stays_packed_on_metal(tmp_path: Path, one: Architecture) -> None:
    """Experts and shared ones too, in the dtype of 16 bits that their activations fit in."""
    file, _ = saved(tmp_path, one, {"proj.weight": "Q8_0"})
    found, _ = read_model(find_model(str(file)), is_metal=True)
    arrays = dict(tree_flatten(found.parameters()))
    parts = [path for path in arrays if re.search(r"proj\.weight$", path)]
    assert {arrays[path].dtype for path in parts} == {mx.uint32}
    is_wide = one.name in ("gemma2", "gemma3", "gpt-oss")
    others = {array.dtype for array in arrays.values()} - {mx.uint32}
    assert others == {mx.bfloat16 if is_wide else mx.float16}


def test_on_metal_weights_stay_packed_in_float16(tmp_path: Path) -> None:
    kinds = MIXTURES["Q4_1"]
    file, _ = llama_file(tmp_path, kinds)
    loaded = load(find_model(str(file)), is_metal=True, memory_limit=1 << 30)
    layer = loaded.model.layers[0]
    assert (layer.mlp.down_proj.bits, layer.mlp.down_proj.group_size) == (4, 32)
    assert loaded.model.model.embed_tokens.bits == 8
    assert loaded.dtype == mx.float16
    # 4 bits, and a scale and a bias of 16 bits for each 32 values
    assert layer.mlp.down_proj.weight.nbytes + 2 * layer.mlp.down_proj.scales.nbytes == (
        64 * 96 * 5 // 8
    )


def test_the_template_and_the_ends_of_an_answer_come_from_the_file(tmp_path: Path) -> None:
    file, _ = llama_file(tmp_path, {})
    files = find_model(str(file))
    assert files.name == "small"
    assert files.config["eos_token_id"] == [2, 0]
    tokenizer = Tokenizer(files.path, [2, 0])
    ids = tokenizer.render([{"role": "user", "content": "a 12"}])
    tokens = byte_level_vocabulary()["tokenizer.ggml.tokens"]
    # Single digits, as SmolLM splits them: the token "12" is not used.
    spelled = ["<|im_start|>", *"userĊ", "a", "Ġ", "1", "2", "<|im_end|>", "Ċ"]
    assert [tokens[one] for one in ids] == [*spelled, "<|im_start|>", *"assistantĊ"]
    assert tokenizer.eos_token_ids == {0, 2}
    tokenizer.close()


def test_the_tokenizer_is_converted_once(tmp_path: Path) -> None:
    file, _ = llama_file(tmp_path, {})
    folder = find_model(str(file)).path
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert find_model(str(file)).path == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    assert [one.name for one in folder.parent.glob("[!.]*")] == [folder.name]


def test_a_folder_with_a_config_and_one_file_is_the_files_model(tmp_path: Path) -> None:
    file, _ = llama_file(tmp_path, {})
    (tmp_path / "config.json").write_text('{"model_type": "another"}')
    assert find_model(str(tmp_path)).config == find_model(str(file)).config


def test_a_file_of_other_weights_has_another_fingerprint(tmp_path: Path) -> None:
    file, _ = llama_file(tmp_path, {})
    first = find_model(str(file)).fingerprint
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(content)
    file.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(file)
    assert find_model(str(file)).fingerprint == first != find_model(str(copy)).fingerprint


def refusal(file: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        load(find_model(str(file)), is_metal=False, memory_limit=1 << 30)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def small_file(tmp_path: Path, metadata: Mapping[str, Any], **tensors: Array) -> Path:
    given = {"token_embd.weight": np.ones((VOCAB, 64), np.float32)}
    given |= {name.replace("__", "."): array for name, array in tensors.items()}
    merged = {**LLAMA_METADATA, **byte_level_vocabulary(), **metadata}
    return write_gguf(tmp_path / "small.gguf", "llama", merged, given)


def test_a_file_without_all_tensors_is_refused(tmp_path: Path) -> None:
    assert "lacks 19 of the model's tensors" in refusal(small_file(tmp_path, {}))


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    sinks = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    file = tmp_path / "small.gguf"
    build(replace(LLAMA, extra=sinks), file)
    assert "has no place for: blk.0.attn_sinks.weight" in refusal(file)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_blocks_that_cannot_be_converted_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    name, file = "blk.0.ffn_down.weight", tmp_path / "small.gguf"
    # Rows of 256 values, which are whole blocks of every kind.
    build(
        replace(
            LLAMA,
            config={"intermediate_size": 256},
            metadata={**LLAMA.metadata, "feed_forward_length": 256},
        ),
        file,
    )
    content = bytearray(file.read_bytes())
    at = content.index(name.encode()) + len(name) + 4 + 2 * 8  # after its two dimensions
    assert content[at : at + 4] == bytes(4)  # float32
    content[at : at + 4] = gguf.GGMLQuantizationType[kind].to_bytes(4, "little")
    # At the end of the file, as blocks of 8 bytes a value overlap the next tensor where it was.
    tensor = read_header(file).tensors[name]
    start = tensor.offset - int.from_bytes(content[at + 4 : at + 12], "little")
    content += bytes(-(len(content) - start) % 32)
    content[at + 4 : at + 12] = (len(content) - start).to_bytes(8, "little")
    content += bytes(2 * tensor.nbytes)
    file.write_bytes(content)
    assert f"{name} is quantised as {kind}, which cannot be converted" in refusal(file)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "bert", {}, {"a": np.ones(32, np.float32)})
    assert "architecture 'bert' are not supported" in refusal(file)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    file = small_file(tmp_path, {"general.type": "adapter"})
    assert "of type 'adapter'" in refusal(file)


def test_numbers_that_no_model_can_have_are_refused(tmp_path: Path) -> None:
    assert "llama.block_count must be" in refusal(small_file(tmp_path, {"block_count": 1 << 30}))


def test_a_vocabulary_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "tokenizer" in refusal(small_file(tmp_path, {"tokenizer.ggml.model": "unheard-of"}))


def test_a_cache_folder_that_cannot_be_written_gives_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    assert "XDG_CACHE_HOME" in refusal(small_file(tmp_path, {}))
