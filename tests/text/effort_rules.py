"""Beginnings of chat templates that treat efforts as public ones do: they raise, insert, fall back or ignore."""

from __future__ import annotations

from collections.abc import Mapping

from mlxserve.text.controls import LADDER


def _of(effort: str) -> str:
    return f"[effort {effort}]"


def _refusing(variable: str, words: str, default: str, error: str, *, only_if: str = "true") -> str:
    """Raises for all but some levels."""
    return (
        f"{{% if {only_if} %}}{{% set resolved = {variable} | default('{default}') %}}"
        f"{{% if resolved not in {words} %}}{{{{ raise_exception({error}) }}}}{{% endif %}}"
        "{{ '[effort ' ~ resolved ~ ']' }}{% endif %}"
    )


_THINKS = "enable_thinking is undefined or enable_thinking is true"
_HY = (
    "{%% if not reasoning_effort is defined %%}{%% set reasoning_effort = '%s' %%}"
    "{%% elif reasoning_effort not in %s %%}"
    "{{ raise_exception('reasoning_effort error : ' + reasoning_effort) }}{%% endif %%}"
    "{{ '[effort ' + reasoning_effort + ']' }}"
)
_DEEPSEEK = (
    "{%% if not thinking is defined %%}{%% set thinking = enable_thinking | default(false) %%}{%% endif %%}"
    "{%% if thinking %%}[thinks]{%% endif %%}"
    "{%% for word in %s %%}{%% if thinking and reasoning_effort is defined and reasoning_effort == word %%}"
    "{{ '[effort ' ~ word ~ ']' }}{%% endif %%}{%% endfor %%}"
)

EFFORT_RULES: Mapping[str, str] = {
    "qwen 3.8": _refusing(
        "reasoning_effort",
        "('xhigh', 'medium', 'low')",
        "xhigh",
        "'Unexpected reasoning effort ' ~ reasoning_effort"
        " ~ '. Supported types are xhigh (default), medium, and low.'",
        only_if=_THINKS,
    ),
    "hy 3": _HY % ("no_think", "['high', 'low', 'no_think']"),
    "hy 4": _HY % ("high", "['high', 'no_think']"),
    "gpt-oss": (
        "{% macro system() %}{% if reasoning_effort is not defined %}"
        "{% set reasoning_effort = 'medium' %}{% endif %}"
        "{{ '[effort ' + reasoning_effort + ']' }}{% endmacro %}{{ system() }}"
    ),
    "muse": (
        "{% set rs = reasoning_strength if reasoning_strength is defined and reasoning_strength else 'high' %}"
        "{{ '[effort ' + rs + ']' }}"
    ),
    "kimi k3": (
        "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
        + _refusing(
            "thinking_effort",
            "['low', 'high', 'max']",
            "max",
            "'Unsupported thinking_effort=' + thinking_effort",
            only_if="thinking",
        )
    ),
    "glm 5.3": (
        "{% set effective = reasoning_effort if reasoning_effort is defined"
        " and reasoning_effort in ['low', 'high'] else 'max' %}[effort {{ effective | capitalize }}]"
    ),
    "deepseek v4": _DEEPSEEK % "['max']",
    "deepseek v4 flash": _DEEPSEEK % "['high', 'max']",
    "solar": (
        "{% set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'high' %}"
        "[effort {{ 'closed' if reasoning_effort in ['low', 'minimal'] else 'open' }}]"
    ),
    "mistral small 4": _refusing(
        "reasoning_effort", "('none', 'high')", "none", "'Only none and high'"
    ),
    "ignores it": "{{ '[effort off]' if enable_thinking is false else '[effort on]' }}",
    "always thinks": (
        "{% if enable_thinking is false or reasoning_effort == 'none' %}"
        "{{ raise_exception('Thinking cannot be disabled') }}{% endif %}"
        + _refusing("reasoning_effort", "('high', 'max')", "max", "'Unexpected effort'")
    ),
    "granite 3.3": "{{ '[effort on]' if thinking else '[effort off]' }}",
    "minimax m3": (
        "{% set mode = thinking_mode if thinking_mode is defined else 'adaptive' %}"
        "{% if mode == 'enabled' %}[effort forced]{% elif mode == 'disabled' %}[effort off]"
        "{% else %}[effort adaptive]{% endif %}"
    ),
    "a switch with two words": (
        "{{ '[effort off]' if thinking_option == 'off' else '[effort on]' }}"
    ),
    "a negative switch": "{{ '[effort off]' if disable_thinking else '[effort on]' }}",
    "seed oss": (
        "{% if thinking_budget is not defined or thinking_budget is none %}[effort free]"
        "{% elif thinking_budget == 0 %}[effort nothing]{% else %}[effort {{ thinking_budget }}]{% endif %}"
    ),
    "nemotron nano 2": (
        "{% set ns = namespace(on=true) %}{% for m in messages if m.role == 'system' %}"
        "{% if '/no_think' in m.content %}{% set ns.on = false %}{% endif %}{% endfor %}"
        "{{ '[effort on]' if ns.on else '[effort off]' }}"
    ),
    "cohere 2": (
        "{% set reasoning = reasoning if reasoning is not undefined else reasoning_effort != 'none' %}"
        "{{ '[effort on]' if reasoning else '[effort off]' }}"
    ),
    "refuses every variable in a long conversation": (
        "{% if messages | length > 2 and enable_thinking is false %}"
        "{{ raise_exception('Not now') }}{% endif %}"
        "{{ '[effort off]' if enable_thinking is false else '[effort on]' }}"
    ),
    "refuses it beside a tool": (
        "{% if tools and reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}"
        "{{ raise_exception('No such effort beside tools') }}{% endif %}"
        "[effort {{ reasoning_effort | default('high') }}]"
    ),
    "refuses it in a long conversation": (
        "{% if messages | length > 2 and reasoning_effort is defined %}"
        "{{ raise_exception('No effort here') }}{% endif %}"
        "[effort {{ reasoning_effort | default('medium') }}]"
    ),
}

