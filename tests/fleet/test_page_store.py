"""A conversation begun at one server goes on at another one, for every kind of model, and no token changes.

The oracle is the same engine without a store, whose tokens `tests/test_equality.py` and its neighbours hold against
mlx-lm's dense path.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.chat.answers import RequestOutput
from tests.adapters import write_adapter
from tests.fleet.redis_server import RedisServer
from tests.model.small_vision import image, write_vision_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("unhurried_disk", "unhurried_store")]

PAGE = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "num_pages": 120,
    "page_size": PAGE,
    "max_model_len": 256,
    "disable_log_stats": True,
}

Folder = Callable[[str], tuple[str, dict[str, Any]]]
KINDS = ("dense", "windows", "states", "windows and states", "adapters", "8 bits")


@pytest.fixture
def folder_of(
    model_folder: Callable[[str], Path], write_model: Callable[..., Path], tmp_path: Path
) -> Folder:
    """Return a kind's folder, and the options of its engine."""

    def make(kind: str) -> tuple[str, dict[str, Any]]:
        if kind == "windows":
            return str(write_model(tmp_path, "gpt_oss", sliding_window=24)), {
                "num_window_pages": 40
            }
        if kind == "states":
            return str(write_model(tmp_path, "qwen3_next")), {"num_state_slots": 24}
        if kind == "windows and states":
            sizes = {"num_window_pages": 40, "num_state_slots": 24}
            changes = {"sliding_window": 24, "max_position_embeddings": 1024}
            return str(write_model(tmp_path, "gear", **changes)), sizes
        folder = model_folder("llama")
        if kind == "adapters":
            return str(folder), {"adapters": {"a": write_adapter(tmp_path / "a", folder, seed=1)}}
        return str(folder), {"kv_cache_dtype": "q8"} if kind == "8 bits" else {}

    return make


def some(length: int, seed: int = 4) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(500) for _ in range(length)]


def ask(llm: LLM, prompt: list[int], kind: str = "") -> RequestOutput:
    adapter = "a" if kind == "adapters" else None
    [output] = llm.generate([prompt], GREEDY, adapter=adapter, use_tqdm=False)
    llm.check()
    return output


def has_all(llm: LLM, store: RedisServer) -> bool:
    """True once the engine knows of every record."""
    return llm.stats().store.num_pages == len(store.keys())


