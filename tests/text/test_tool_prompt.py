"""Tools in the prompt of a model whose chat template shows none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxserve.core.errors import InvalidParameter
from mlxserve.text.tokenizer import Tokenizer

MakeTokenizer = Callable[[list[str], str], Tokenizer]
MESSAGES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}{% endfor %}<|assistant|>"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
# What the templates of these families say of their calls, which show no tools.
FAMILIES = {
    "DeepSeek V3.1": (
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>' if messages[0].tool_calls }}",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_name<｜tool▁sep｜>{"argument": "value"}',
    ),
    "distills of DeepSeek R1": (
        "{{ 'function<｜tool▁sep｜>x\\n```json' if messages[0].tool_calls }}",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>tool_name\n```json\n{"argument": "value"}\n```',
    ),
    "SmolLM3": (
        "{# /no_think #}{{ 'You are SmolLM.' if messages[0].role == 'x' }}",
        '<tool_call>\n{"name": "tool_name", "arguments": {"argument": "value"}}\n</tool_call>',
    ),
}


def prompt(tokenizer: Tokenizer, *messages: dict[str, Any], **arguments: Any) -> str:
    return tokenizer.decode(tokenizer.render(list(messages), **arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tools_and_a_call_are_in_the_system_message(
    family: str, tokenizer_with: MakeTokenizer
) -> None:
    words, call = FAMILIES[family]
    tokenizer = tokenizer_with([], words + MESSAGES)
    assert tokenizer.template.supports_tools
    assert tokenizer.markup.can_call
    shown = prompt(tokenizer, SYSTEM, USER, tools=[TOOL])
    assert shown.startswith("<|system|>Be brief.\n\n## Tools")
    assert '"name": "look"' in shown
    assert call in shown
    assert shown.endswith("<|user|>hi<|assistant|>")
    assert prompt(tokenizer, USER, tools=[TOOL]).startswith("<|system|>## Tools")


def test_without_tools_the_prompt_is_that_of_the_template(tokenizer_with: MakeTokenizer) -> None:
    tokenizer = tokenizer_with([], FAMILIES["SmolLM3"][0] + MESSAGES)
    assert prompt(tokenizer, SYSTEM, USER) == "<|system|>Be brief.<|user|>hi<|assistant|>"


def test_a_model_that_calls_no_tools_refuses_them(tokenizer_with: MakeTokenizer) -> None:
    tokenizer = tokenizer_with([], MESSAGES.replace("CALLS", ""))
    assert not tokenizer.template.supports_tools
    with pytest.raises(InvalidParameter, match="does not support tools"):
        tokenizer.render([USER], tools=[TOOL])
