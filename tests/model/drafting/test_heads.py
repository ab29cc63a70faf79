"""Heads of checkpoints: their names and formulas by family, their rows, and the probe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.hub.files import check_folder
from mlxserve.model.attention import choose_attention
from mlxserve.model.drafting.head import MtpHead
from mlxserve.model.drafting.head_model import HeadModel, show_hidden
from mlxserve.model.drafting.head_weights import HeadRefused, find_head, load_head
from mlxserve.model.drafting.load import PagedDrafting
from mlxserve.model.load import prepare
from tests import heads
from tests.drafting import spoiled_pages
from tests.heads import KINDS, MEMORY, PAGE, Drafted, Parts, drafting_of, loaded

QUICK = ("qwen3_next", "mimo")


def families(*quick: str) -> list[Any]:
    """All families; those that are not quick only with the slow tests."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


def inner_of(model: Any, kind: str) -> Any:
    if kind == "nemotron_h":
        return model.backbone
    return model.language_model.model if kind.startswith("qwen3_5") else model.model


def published_formula(
    kind: str, model: Any, other: Any, parts: Parts, tokens: list[int]
) -> tuple[mx.array, mx.array]:
    """Return (a head's logits, what it hands on) after each token, in plain mlx.

    As vLLM computes them (`qwen3_next_mtp.py`, `deepseek_mtp.py`, `mimo_mtp.py`, `nemotron_h_mtp.py`, `step3p5_mtp.py`):
    a hidden state and the token after it. other: a model whose last layers are the head's
    """
    inner = inner_of(model, kind)
    eps = 1e-6
    ids = mx.array([tokens])
    embedding = inner.embeddings if kind == "nemotron_h" else inner.embed_tokens
    if kind == "step3p5":
        norm, inner.norm = inner.norm, lambda hidden: hidden
        hidden = inner(ids)
        inner.norm = norm
    else:
        hidden = inner(ids)
    before = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
    halves = [
        mx.fast.rms_norm(embedding(ids), parts.embedding_norm, eps),
        mx.fast.rms_norm(before, parts.hidden_norm, eps),
    ]
    if kind == "mimo":
        halves = [halves[1], halves[0]]
    rows = mx.concatenate(halves, axis=-1) @ parts.projection.T
    mask = mx.tril(mx.ones((len(tokens), len(tokens)), mx.bool_))
    for layer in other.layers[1:]:
        rows = layer(rows, mask=mask)
    normed = mx.fast.rms_norm(rows, parts.final_norm, eps)
    head = model.language_model.lm_head if kind.startswith("qwen3_5") else model.lm_head
    return head(normed)[0], (rows if kind in _HANDS_ON_ROWS else normed)[0]


_HANDS_ON_ROWS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "step3p5")


@pytest.mark.parametrize("kind", families(*QUICK))
def test_a_head_computes_the_published_formula(kind: str, tmp_path: Path) -> None:
    model, _ = heads.build(kind)
    other, _ = heads.build(kind, seed=7)
    size = heads.right_parts(kind, dict(tree_flatten(model.parameters()))).final_norm.shape[0]
    parts = heads.random_parts(size, seed=9)
    published = heads.head_of(kind, dict(tree_flatten(other.parameters())), parts)
    folder = heads.write(tmp_path / kind, kind, head=published)
    target = loaded(folder)
    files = find_head(check_folder(folder, kind), target.config)
    assert files is not None
    head, _ = load_head(files, target, is_metal=False, memory_limit=MEMORY)
    show_hidden(target, files.family)
    tokens = heads.TEXT[:12]
    expected, handed_on = published_formula(kind, model, other, parts, tokens)
    ids = mx.array([tokens])
    with target.selector.capturing(before_norm=not head.takes_normed) as captured:
        target.model(ids, cache=make_prompt_cache(target.model))
    hidden = captured[0][0]
    with head.showing(mx.concatenate([mx.zeros_like(hidden[:1]), hidden[:-1]])):
        logits = head(ids, cache=make_prompt_cache(head))[0]
    scale = mx.abs(expected).max()
    assert mx.abs(logits - expected).max() < 1e-4 * scale
    assert mx.abs(head.carried - handed_on).max() < 1e-4 * mx.abs(handed_on).max()