# What the prompt contains for each level, and when thinking is on without an effort.
_COLUMNS = (*LADDER, "on")


def _row(text: str) -> dict[str, str]:
    return {
        word: "" if effort == "-" else _of(effort)
        for word, effort in zip(_COLUMNS, text.split(), strict=True)
    }


#                               none     minimal  low    medium high  xhigh max   on
SHOWN: Mapping[str, Mapping[str, str]] = {
    "qwen 3.8": _row("           -        -        low    medium xhigh xhigh xhigh xhigh"),
    "hy 3": _row("               no_think no_think low    low    high  high  high  high"),
    "hy 4": _row("               no_think no_think high   high   high  high  high  high"),
    "gpt-oss": _row("            low      low      low    medium high  high  high  medium"),
    "muse": _row("               low      low      low    medium high  high  high  high"),
    "kimi k3": _row("            -        -        low    low    high  max   max   max"),
    "glm 5.3": _row("            Low      Low      Low    Low    High  Max   Max   Max"),
    "deepseek v4": _row("        -        -        -      -      -     max   max   -"),
    "deepseek v4 flash": _row("  -        -        -      -      high  max   max   -"),
    "solar": _row("              closed   closed   closed open   open  open  open  open"),
    "mistral small 4": _row("    none     none     high   high   high  high  high  high"),
    "ignores it": _row("         off      off      on     on     on    on    on    on"),
    "always thinks": _row("      high     high     high   high   high  max   max   max"),
    "granite 3.3": _row("        off      off      on     on     on    on    on    on"),
    "minimax m3": _row(
        "         off      off      adaptive adaptive adaptive adaptive adaptive adaptive"
    ),
    "a switch with two words": _row("off off on on on on on on"),
    "a negative switch": _row("  off      off      on     on     on    on    on    on"),
    "seed oss": _row("           nothing  nothing  1024   4096   16384 free  free  free"),
    "nemotron nano 2": _row("    off      off      on     on     on    on    on    on"),
    "cohere 2": _row("           off      off      on     on     on    on    on    on"),
    "refuses every variable in a long conversation": _row("off off on on on on on on"),
    "refuses it beside a tool": _row(
        "                        low      low      low    low    high  high  high  high"
    ),
    "refuses it in a long conversation": _row(
        "                        low      low      low    medium high  high  high  medium"
    ),
}
