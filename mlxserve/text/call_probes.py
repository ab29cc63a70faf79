"""Probes of calls: what a chat template writes for the calls of an earlier answer.

A row of `formats` reads a template if it reads these texts back as the calls that they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

from mlxserve.text.conversation import arguments_object
from mlxserve.text.parsing.formats import THINKING, CallFormat
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn, TextDelta, ToolCallDelta, join_calls
from mlxserve.text.probes import Message, Probe, RenderEach
from mlxserve.text.template_caps import Arguments, CallIds, TemplateCaps

Call: TypeAlias = tuple[str, Mapping[str, Any]]

# Keys in alphabetical order, as some templates sort them.
NAME, OTHER_NAME = "zqtool", "zqother"
ONE: Call = (NAME, {"zqalpha": "zqvalue", "zqbeta": 31})
TWO: Call = (OTHER_NAME, {"zqalpha": "zqsecond", "zqbeta": 32})
# Values that formats have to escape, or write in words of their own.
_HARD: tuple[Call, ...] = (
    (NAME, {"zqalpha": "zqvalue, 'one'\n\"two\" \\ <b>three</b> {4} [5]\n", "zqbeta": -1}),
    (NAME, {"zqalpha": "zqvalue", "zqflag": True, "zqobject": {"a": {"b": [1, "x"]}}}),
    (NAME, {"zqalpha": "zqvalue", "zqlist": ["a", "b c"], "zqnone": None}),
    (NAME, {"zqalpha": "31"}),
    (NAME, {}),
)
# Of the other arguments some templates write types by a recursion without end.
_PROPERTIES: dict[str, Any] = {
    "zqalpha": {"type": "string", "description": "What."},
    "zqbeta": {"type": "integer", "description": "How many."},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
        },
    }
    for name in (NAME, OTHER_NAME)
]
_TURN = AssistantTurn(tools=TOOLS)
_LAST = {"add_generation_prompt": False, "enable_thinking": True, "thinking": True}
_USER, _RESULT, _ANSWER = "zqa", "zqresult", "zqanswer"


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Calls, and the answer that a template writes for them.

    is_thinking: the prompt opens thinking
    """

    calls: tuple[Call, ...]
    text: str
    is_thinking: bool = False

    def as_texts(self) -> WrittenCalls:
        """Return the calls of a template that writes every value as a text."""
        return replace(self, calls=tuple((name, value_texts(args)) for name, args in self.calls))


@dataclass(frozen=True, slots=True)
class CallTexts:
    """What a template writes for known calls; None where it raises or shows no call.

    one, two: a message with one call, and with two
    hard: calls whose values are hard to write; templates that write them wrongly are common
    """

    one: WrittenCalls
    two: WrittenCalls | None
    hard: tuple[WrittenCalls, ...]

    def as_texts(self) -> CallTexts:
        two = None if self.two is None else self.two.as_texts()
        return CallTexts(self.one.as_texts(), two, tuple(each.as_texts() for each in self.hard))


def value_texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
    }


def call_texts(render_each: RenderEach, caps: TemplateCaps) -> CallTexts | None:
    """Render calls with a chat template; None if it shows none."""
    if not caps.calls:
        return None
    groups: list[tuple[Call, ...]] = [(ONE,), (ONE, TWO), *((call,) for call in _HARD)]
    said: Message = {"role": "assistant", "content": _ANSWER}
    user: Message = {"role": "user", "content": _USER}
    probes = [
        Probe([user], TOOLS),
        Probe([user, said, {"role": "user", "content": "zqb"}], TOOLS),
        # Some templates refuse a call without its result.
        *(Probe([user, *_messages(calls, caps)][:2], TOOLS, _LAST) for calls in groups),
        *(Probe([user, *_messages(calls, caps)], TOOLS) for calls in groups),
    ]
    prompt, answered, *both = render_each(probes)
    written = zip(both[: len(groups)], both[len(groups) :], strict=True)
    before, _, after = (answered or "").partition(_ANSWER)
    frame = _Frame(prompt or "", before, after.partition("zqb")[0])
    one, two, *hard = (
        frame.answer([text for text in texts if text is not None], calls)
        for texts, calls in zip(written, groups, strict=True)
    )
    if one is None:
        return None
    return CallTexts(one, two if caps.parallel_calls else None, tuple(filter(None, hard)))


