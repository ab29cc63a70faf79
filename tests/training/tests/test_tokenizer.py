"""The packaged tokenizer: lossless, the same pieces for a word everywhere, and its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlxserve.hub.embedded import model_path
from tests.training import words
from tests.training.conversation import assistant, system, user
from tests.training.tokenizer import (
    END,
    END_OF_TEXT,
    MARKERS,
    START,
    TEMPLATE,
    ChatEncoder,
    frequent_words,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

SHIPPED = load_tokenizer(model_path())
ENCODER = ChatEncoder(SHIPPED)
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


def encode(text: str) -> list[int]:
    return list(SHIPPED.encode(text, add_special_tokens=False).ids)


def decode(ids: list[int]) -> str:
    return str(SHIPPED.decode(ids, skip_special_tokens=False))


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "Zs"]), min_size=1))
def test_text_within_the_marks_of_a_turn_survives(text: str) -> None:
    whole = f"{START}user\n{text}{END}\n"
    ids = encode(whole)
    assert decode(ids) == whole
    assert ids[0] == SHIPPED.token_to_id(START)


@pytest.mark.parametrize("word", ["plum-42", "K7-92B", "brokat", "Zoe", "falcon", "qzvtab"])
@pytest.mark.parametrize("template", ["{}", "is {}.", '"{}"', "`{}`", "\n{}\n", "({}), and"])
def test_a_word_to_copy_has_the_same_pieces_everywhere(word: str, template: str) -> None:
    pieces, within = encode(word), encode(template.format(word))
    assert any(within[i : i + len(pieces)] == pieces for i in range(len(within)))


def test_no_listed_word_is_merged_with_its_space() -> None:
    assert all(encode(f" {word}")[0] == encode(" ")[0] for word in words.LISTED)


def test_every_digit_and_sign_is_a_token() -> None:
    assert len(encode("4096")) == 4
    assert len(encode("?!,.")) == 4


def test_a_frequent_word_is_merged_with_its_space() -> None:
    assert len(encode(" the")) == len(encode(" is")) == 1


@pytest.mark.parametrize("marker", [START, END, END_OF_TEXT, *MARKERS])
def test_a_marker_is_one_token(marker: str) -> None:
    assert len(encode(marker)) == 1


def test_special_tokens_are_hidden_and_markers_are_not() -> None:
    ids = encode(f"{START}<tool_call>x</tool_call>{END}")
    assert SHIPPED.decode(ids) == "<tool_call>x</tool_call>"


def test_training_is_deterministic_and_gives_the_requested_size(tmp_path: Path) -> None:
    texts = [f"the cat and {word}, or the code word plum-42" for word in words.ENGLISH]
    first, second = (train_tokenizer(texts, 320) for _ in range(2))
    assert first.get_vocab_size() == 320
    assert first.to_str() == second.to_str()
    save_tokenizer(first, tmp_path, 64)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == first.to_str()


def test_words_to_copy_are_never_frequent() -> None:
    assert frequent_words(["a cat cat the the"], copied={"cat"}) == ["the"]


def test_the_packaged_template_is_the_one_that_trained_the_model() -> None:
    config = json.loads((model_path() / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE.read_text()


# --- the chat template, as transformers renders it ---


@pytest.fixture(scope="module")
def hf_tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "plain": ([user("Hello")], []),
    "system": ([system("Be brief."), user("Hello")], []),
    "turns": ([user("a"), assistant("b"), user("c")], []),
    "tools": ([user("Weather?")], [WEATHER]),
    "tools and system": ([system("Be brief."), user("Weather?")], [WEATHER]),
    "tool result": (
        [
            user("Weather in Zürich?"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
                ],
            },
            {"role": "tool", "content": "sunny"},
        ],
        [WEATHER],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_transformers_renders_the_same_as_training(name: str, hf_tokenizer) -> None:  # type: ignore[no-untyped-def]
    messages, tools = CONVERSATIONS[name]
    rendered = hf_tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    assert rendered == ENCODER.render(messages, tools, open_turn=True)
    assert rendered.endswith(f"{END}\n{START}assistant\n")
    assert hf_tokenizer.encode(rendered, add_special_tokens=False) == ENCODER.encode(rendered)


def test_enable_thinking_is_tolerated(hf_tokenizer) -> None:  # type: ignore[no-untyped-def]
    plain, thinking = (
        hf_tokenizer.apply_chat_template([user("Hello")], tokenize=False, **options)
        for options in ({}, {"enable_thinking": True})
    )
    assert plain == thinking


def test_a_rendered_call_is_the_common_json_form() -> None:
    messages, tools = CONVERSATIONS["tool result"]
    text = ENCODER.render(messages, tools, open_turn=True)
    call = text.split("<|im_start|>assistant\n<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert json.loads(call) == {"name": "get_weather", "arguments": {"city": "Zürich"}}
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_arguments_may_be_a_string_as_in_the_openai_api() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = ENCODER.render([user("a"), message], [], open_turn=False)
    assert '{"name": "f", "arguments": {"x": 1}}' in text


def test_only_the_assistants_tokens_are_taught() -> None:
    messages = [system("s"), user("Say plum."), assistant("plum"), user("again"), assistant("plum")]
    ids = ENCODER.encode(ENCODER.render(messages, [], open_turn=False))
    taught = [token for token, mark in zip(ids, ENCODER.taught(ids), strict=True) if mark]
    assert decode(taught) == f"plum{END}" * 2


def test_the_generation_prompt_ends_where_the_taught_tokens_begin() -> None:
    question, answer = user("Say plum."), assistant("plum")
    prompt = ENCODER.encode(ENCODER.render([question], [], open_turn=True))
    whole = ENCODER.encode(ENCODER.render([question, answer], [], open_turn=False))
    assert whole[: len(prompt)] == prompt
    assert not any(ENCODER.taught(whole)[: len(prompt)])
    assert ENCODER.taught(whole)[len(prompt)]
