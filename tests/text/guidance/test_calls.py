"""Calls that the grammar allows parse as valid calls of the given tools."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from mlxserve.text.guidance.calls import call_grammar
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn, ToolCallDelta
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import (
    FAMILIES,
    LOOK,
    START,
    TOOLS,
    calls_of,
    markup,
    written,
)
from tests.text.parsing.answers import TEXT_HEADERS

# One of each syntax, and those whose marker is not a single token.
AFTER_MARKER = [
    "json_tools",
    "qwen3_coder",
    "kimi_k2",
    "gemma4",
    "pythonic",
    "minimax_m3",
    "minicpm5",
]
CASES = [(name, True) for name in FAMILIES] + [(name, False) for name in AFTER_MARKER]


@pytest.mark.parametrize(("name", "is_whole"), CASES)
def test_whatever_the_grammar_allows_parses_as_valid_calls(
    name: str, is_whole: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    family, row = markup(name), FAMILIES[name]
    is_message = name in TEXT_HEADERS and name != "muse_spark"
    family = replace(family, first=Part.HEADER if is_message else Part.TEXT)
    for tools in (TOOLS[:1], TOOLS) if name in AFTER_MARKER else (TOOLS,):
        source = call_grammar(family, tools, is_whole=is_whole, repeats=len(tools) > 1)
        text = written(tokenizer, grammars, source, seed=1)
        parser = TurnParser(family, AssistantTurn(tools=tools))
        events = [*parser.push(text if is_whole else f"{row.start}{text}"), *parser.finish()]
        calls = calls_of(events)
        assert len(events) == len([e for e in events if isinstance(e, ToolCallDelta)]), text
        assert calls, text
        for call in calls:
            schema = LOOK if call.name == "look" else {"const": {}}
            jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("name", ["llama3", "xlam", "bare_pythonic", "harmony"])
def test_without_a_marker_only_a_required_call_is_constrained(name: str) -> None:
    assert call_grammar(markup(name), TOOLS, is_whole=False, repeats=True) is None
    assert call_grammar(markup(name), TOOLS, is_whole=True, repeats=True) is not None


@pytest.mark.slow
def test_unknown_call_formats_have_no_grammar() -> None:
    unknown = Markup(call_start=(START,))
    assert call_grammar(unknown, TOOLS, is_whole=True, repeats=True) is None