def reads(row: CallFormat, written: WrittenCalls, *, is_strict: bool = True) -> bool:
    """True if a row reads the calls back from what the template wrote.

    is_strict: no other text may be left; otherwise none may be left before the calls
    """
    first = Part.TEXT if row.channels is None else Part.HEADER
    thinking = None if row.channels else thinking_in(written.text)
    parser = TurnParser(
        Markup(format=row, thinking=thinking, first=first), _TURN, is_thinking=written.is_thinking
    )
    events = [*parser.push(written.text), *parser.finish()]
    first_call = next((at for at, e in enumerate(events) if isinstance(e, ToolCallDelta)), None)
    shown = events if is_strict else events[:first_call]
    text = "".join(event.text for event in shown if isinstance(event, TextDelta))
    calls = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
    read = [(call.name, arguments_object(call.arguments)) for call in calls]
    return read == list(written.calls) and not text.strip()


def thinking_in(text: str) -> tuple[str, str] | None:
    return next((pair for pair in THINKING if pair[1] in text), None)


_TAG = re.compile(r"<[^<>]+>")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What surrounds an answer.

    prompt: with the opening of the answer
    before, after: what is before the text of an answer, and what follows it
    """

    prompt: str
    before: str
    after: str

    def answer(self, texts: Sequence[str], calls: tuple[Call, ...]) -> WrittenCalls | None:
        """Return the answer in rendered conversations that end in it, or in the calls' results."""
        answers = [self._after_prompt(text) for text in texts if NAME in text]
        if not answers:
            return None
        answer = answers[0][0]
        end = _end_of(calls, answer)
        both = _shared(*(text for text, _ in answers)) if len(answers) > 1 else 0
        if both > end and answer[:both].rstrip().endswith(">"):
            answer = answer[:both]
        # The markers after a text end calls, too.
        turns = {tag for tag in _TAG.findall(self.after) if tag not in answer[:end]}
        tags = (tag.start() for tag in _TAG.finditer(answer, end) if tag[0] in turns)
        ends = (at for at in range(end, len(answer)) if self.after.startswith(answer[at:]))
        end = min(next(tags, len(answer)), next(ends, len(answer)))
        return WrittenCalls(calls, answer[:end], answers[0][1])

    def _after_prompt(self, text: str) -> tuple[str, bool]:
        """Return (what follows the prompt, whether the prompt opens thinking)."""
        if self.prompt and text.startswith(self.prompt):
            is_thinking = any(self.prompt.rstrip().endswith(opener) for opener, _ in THINKING)
            return text[len(self.prompt) :].partition(_RESULT)[0], is_thinking
        begin = _shared(self.before, text)
        tag = text.rfind("<", 0, begin)
        # Both begin with the same characters of different markers.
        if begin < len(self.before) and ">" not in text[tag:begin]:
            begin = tag
        return text[begin:].partition(_RESULT)[0], False


def _shared(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _end_of(calls: Sequence[Call], answer: str) -> int:
    """The end of the last known text of the calls. A result may say the name again."""
    name, arguments = calls[-1]
    marks = [answer.rfind(key) + len(key) for key in arguments if key in answer]
    return max(marks, default=answer.find(name) + len(name))


def _messages(calls: Sequence[Call], caps: TemplateCaps) -> list[Message]:
    """An answer with calls, and their results."""
    ids = [call_id(number, name, caps) for number, (name, _) in enumerate(calls)]
    written: list[Message] = [
        {
            "id": each,
            "type": "function",
            "function": {"name": name, "arguments": _arguments(arguments, caps)},
        }
        for each, (name, arguments) in zip(ids, calls, strict=True)
    ]
    results = [
        {"role": "tool", "content": _RESULT, "tool_call_id": each, "name": name}
        for each, (name, _) in zip(ids, calls, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": written}, *results]


def call_id(number: int, name: str, caps: TemplateCaps) -> str:
    """Return an id that the template takes. Kimi K2's contain the name, and nothing else does."""
    return f"functions.{name}:{number}" if caps.call_ids is CallIds.ANY else f"zqcall00{number}"


def _arguments(arguments: Mapping[str, Any], caps: TemplateCaps) -> Any:
    if caps.arguments is Arguments.OBJECT:
        return dict(arguments)
    return json.dumps(arguments, ensure_ascii=False)