@pytest.mark.parametrize("kind", families(*QUICK))
def test_a_right_head_guesses_each_token(kind: str, tmp_path: Path) -> None:
    folder = heads.write(tmp_path / kind, kind)
    target = loaded(folder)
    drafted = Drafted(target, drafting_of(folder, target), 3)
    answers = drafted.run(heads.TEXT[:30], [5, 6, 7], max_tokens=17)
    assert [request.num_accepted for request in answers] == [
        request.num_drafted for request in answers
    ]
    assert min(request.num_accepted for request in answers) > 10


def test_a_head_guesses_with_the_embedding_where_that_is_its_models_head(tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "tied", "qwen3_5", tie_word_embeddings=True)
    target = loaded(folder)
    [answer] = Drafted(target, drafting_of(folder, target), 3).run(heads.TEXT[:20], max_tokens=9)
    assert answer.num_accepted == answer.num_drafted > 4


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_the_configuration_of_the_text_may_be_a_part_of_the_whole(
    kind: str, tmp_path: Path
) -> None:
    """As Qwen publishes models that see."""
    folder = heads.write(tmp_path / kind, kind)
    file = folder / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": kind, "text_config": text}))
    target = loaded(folder)
    [answer] = Drafted(target, drafting_of(folder, target), 3).run(heads.TEXT[:20], max_tokens=9)
    assert answer.num_accepted == answer.num_drafted > 4


