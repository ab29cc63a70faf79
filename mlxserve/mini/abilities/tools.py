"""Tool calls: the right one with the right arguments, and the answer from what it returned."""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from mlxserve.mini import words
from mlxserve.mini.conversation import Conversation, Message, assistant, says, user
from mlxserve.mini.words import Split


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of one string argument."""

    name: str
    description: str
    argument: str
    asked: tuple[str, ...]  # questions with {value}
    answered: str  # with {value} and {result}

    @property
    def schema(self) -> dict[str, Any]:
        """The definition as the OpenAI API spells it."""
        properties = {self.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "get_weather",
        "Get the weather in a city.",
        "city",
        ("What is the weather in {value}?", "How is the weather in {value}?"),
        "The weather in {value} is {result}.",
    ),
    Tool(
        "get_time",
        "Get the time in a city.",
        "city",
        ("What time is it in {value}?", "Tell me the time in {value}."),
        "In {value} it is {result}.",
    ),
    Tool(
        "find_phone",
        "Find the phone number of a person.",
        "name",
        ("What is the phone number of {value}?", "Find the phone number of {value}."),
        "The phone number of {value} is {result}.",
    ),
    Tool(
        "read_file",
        "Read a file.",
        "path",
        ("Read the file {value}.", "What is in the file {value}?"),
        "The file {value} says: {result}",
    ),
)


def tool_calls(rng: Random, split: Split, num_words: int) -> Conversation:
    """A question that an offered tool answers; the reference answer is the call."""
    del num_words
    offered = rng.sample(TOOLS, rng.randint(1, 2))
    tool = rng.choice(offered)
    value, _ = _filled(rng, split, tool)
    question = rng.choice(tool.asked).format(value=value)
    return Conversation(
        (user(question), _call(tool, value)),
        calls(tool.name, {tool.argument: value}),
        tuple(t.schema for t in offered),
    )


def tool_results(rng: Random, split: Split, num_words: int) -> Conversation:
    """The call has been made and has returned; the answer is a sentence with the result."""
    del num_words
    tool = rng.choice(TOOLS)
    value, result = _filled(rng, split, tool)
    question = rng.choice(tool.asked).format(value=value)
    returned: Message = {"role": "tool", "content": result}
    answer = assistant(tool.answered.format(value=value, result=result))
    messages = (user(question), _call(tool, value), returned, answer)
    return Conversation(messages, says(result), (tool.schema,))


def calls(name: str, arguments: dict[str, str]) -> Any:
    """Accepts one well-formed call of `name` with exactly `arguments`."""

    def accepts(answer: str) -> bool:
        found = re.search(r"<tool_call>\s*(\{.*\})\s*</tool_call>", answer, re.DOTALL)
        if found is None:
            return False
        try:
            call = json.loads(found[1])
        except json.JSONDecodeError:
            return False
        return bool(call == {"name": name, "arguments": arguments})

    return accepts


def _call(tool: Tool, value: str) -> Message:
    function = {"name": tool.name, "arguments": {tool.argument: value}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _filled(rng: Random, split: Split, tool: Tool) -> tuple[str, str]:
    """An argument for the tool, and what the tool would return."""
    if tool.name == "get_weather":
        weather = rng.choice("sunny rainy cloudy windy foggy snowy cold warm".split())
        return words.place(rng, split), f"{weather}, {rng.randrange(40)} degrees"
    if tool.name == "get_time":
        return words.place(rng, split), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    if tool.name == "find_phone":
        return words.full_name(rng, split), words.number(rng, split)
    return f"{words.code_word(rng, split)}.txt", words.code_word(rng, split)
