"""Saved prompts: kept in the file of the chats, by name, within limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.history import saved_prompts
from mlxserve.history.saved_prompts import MAX_SYSTEM, PromptRefused
from mlxserve.history.store import Store


def names(store: Store) -> list[str]:
    return [prompt.name for prompt in store.prompts.all()]


def test_a_prompt_is_there_when_the_file_is_opened_again(store: Store, path: Path) -> None:
    saved = store.prompts.save("Pirate", "Talk like a pirate.", {"temperature": 1.1, "seed": 3})
    store.close()
    again = Store.open(path)
    assert again.prompts.all() == [saved]
    assert (saved.system, saved.sampling) == (
        "Talk like a pirate.",
        {"temperature": 1.1, "seed": 3},
    )
    again.close()


def test_prompts_are_listed_by_name_and_one_of_the_same_name_is_replaced(store: Store) -> None:
    for name in ("zebra", "Apple", "banana"):
        store.prompts.save(name, name, {})
    before = store.prompts.all()
    after = store.prompts.save("banana", "ripe", {"top_k": 5})
    assert names(store) == ["Apple", "banana", "zebra"]
    assert [prompt.id for prompt in store.prompts.all()] == [prompt.id for prompt in before]
    assert store.prompts.all()[1] == after


def test_the_id_of_a_deleted_prompt_is_not_used_again(store: Store) -> None:
    first = store.prompts.save("one", "", {})
    assert store.prompts.delete(first.id)
    assert not store.prompts.delete(first.id)
    assert store.prompts.save("two", "", {}).id > first.id


def test_what_exceeds_a_limit_is_refused_and_nothing_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_prompts, "MAX_PROMPTS", 2)
    monkeypatch.setattr(saved_prompts, "MAX_CHARACTERS", 10)
    kept = [store.prompts.save("one", "12345", {}), store.prompts.save("two", "1234", {})]
    with pytest.raises(PromptRefused, match=r"2 prompts are saved already\. Delete one"):
        store.prompts.save("three", "", {})
    with pytest.raises(PromptRefused, match="together may have 10 characters"):
        store.prompts.save("two", "123456", {})
    with pytest.raises(PromptRefused, match="may have 262,144 characters"):
        store.prompts.save("two", "x" * (MAX_SYSTEM + 1), {})
    assert store.prompts.all() == kept
    assert store.prompts.save("two", "12345", {}).system == "12345", "its own place is free"
