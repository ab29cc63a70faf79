"""Renders probes with the chat template of a tokenizer, as requests are rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from mlxserve.text.controls import EFFORT, SWITCH
from mlxserve.text.probes import Probe, RenderEach
from mlxserve.text.template_caps import TemplateCaps, find_abilities
from mlxserve.text.templates import TextRenderer

# Arguments that transformers consumes instead of passing them to the template. Some of them would
# replace the template or change the result's type from a list of token ids.
RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
# AssertionError: how mlx-lm's template of DeepSeek V3.2, a Python function, refuses a conversation.
TEMPLATE_ERRORS = (
    TemplateError,
    AssertionError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
# Variables that a conversation sets.
_OF_CONVERSATIONS = frozenset({"add_generation_prompt", "documents", "messages", "tools"})
_THINKING = {SWITCH: True, "thinking": True}
_ANY_TOOL = {"type": "function", "function": {"name": "any"}}


def template_of(wrapper: Any, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the template for a conversation with these tools; None if there is none in Jinja."""
    template = wrapper.chat_template
    if isinstance(template, dict):
        template = wrapper.get_chat_template(None, tools)
    return template if isinstance(template, str) else None


def abilities_of(wrapper: Any, renderer: TextRenderer) -> TemplateCaps:
    """Probe the capabilities of the chat template in mlx-lm's wrapper of a tokenizer.

    A template with a syntax error has all abilities; the first request reports the error.
    """
    template = template_of(wrapper, [_ANY_TOOL])
    # A function, which may raise for any name that it does not know.
    if template is None:
        caps = find_abilities(renderer_of(wrapper, renderer), {EFFORT: ()})
        return replace(caps, variables=frozenset())
    try:
        literals = renderer.variables(template)
        known = {*wrapper.special_tokens_map, *RESERVED, *_OF_CONVERSATIONS}
        return find_abilities(
            renderer_of(wrapper, renderer),
            {name: strings for name, strings in literals.items() if name not in known},
        )
    except TemplateError:
        return TemplateCaps()


def renderer_of(wrapper: Any, renderer: TextRenderer) -> RenderEach:
    """Return what renders probes with the chat template in mlx-lm's wrapper of a tokenizer."""
    if template_of(wrapper, [_ANY_TOOL]) is None:
        return lambda probes: _rendered_here(wrapper, probes)
    return lambda probes: _rendered(wrapper, renderer, probes)


def _rendered(wrapper: Any, renderer: TextRenderer, probes: Sequence[Probe]) -> list[str | None]:
    """Render all probes in one trip to the helper process."""
    common = {
        "documents": None,
        "return_assistant_tokens_mask": False,
        "continue_final_message": False,
        "add_generation_prompt": True,
        **wrapper.special_tokens_map,
    }
    return renderer.render_each(
        [
            {
                **common,
                **(_THINKING if probe.variables is None else probe.variables),
                "conversations": [probe.messages],
                "tools": probe.tools,
                "chat_template": template_of(wrapper, probe.tools),
            }
            for probe in probes
        ]
    )


def _rendered_here(wrapper: Any, probes: Sequence[Probe]) -> list[str | None]:
    return [_rendered_in_python(wrapper, probe) for probe in probes]


def _rendered_in_python(wrapper: Any, probe: Probe) -> str | None:
    try:
        return str(
            wrapper.apply_chat_template(
                probe.messages,
                tools=probe.tools,
                tokenize=False,
                add_generation_prompt=True,
                **(probe.variables or {}),
            )
        )
    except TEMPLATE_ERRORS:
        return None
