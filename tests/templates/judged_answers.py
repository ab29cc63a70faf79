"""What the product makes of the answers in llama.cpp's tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from mlxserve.text.controls import with_word
from mlxserve.text.conversation import Conversation, Message, completed_tool
from mlxserve.text.format_choice import choose_among
from mlxserve.text.parsing.formats import FORMATS
from mlxserve.text.parsing.markup import Markup, Part, thinking_of
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import (
    AssistantTurn,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolChoice,
    join_calls,
)
from mlxserve.text.probes import Probe, Tools
from mlxserve.text.template_compat import Fitting, single_typed_tool
from tests.templates.llama_cpp_answers import Case
from tests.templates.public_templates import (
    OF_TOKENS,
    caps_of,
    chosen,
    rendering,
    templates,
    texts_of,
)

_KNOWN: Mapping[str, Sequence[str]] = {row.name: row.known for row in FORMATS}
_CONTROL = re.compile(r"<\|[^<>|\s]+\|>")


class Answer(NamedTuple):
    """The parts of an answer.

    content, reasoning: without the white space around them, as in llama.cpp's own comparison
    calls: (name, arguments)
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]


def expected(case: Case) -> Answer:
    """The answer as llama.cpp reads it."""
    content, reasoning, calls = case.expected.content, case.expected.reasoning, case.expected.calls
    return Answer(content.strip(), reasoning.strip(), tuple((n, _value(text)) for n, text in calls))


def read_answer(case: Case, *, size: int = 0, is_learnt: bool = False) -> Answer | None:
    """The answer as a server reads it; None if it refuses the request.

    size: of the pieces in characters; 0 for a single piece
    is_learnt: without the table of formats
    """
    markup = _markup(case.template, is_learnt=is_learnt)
    prompt = _prompt(case.template, json.dumps(case.tools), thinking=case.thinking)
    if prompt is None or (case.tools and not markup.can_call):
        return None
    choice = ToolChoice.REQUIRED if case.is_required else ToolChoice.AUTO
    opener = (markup.thinking or ("",))[0].strip()
    parser = TurnParser(
        markup,
        AssistantTurn(tools=case.tools, tool_choice=choice),
        is_thinking=bool(opener) and prompt.rstrip().endswith(opener),
    )
    text = _decoded(case.text, markup)
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    calls = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
    return Answer(
        "".join(event.text for event in events if isinstance(event, TextDelta)).strip(),
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)).strip(),
        tuple((call.name, _value(call.arguments)) for call in calls),
    )


@cache
def _markup(name: str, *, is_learnt: bool) -> Markup:
    row = choose_among([], texts_of(name)).row if is_learnt else chosen(name).row
    has_channels = row is not None and row.channels is not None
    tokens = _KNOWN[OF_TOKENS[name]] if name in OF_TOKENS else ()
    return Markup(
        format=row,
        thinking=None if has_channels else thinking_of(templates()[name], tokens),
        first=Part.HEADER if has_channels else Part.TEXT,
    )


@cache
def _prompt(name: str, tools: str, *, thinking: bool) -> str | None:
    """The prompt of a short conversation; None if the template refuses it."""
    caps = caps_of(name)
    hello = Conversation.from_messages([Message(role="user", text="Hey there!")])
    messages = Fitting(caps).fit(hello).messages
    given = [completed_tool(tool) for tool in json.loads(tools)]
    if not caps.loose_types:
        given = [single_typed_tool(tool) for tool in given]
    no_tools: Tools | None = None if caps.without_tools else []
    attempts = caps.controls.attempts({"enable_thinking": thinking})
    probes = [
        Probe(
            [dict(m) for m in (with_word(messages, each.word) if each.word else messages)],
            given or no_tools,
            each.variables,
        )
        for each in attempts
    ]
    return next((text for text in rendering(templates()[name])(probes) if text is not None), None)


def _decoded(text: str, markup: Markup) -> str:
    """The text of an answer's tokens: control tokens outside the markup are not shown."""
    row = markup.format
    markers = (*row.call_markers, *row.other_markers) if row is not None else ()
    markup_text = "\n".join((*markers, *(markup.thinking or ())))
    return _CONTROL.sub(lambda match: match[0] if match[0] in markup_text else "", text)


def _value(arguments: str) -> Any:
    """Arguments as JSON, or the text of those that were cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
