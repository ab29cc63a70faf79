"""Large texts give the tokens that they give here, from a process that can be ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from mlxserve.core.errors import EngineStopped, HelperUnavailable, InvalidRequest
from mlxserve.hub.embedded import model_path
from mlxserve.text import costs, large_texts
from mlxserve.text.templates import RenderedTooLong
from mlxserve.text.tokenizer import Tokenizer

WORDS = "The quick <|im_end|> brown fox é 漢字 "
TOOL = {"type": "function", "function": {"name": "f", "description": WORDS * 99}}


def test_a_large_text_gives_the_same_tokens_as_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedded = Tokenizer(model_path())
    try:
        conversations = [
            [{"role": "user", "content": WORDS * 9}],
            [{"role": "system", "content": "x" * 99}, {"role": "user", "content": "y"}],
        ]
        here = [embedded.encode(WORDS * 9)]
        here += [embedded.render(each, tools=[TOOL]) for each in conversations]
        monkeypatch.setattr(costs, "CHARACTERS_PER_SECOND", 10)
        monkeypatch.setattr(Tokenizer, "encode_here", None)
        monkeypatch.setattr(Tokenizer, "render_here", None)
        there = [embedded.encode(WORDS * 9)]
        there += [embedded.render(each, tools=[TOOL]) for each in conversations]
        assert there == here
        with pytest.raises(RenderedTooLong) as caught:
            embedded.render(conversations[0], max_characters=50)
        assert caught.value.num_characters > len(WORDS * 9)
        with pytest.raises(InvalidRequest, match="chat template rejects these messages"):
            embedded.render([{"role": "user", "content": 5}])
    finally:
        embedded.close()


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedded = Tokenizer(model_path())
    try:
        monkeypatch.setattr(costs, "CHARACTERS_PER_SECOND", 10)
        assert embedded.encode("a text of some words")
        with monkeypatch.context() as patch:
            patch.setattr(large_texts, "SECONDS", 0.01)
            with pytest.raises(InvalidRequest, match=r"cannot be encoded: .* longer than 0\.01 s"):
                embedded.encode(WORDS * 200_000)
        assert embedded.encode("a text of some words")
    finally:
        embedded.close()


def test_text_cannot_be_encoded_after_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CHARACTERS_PER_SECOND", 10)
    embedded = Tokenizer(model_path())
    embedded.close()
    with pytest.raises(EngineStopped, match="closed"):
        embedded.encode("a text of some words")


def test_a_text_that_the_tokenizer_fails_on_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here, as the second process does not find the files that this one has read."""
    monkeypatch.setattr(costs, "CHARACTERS_PER_SECOND", 10)
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    copied = Tokenizer(folder)
    shutil.rmtree(folder)
    with pytest.raises(InvalidRequest, match=r"the tokenizer failed \(UnsupportedModel\)"):
        copied.encode("a text of some words")
    copied.close()


def test_a_text_whose_process_was_stopped_is_encoded_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_texts, "SECONDS", 0.5)
    texts, others = large_texts.LargeTexts(model_path(), [2]), set(psutil.Process().children())
    before = texts.encode("one")
    [child] = set(psutil.Process().children()) - others
    child.suspend()
    with pytest.raises(HelperUnavailable, match=r"large texts was paused; send the request again"):
        texts.encode("one")
    assert texts.encode("one") == before
    texts.close()
