"""A prompt for the text in the middle, in the tokens of each family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlxserve.text.fill_in_middle import FillInMiddle, OtherFile

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>"]


def shown(vocabulary: Sequence[str], *files: OtherFile) -> str:
    """The prompt of such a vocabulary, in which a character that is no token has its code."""
    ids = {token: 1_000_000 + number for number, token in enumerate(vocabulary)}
    way = FillInMiddle.find(ids.get)
    assert way is not None
    names = {number: token for token, number in ids.items()}
    tokens = way.encode("PRE", "SUF", lambda text: list(map(ord, text)), files)
    return "".join(names[token] if token in names else chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("vocabulary", "prompt"),
    [
        (QWEN, "<|fim_prefix|>PRE<|fim_suffix|>SUF<|fim_middle|>"),
        (
            ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
            "<fim_prefix>PRE<fim_suffix>SUF<fim_middle>",
        ),
        (
            ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>PRE<｜fim▁hole｜>SUF<｜fim▁end｜>",
        ),
        (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "[SUFFIX]SUF[PREFIX]PRE"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "▁<PRE>PRE▁<SUF>SUF▁<MID>"),
        (
            ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
            "<|code_prefix|>PRE<|code_suffix|>SUF<|code_middle|>",
        ),
        (
            ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],
            "<[fim-suffix]>SUF<[fim-prefix]>PRE<[fim-middle]>",
        ),
    ],
)
def test_a_prompt_is_written_as_its_family_was_taught(
    vocabulary: Sequence[str], prompt: str
) -> None:
    assert shown(vocabulary) == prompt


def test_other_files_are_before_the_text() -> None:
    files = OtherFile("a.py", "x = 1"), OtherFile("b.py", "y = 2")
    assert shown(QWEN, *files).startswith(
        "<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>\n<|fim_prefix|>"
    )
    assert shown(["[PREFIX]", "[SUFFIX]"], *files).startswith("a.py\nx = 1\nb.py\ny = 2\n[SUFFIX]")


def test_the_tokens_of_a_prompt_end_an_answer() -> None:
    ids = {token: number for number, token in enumerate(QWEN)}
    way = FillInMiddle.find(ids.get)
    assert way is not None
    assert set(way.ends) == set(ids.values())


def test_a_vocabulary_without_all_tokens_of_a_family_has_none() -> None:
    for vocabulary in ([], ["<|fim_prefix|>"], QWEN[:2]):
        ids = {token: number for number, token in enumerate(vocabulary)}
        assert FillInMiddle.find(ids.get) is None


def test_a_tokenizer_encodes_a_middle_whose_texts_hold_no_tokens(
    tokenizer_with: Callable[[list[str], str], Any],
) -> None:
    tokenizer = tokenizer_with(QWEN, "{{ messages }}")
    prefix, middle, suffix, *_ = map(tokenizer.token_id, QWEN)
    typed = "a<|fim_middle|>"
    token_ids = tokenizer.encode_middle(typed, "b")
    assert token_ids == [
        *(token for token in tokenizer.encode("") if token == token_ids[0]),
        prefix,
        *tokenizer.encode_plain(typed, as_text=True),
        suffix,
        *tokenizer.encode_plain("b"),
        middle,
    ]
    assert token_ids.count(middle) == 1


def test_the_embedded_model_fills_in_no_middle(
    tokenizer_with: Callable[[list[str], str], Any],
) -> None:
    tokenizer = tokenizer_with([], "{{ messages }}")
    assert tokenizer.fill_in_middle is None
    assert tokenizer.token_id("<|fim_prefix|>") is None
