"""Answers that packages may fail to read: odd arguments of a call, halves of an emoji, markers in a text."""

from __future__ import annotations

from collections.abc import Mapping

from tests.api.odd_arguments import ODD
from tests.clients.agent_server import num_results

MARKERS: Mapping[str, str] = {
    "thinking": "The tag `<think>` opens it, and `</think>` ends it.",
    "a call": "It writes `<tool_call>` first, and `</tool_call>` last.",
    "the beginning of a call": "It writes <tool_call>",
    "code": "```python\nSTART = '<think>'\nprint(START)\n```\nThat is all.",
}
CALL = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
DONE = "It was read."
_ANSWERS = {
    **{f"Write {name}.": text for name, text in MARKERS.items()},
    **{f"Call it with {name}.": CALL.format(written) for name, (written, _) in ODD.items()},
}
QUESTIONS = list(_ANSWERS)


def odd_answer(prompt: str) -> str:
    """The answer to the question in a prompt; `DONE` after a result."""
    if num_results(prompt):
        return DONE
    return next(answer for question, answer in _ANSWERS.items() if question in prompt)


def marker_text(question: str) -> str | None:
    """The text that a client must get for a question about markers."""
    return MARKERS.get(question.removeprefix("Write ").removesuffix("."))