def expect_found(output: RequestOutput, prompt: list[int], new: int) -> None:
    """At most one page and the `new` tokens at the end are computed; all others come from the store."""
    cache = output.usage.cache
    assert cache is not None
    assert cache.num_tokens >= len(prompt) - new - PAGE
    assert (cache.num_from_store, cache.num_from_disk) == (cache.num_tokens, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_at_another_server(
    kind: str, folder_of: Folder, store: RedisServer
) -> None:
    folder, options = folder_of(kind)
    options = {**OPTIONS, **options}
    first = some(150)
    with LLM(folder, **options) as alone:
        answer = ask(alone, first, kind).token_ids
        second = [*first, *answer, *some(20, seed=5)]
        expected = ask(alone, second, kind).token_ids
    with LLM(folder, page_store=store.url, **options) as b:
        with LLM(folder, page_store=store.url, **options) as a:
            assert ask(a, first, kind).token_ids == answer
        wait_until(lambda: has_all(b, store))
        found = ask(b, second, kind)
        assert found.token_ids == expected
        expect_found(found, second, new=20)
        again = ask(b, second, kind)
        assert again.token_ids == expected
        assert again.usage.cache is not None
        assert again.usage.cache.num_from_store == 0, "what memory has is not read"
    with LLM(folder, page_store=store.url, **options) as c:  # finds them by listing the store
        found = ask(c, second, kind)
        assert found.token_ids == expected
        expect_found(found, second, new=20)


def test_a_conversation_of_8000_tokens_goes_on_at_another_server(
    write_model: Callable[..., Path], store: RedisServer, tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 16_384, "num_hidden_layers": 1}
    folder = str(write_model(tmp_path, "llama", **sizes))
    options: dict[str, Any] = {**OPTIONS, "num_pages": 560, "max_model_len": 8400}
    first = some(8000)
    with LLM(folder, **options) as alone:
        answer = ask(alone, first).token_ids
        second = [*first, *answer, *some(40, seed=5)]
        expected = ask(alone, second).token_ids
    with LLM(folder, page_store=store.url, **options) as a:
        assert ask(a, first).token_ids == answer
    with LLM(folder, page_store=store.url, **options) as b:
        found = ask(b, second)
    assert found.token_ids == expected
    expect_found(found, second, new=40)


def test_images_are_found_by_their_contents(tmp_path: Path, store: RedisServer) -> None:
    folder = str(write_vision_model(tmp_path, "qwen3_vl"))
    text = " Say it in a few words, and then say it once more, please."

    def answer(llm: LLM, seed: int) -> RequestOutput:
        parts = [
            {"type": "text", "text": "What is this? "},
            {"type": "image", "image": image(seed)},
            {"type": "text", "text": text},
        ]
        [output] = llm.chat([[{"role": "user", "content": parts}]], GREEDY, use_tqdm=False)
        return output

    with LLM(folder, **OPTIONS) as alone:
        expected = [answer(alone, seed).token_ids for seed in (1, 2)]
    with LLM(folder, page_store=store.url, **OPTIONS) as a:
        assert answer(a, 1).token_ids == expected[0]
    with LLM(folder, page_store=store.url, **OPTIONS) as b:
        found = answer(b, 1)
        assert found.token_ids == expected[0]
        assert found.usage.cache is not None
        assert found.usage.cache.num_from_store > 2 * PAGE
        assert b.stats().vision.num_computed == 0
        other = answer(b, 2)
        assert other.token_ids == expected[1]
        assert other.usage.cached_tokens <= PAGE, "another image"


def test_what_the_disk_has_is_read_from_disk_and_the_rest_from_the_store(
    model_folder: Callable[[str], Path], store: RedisServer, tmp_path: Path
) -> None:
    folder, first = str(model_folder("llama")), some(100)
    longer = [*first, *some(60, seed=5)]
    disk = {"disk_cache_size": 1, "disk_cache_dir": str(tmp_path / "disk")}
    with LLM(folder, **disk, **OPTIONS) as llm:
        ask(llm, first)
    with LLM(folder, page_store=store.url, **OPTIONS) as llm:
        expected = ask(llm, longer).token_ids
    with LLM(folder, page_store=store.url, **disk, **OPTIONS) as both:
        found = ask(both, longer)
        assert found.token_ids == expected
        assert found.usage.cache is not None
        assert found.usage.cache.num_tokens == 144
        assert (found.usage.cache.num_from_disk, found.usage.cache.num_from_store) == (96, 48)
    with LLM(folder, **disk, **OPTIONS) as llm:
        found = ask(llm, longer)
        assert found.usage.cache is not None
        assert found.usage.cache.num_from_disk == 144, "what came from the store is kept on disk"


def test_keys_models_and_dtypes_never_share_a_record(
    model_folder: Callable[[str], Path],
    write_model: Callable[..., Path],
    store: RedisServer,
    tmp_path: Path,
) -> None:
    folder, prompt = str(model_folder("llama")), some(100)
    other = str(write_model(tmp_path, "llama", rms_norm_eps=0.1))

    def cached(folder: str, salt: str | None = None, **options: Any) -> int:
        with LLM(folder, page_store=store.url, **{**OPTIONS, **options}) as llm:
            [output] = llm.generate([prompt], GREEDY, cache_salt=salt, use_tqdm=False)
        return output.usage.cached_tokens

    ways: list[dict[str, Any]] = [
        {"folder": folder},
        {"folder": folder, "salt": "mine"},
        {"folder": folder, "salt": "yours"},
        {"folder": folder, "kv_cache_dtype": "q8"},
        {"folder": folder, "page_size": 32},
        {"folder": other},
    ]
    assert [cached(**way) for way in ways] == [0] * len(ways)
    assert [cached(**way) for way in ways] == [96] * len(ways)
