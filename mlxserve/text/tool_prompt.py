"""Shows tools in the prompt of a model that calls them, but whose chat template shows none.

DeepSeek V3.1, the distills of R1 and some SmolLM3 are trained to call tools, and vLLM and Ollama have
templates of their own for them. Here the model's own template is kept: the tools are a part of the
system message, with a call as the model writes it.
"""

from __future__ import annotations

import json
from typing import Any

from mlxserve.text.format_choice import candidates_of
from mlxserve.text.parsing.writing import write_calls

_EXAMPLE = ("tool_name", {"argument": "value"}, None)
_INTRODUCTION = "## Tools\n\nYou may call these tools, whose arguments follow their JSON schemas:\n"
_INSTRUCTION = "\n\nTo call a tool, write exactly this, with its name and its arguments:\n\n{call}"
_BEFORE = """\
{%- if tools -%}
{%- set shown = namespace(text=INTRODUCTION) -%}
{%- for tool in tools -%}{%- set shown.text = shown.text + '\\n' + (tool | tojson) -%}{%- endfor -%}
{%- set shown.text = shown.text + INSTRUCTION -%}
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set shown.text = messages[0]['content'] + '\\n\\n' + shown.text -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- set messages = [{'role': 'system', 'content': shown.text}] + messages -%}
{%- endif -%}
"""


def show_tools(wrapper: Any) -> None:
    """Make the template of mlx-lm's wrapper show tools, if it shows none and its model calls them."""
    template = wrapper.chat_template
    if not isinstance(template, str) or "tools" in template:
        return
    row = next(iter(candidates_of(wrapper)), None)
    if row is None:
        return
    instruction = _INSTRUCTION.format(call=write_calls(row, [_EXAMPLE]))
    before = _BEFORE.replace("INTRODUCTION", _literal(_INTRODUCTION))
    wrapper.chat_template = before.replace("INSTRUCTION", _literal(instruction)) + template


def _literal(text: str) -> str:
    """A text as an expression of Jinja."""
    return json.dumps(text, ensure_ascii=False)
