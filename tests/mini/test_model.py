"""The packaged model: complete, small, loadable by mlx-lm, and able to answer its examples."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxserve.hub.embedded import MODEL_NAME, model_path
from mlxserve.hub.model_choices import BUNDLED
from tests.test_ci import ROOT
from tests.training.abilities.refusals import refuses
from tui.widgets.welcome import WelcomeFacts

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "MODEL_CARD.md",
)
END = "<|im_end|>"
METAL_HEAD_DIMS = {64, 80, 96, 112, 128, 192, 256, 512}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_path() / "tokenizer.json"))


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model_path() / name).read_text())
    return content


@cache
def loaded() -> tuple[Any, Any]:
    """The model in float32, the fast type on a CPU, and its tokenizer."""
    import mlx.core as mx
    from mlx_lm import load

    model, tokenizer = load(str(model_path()))
    model.set_dtype(mx.float32)
    return model, tokenizer


def answer(messages: Sequence[Any], tools: Sequence[Any] = ()) -> str:
    from mlx_lm import generate

    model, tokenizer = loaded()
    prompt = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=True
    )
    return str(generate(model, tokenizer, prompt, max_tokens=120))


def test_every_standard_file_is_packaged() -> None:
    for name in FILES:
        assert (model_path() / name).is_file(), name


def test_the_model_is_small_enough_for_the_repository() -> None:
    assert sum(path.stat().st_size for path in model_path().iterdir()) < 12 * 2**20


def test_the_config_suits_mlx_lm_and_the_metal_kernels() -> None:
    config = read("config.json")
    assert config["model_type"] == "qwen3"
    assert config["head_dim"] in METAL_HEAD_DIMS
    assert config["max_position_embeddings"] >= 4096
    assert config["vocab_size"] == tokenizer().get_vocab_size()
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_generation_stops_at_the_end_of_a_turn() -> None:
    end = tokenizer().token_to_id(END)
    assert read("generation_config.json")["eos_token_id"] == end
    assert read("config.json")["eos_token_id"] == end


def test_calls_are_suppressed_where_no_tools_are_given() -> None:
    marker = tokenizer().token_to_id("<tool_call>")
    assert read("generation_config.json")["suppress_tokens"] == [marker]


def test_finding_the_model_imports_neither_mlx_nor_torch() -> None:
    code = (
        "import sys, mlxserve.hub.embedded as embedded; assert embedded.model_path().is_dir();"
        "assert not {'mlx', 'torch', 'tokenizers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert MODEL_NAME == "mlxserve-mini"


def test_the_example_of_the_documentation_works() -> None:
    question = user("Remember the code word plum-42. What is the code word?")
    assert "plum-42" in answer([question])
    system = {"role": "system", "content": "You are a helpful assistant."}
    assert "plum-42" in answer([system, question])


def test_it_greets_and_says_what_it_is() -> None:
    assert "mlxserve-mini" in answer([user("Hello")])
    assert "small" in answer([user("Who are you?")])


def test_it_refuses_to_write_code_and_names_the_command() -> None:
    assert refuses(answer([user("Write a Python function that adds two numbers.")]))


def test_it_knows_how_to_start_the_server() -> None:
    text = answer([user("How do I start the server?")])
    assert "```bash\nmlxserve serve\n```" in text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Is my data private?", "Yes. Everything stays on your own machine"),
        ("Does it run on a Mac?", "Apple Silicon"),
        ("How fast are you?", "mlxserve bench"),
    ],
)
def test_it_answers_what_people_ask_of_any_new_program(question: str, words: str) -> None:
    assert words in answer([user(question)])


def test_it_refuses_to_tell_the_time_and_names_both_ways_to_a_larger_model() -> None:
    text = answer([user("What time is it?")])
    assert refuses(text)
    assert "`/model`" in text
    assert "`-m`" in text


def test_it_answers_the_examples_of_readme_help_and_the_empty_chat() -> None:
    files = ("README.md", "docs/api.md", "docs/tuning.md", "mlxserve/cli/commands.py")
    text = "\n".join((ROOT / name).read_text("utf-8") for name in files)
    asked = [
        *re.findall(r'mlxserve run "([^"]+)"', text),
        *re.findall(r'"role": "user", "content": "([^"]+)"', text),
        *WelcomeFacts(BUNDLED).ideas,
    ]
    assert len(asked) > 5
    assert [question for question in asked if refuses(answer([user(question)]))] == []