# ---- rows


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a model whose head reads hidden states, and is often wrong."""
    return lambda kind: write_noisy(tmp_path_factory.mktemp(kind), kind)


def write_noisy(folder: Path, kind: str) -> Path:
    weights = dict(tree_flatten(heads.build(kind)[0].parameters()))
    parts = heads.right_parts(kind, weights)
    noise = heads.random_parts(parts.final_norm.shape[0], seed=3).projection
    parts = parts._replace(projection=parts.projection + 0.1 * noise)
    return heads.write(folder, kind, head=heads.head_of(kind, weights, parts))


@pytest.mark.parametrize(
    "max_tokens",
    [pytest.param(3, id="drafts"), pytest.param(0, id="no drafts", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ["mimo", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_row_is_a_function_of_the_tokens_up_to_it(
    kind: str, max_tokens: int, noisy: Callable[[str], Path]
) -> None:
    """Guesses are accepted and rejected, prompts are cut; the rows are those of a prompt with the same tokens."""
    folder = noisy(kind)
    target = loaded(folder)
    drafting = drafting_of(folder, target)
    drafted = Drafted(target, drafting, max_tokens)
    answers = drafted.run(heads.TEXT[:29], [5, 6, 7], max_tokens=44)
    if max_tokens:
        assert 0 < answers[0].num_accepted < answers[0].num_drafted
    for answer in answers:
        known = list(answer.token_ids)
        # The rows of the last draft are missing if it ended the answer.
        num_pages = (len(known) - 1 - max_tokens) // PAGE
        whole = Drafted(target, drafting, 0)
        [prompt] = whole.run(known, max_tokens=1)
        expected = whole.rows(prompt, num_pages)
        found = drafted.rows(answer, num_pages)
        for one, other in zip(found, expected, strict=True):
            assert mx.abs(one - other).max() < 1e-4 * mx.abs(other).max()
        counts = [
            int(np.frombuffer(unit[-4:], "<i4")[0]) for unit in drafted.units(answer, num_pages)
        ]
        assert counts == [PAGE] * num_pages


@pytest.mark.slow
def test_the_next_turn_is_drafted_from_cached_rows(noisy: Callable[[str], Path]) -> None:
    folder = noisy("mimo")
    target = loaded(folder)
    drafting = drafting_of(folder, target)
    drafted = Drafted(target, drafting, 3)
    [first] = drafted.run(heads.TEXT[:40], max_tokens=40)
    turn = [*first.token_ids, 33, 34]
    [cached] = drafted.run(turn, max_tokens=40)
    assert cached.num_cached == (len(first.token_ids) - 1) // PAGE * PAGE
    [computed] = Drafted(target, drafting, 3).run(turn, max_tokens=40)
    assert list(cached.token_ids) == list(computed.token_ids)
    assert abs(cached.num_accepted - computed.num_accepted) <= 2


def test_hidden_states_of_ended_requests_are_dropped(noisy: Callable[[str], Path]) -> None:
    folder = noisy("mimo")
    target = loaded(folder)
    drafted = Drafted(target, drafting_of(folder, target), 3)
    drafted.run([5, 6, 7], [8, 9], max_tokens=3)
    drafted.run([5, 6, 8], max_tokens=3)
    assert drafted.drafter.num_kept == 1  # type: ignore[attr-defined]
    drafted.drafter.restart()
    assert drafted.drafter.num_kept == 0  # type: ignore[attr-defined]
    assert list(drafted.drafter.arrays()) == []


def orbit(folder: Path) -> tuple[Path, list[int]]:
    """Write a model that says one token after the other of a ring, and a head that reads hidden states alone.

    Its guess is right if the hidden state is that of the token before.
    """
    model, _ = heads.build("mimo")
    weights = dict(tree_flatten(model.parameters()))
    size = weights["model.norm.weight"].shape[0]
    ring = list(range(100, 100 + size))
    ends = ("o_proj.weight", "down_proj.weight")
    weights |= {name: array * 0 for name, array in weights.items() if name.endswith(ends)}
    directions = mx.eye(size)
    rows = mx.array(ring)
    following = mx.array(ring[1:] + ring[:1])
    embedding = weights["model.embed_tokens.weight"]
    embedding[rows] = directions * size**0.5
    head = weights["lm_head.weight"] * 0
    head[following] = directions
    ones = mx.ones((size,))
    weights |= {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": ones,
    }
    turned = mx.concatenate([directions[-1:], directions[:-1]])  # maps each direction to the next
    parts = Parts(ones, ones, mx.concatenate([turned, -0.01 * directions], axis=1), ones)
    published = heads.head_of("mimo", weights, parts)
    heads.write(folder, "mimo", head=published)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder, ring


@pytest.mark.parametrize("from_the_start", [True, False])
def test_each_guess_is_made_of_the_hidden_state_before_its_token(
    from_the_start: bool, tmp_path: Path
) -> None:
    folder, ring = orbit(tmp_path / "ring")
    target = loaded(folder)
    files = find_head(check_folder(folder, "ring"), target.config)
    assert files is not None
    head, _ = load_head(files, target, is_metal=False, memory_limit=MEMORY)
    choice = choose_attention("auto", prepare(head, target.config, "ring"))
    drafting = PagedDrafting(MtpHead, choice.loaded, choice.backends, files.files)
    drafted = Drafted(target, drafting, 4)
    start = ring[:30] if from_the_start else ring[3:8]
    [answer, other] = drafted.run(start, ring[50:53], max_tokens=30)
    at = start[-1] - ring[0]
    assert list(answer.token_ids)[len(start) :] == ring[at + 1 : at + 31]
    for each in (answer, other):
        assert each.num_accepted == each.num_drafted > 15


@pytest.mark.parametrize(
    "value",
    [pytest.param(np.nan, id="nan"), pytest.param(None, id="noise", marks=pytest.mark.slow)],
)
def test_whatever_is_in_a_heads_cache_changes_no_token(value: float | None, tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "mimo", "mimo")
    target = loaded(folder)
    drafting = drafting_of(folder, target)
    prompts = [heads.TEXT[:20], [5, 6, 7]]
    expected = Drafted(target, drafting, 0).run(*prompts, max_tokens=20)
    with spoiled_pages(value, every=2) as times:
        found = Drafted(target, drafting, 3).run(*prompts, max_tokens=20)
    assert [list(each.token_ids) for each in found] == [list(each.token_ids) for each in expected]
    assert len(times) > 3
    assert sum(each.num_accepted - each.num_drafted for each in found) < 0


def test_a_head_of_no_numbers_changes_no_token(tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "mimo", "mimo")
    target = loaded(folder)
    drafting = drafting_of(folder, target)
    prompts = [heads.TEXT[:20], [5, 6, 7]]
    expected = Drafted(target, drafting, 0).run(*prompts, max_tokens=10)
    model = drafting.loaded.model
    model.update(tree_map(lambda array: array * mx.nan, model.parameters()))
    found = Drafted(target, drafting, 3).run(*prompts, max_tokens=10)
    assert [list(each.token_ids) for each in found] == [list(each.token_ids) for each in expected]
    assert sum(each.num_drafted for each in found) > 0


# ---- loading


@pytest.mark.parametrize("kind", ["mimo", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_head_of_another_model_is_refused(kind: str, tmp_path: Path) -> None:
    other, _ = heads.build(kind, seed=5)
    weights = dict(tree_flatten(other.parameters()))
    parts = heads.random_parts(heads.right_parts(kind, weights).final_norm.shape[0], seed=2)
    folder = heads.write(tmp_path / kind, kind, head=heads.head_of(kind, weights, parts))
    with pytest.raises(HeadRefused, match=r"guesses at 32 tokens of a text are right and 10 % are"):
        drafting_of(folder, loaded(folder))


def test_a_head_of_no_numbers_is_refused(tmp_path: Path) -> None:
    weights = dict(tree_flatten(heads.build("mimo")[0].parameters()))
    head = {name: array * mx.nan for name, array in heads.head_of("mimo", weights).items()}
    folder = heads.write(tmp_path / "nan", "mimo", head=head)
    with pytest.raises(HeadRefused, match="0 % of its guesses"):
        drafting_of(folder, loaded(folder))


def test_a_head_without_a_tensor_is_refused(tmp_path: Path) -> None:
    weights = dict(tree_flatten(heads.build("mimo")[0].parameters()))
    head = heads.head_of("mimo", weights)
    del head["model.mtp_layers.0.mlp.up_proj.weight"]
    folder = heads.write(tmp_path / "part", "mimo", head=head)
    with pytest.raises(HeadRefused, match=r"its head does not fit a mimo model: Missing 1 param"):
        drafting_of(folder, loaded(folder))


def test_norms_are_taken_either_way(tmp_path: Path) -> None:
    """A file of mlx has norms as they are; one that says so wrongly would be refused otherwise."""
    folder = heads.write(tmp_path / "qwen3_5", "qwen3_5")
    file = folder / "model-mtp.safetensors"
    mx.save_safetensors(str(file), mx.load(str(file)), metadata={"format": "mlx"})
    target = loaded(folder)
    drafting = drafting_of(folder, target)
    norm = dict(tree_flatten(drafting.loaded.model.parameters()))[
        "whole.language_model.model.embed_tokens.hidden_norm.weight"
    ]
    assert mx.array_equal(norm, mx.ones_like(norm))


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_5",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "qwen3_5"),
    ],
)
def test_a_folder_of_a_head_alone_drafts(kind: str, tmp_path: Path) -> None:
    """As mlx-vlm writes it: without a prefix, experts stacked, norms as they are."""
    folder = heads.write(tmp_path / kind, kind, head={})
    weights = dict(tree_flatten(heads.build(kind)[0].parameters()))
    prefix = re.compile(r"mtp\.|model\.layers\.2\.|model\.mtp_layers\.0\.")
    own = heads.head_of(kind, weights, is_published=False)
    split = {prefix.sub("", name): array for name, array in own.items()}
    if kind == "glm4_moe_lite":
        # Its splitter has names of its own, and copies of what is shared.
        split = {
            f"model.{name.replace('shared_head.norm', 'shared_head_norm')}"
            if name.startswith(("enorm", "hnorm", "eh_proj", "shared_head"))
            else f"model.mtp_block.{name}": array
            for name, array in split.items()
        }
        split |= {"model.embed_tokens.weight": mx.zeros((9, 9)), "lm_head.weight": mx.zeros((9, 9))}
    alone = tmp_path / "alone"
    alone.mkdir()
    config = {"model_type": f"{kind}_mtp", "text_config": {}}
    (alone / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(alone / "model.safetensors"), split, metadata={"format": "mlx"})
    target = loaded(folder)
    assert find_head(check_folder(folder, "whole"), target.config) is None
    drafted = Drafted(target, drafting_of(alone, target), 3)
    [answer] = drafted.run(heads.TEXT[:20], max_tokens=10)
    assert answer.num_accepted == answer.num_drafted > 5


@pytest.mark.parametrize("kind", families("mimo"))
def test_on_metal_a_head_has_four_bits(kind: str, tmp_path: Path) -> None:
    folder = heads.write(tmp_path / kind, kind)
    target = loaded(folder)
    files = find_head(check_folder(folder, kind), target.config)
    assert files is not None
    head, _ = load_head(files, target, is_metal=True, memory_limit=MEMORY)
    bits = {
        path.rpartition(".")[2]: module.bits
        for path, module in head.named_modules()
        if hasattr(module, "bits")
    }
    assert bits["projection"] == 4
    assert {number for name, number in bits.items() if "gate" not in name} == {4}
    assert bits.get("gate", 8) in (4, 8)
    assert set(bits) & {"o_proj", "q_b_proj"}, "the layer's projections are quantised"


def test_on_metal_a_head_computes_in_the_dtype_of_its_model(tmp_path: Path) -> None:
    weights = dict(tree_flatten(heads.build("step3p5")[0].parameters()))
    head = {n: array.astype(mx.bfloat16) for n, array in heads.head_of("step3p5", weights).items()}
    folder = heads.write(tmp_path / "half", "step3p5", head=head)
    target = loaded(folder)
    files = find_head(check_folder(folder, "half"), target.config)
    assert files is not None
    model, _ = load_head(files, target, is_metal=True, memory_limit=MEMORY)
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
    assert dtypes == {target.dtype, mx.uint32}


def test_weights_that_are_quantised_stay_as_they_are(tmp_path: Path) -> None:
    weights = dict(tree_flatten(heads.build("mimo")[0].parameters()))
    head: dict[str, mx.array] = {}
    for name, array in heads.head_of("mimo", weights).items():
        if array.ndim == 2:
            path = name.removesuffix(".weight")
            packed, scales, biases = mx.quantize(array, 32, 8)
            head |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
        else:
            head[name] = array
    folder = heads.write(tmp_path / "mimo", "mimo", head=head)
    target = loaded(folder)
    files = find_head(check_folder(folder, "mimo"), target.config)
    assert files is not None
    model, _ = load_head(files, target, is_metal=True, memory_limit=MEMORY)
    found = {(m.bits, m.group_size) for _, m in model.named_modules() if hasattr(m, "bits")}
    assert found == {(8, 32)}
    drafted = Drafted(target, drafting_of(folder, target), 3)
    [answer] = drafted.run(heads.TEXT[:20], max_tokens=10)
    assert answer.num_accepted > 5


def test_a_head_shares_its_models_embedding_and_head(tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "mimo", "mimo")
    target = loaded(folder)
    model = drafting_of(folder, target).loaded.model
    assert isinstance(model, HeadModel)
    sizes = [array.shape[0] for _, array in tree_flatten(model.parameters())]
    assert target.vocab_size not in sizes


def test_models_without_a_head_have_none(model_folder: Callable[[str], Path]) -> None:
    for kind in ("llama", "qwen3_next"):
        files = check_folder(model_folder(kind), kind)
        assert find_head(files, files.config) is None
