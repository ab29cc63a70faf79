"""Calls that the grammar allows parse as valid calls of the given tools."""

from __future__ import annotations

import json

import jsonschema
import pytest

from mlxserve.text.guidance.calls import call_grammar
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.parsing.markup import Markup
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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_whatever_the_grammar_allows_parses_as_valid_calls(
    name: str, is_whole: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    family = markup(name)
    source = call_grammar(family, TOOLS, is_whole=is_whole, repeats=True)
    assert source is not None
    names = set()
    for seed in range(4):
        text = written(tokenizer, grammars, source, seed)
        parser = TurnParser(family, AssistantTurn(tools=TOOLS))
        events = [*parser.push(text if is_whole else f"<tool_call>{text}"), *parser.finish()]
        calls = calls_of(events)
        assert len(events) == len([e for e in events if isinstance(e, ToolCallDelta)]), text
        assert calls, text
        names |= {call.name for call in calls}
        for call in calls:
            schema = LOOK if call.name == "look" else {"const": {}}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert names == {"look", "rest"}


def test_a_required_call_of_llama_is_the_whole_answer(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    llama = Markup(call_format="llama3", is_bare=True)
    assert call_grammar(llama, TOOLS, is_whole=False, repeats=True) is None
    source = call_grammar(llama, TOOLS, is_whole=True, repeats=True)
    assert source is not None
    text = written(tokenizer, grammars, source, 1)
    parser = TurnParser(llama, AssistantTurn(tools=TOOLS))
    events = [*parser.push(text), *parser.finish()]
    [call] = calls_of(events)
    assert call.name in ("look", "rest")
    assert isinstance(json.loads(call.arguments), dict)


def test_unknown_call_formats_have_no_grammar() -> None:
    unknown = Markup(call_format="of_next_year", call_start=(START,))
    assert call_grammar(unknown, TOOLS, is_whole=True, repeats=True) is None
    several = Markup(call_format="json_tools", call_start=(1, 2))
    assert call_grammar(several, TOOLS, is_whole=True, repeats=True) is None
