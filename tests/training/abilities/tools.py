"""Tool calls: the right tool with the right arguments, and the answer from its result.

Some tools are listed; most are invented from a verb and a noun, so that the model must read the
names of tools and arguments from the definitions. Invented tools are split by their names.
"""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.training import words
from tests.training.abilities import arithmetic, copying, knowledge, refusals
from tests.training.conversation import (
    Dialogue,
    Exchange,
    Phrasings,
    TrainingMessage,
    assistant,
    says,
    user,
)
from tests.training.words import DataSplit

ArgumentValue = str | int
ValueMaker = Callable[[Random, DataSplit], ArgumentValue]


@dataclass(frozen=True, slots=True)
class ExampleTool:
    """A tool of one or two arguments."""

    name: str
    description: str
    arguments: dict[str, ValueMaker]
    asked: Phrasings  # with {argument} for each argument
    answered: str  # the same, and {result}
    result: Callable[[Random, DataSplit], str]

    def schema(self, values: dict[str, ArgumentValue]) -> dict[str, Any]:
        """The definition in OpenAI's format; `values` decide the arguments' types."""
        types = {str: "string", int: "integer"}
        properties = {key: {"type": types[type(value)]} for key, value in values.items()}
        parameters = {"type": "object", "properties": properties, "required": list(values)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def values(self, rng: Random, split: DataSplit) -> dict[str, ArgumentValue]:
        return {key: make(rng, split) for key, make in self.arguments.items()}


def _weather(rng: Random, split: DataSplit) -> str:
    del split
    weather = rng.choice("sunny rainy cloudy windy foggy snowy cold warm".split())
    return f"{weather}, {rng.randrange(40)} degrees"


def _clock(rng: Random, split: DataSplit) -> str:
    del split
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def _file(rng: Random, split: DataSplit) -> str:
    return f"{words.code_word(rng, split)}.{rng.choice(('txt', 'md', 'py', 'json'))}"


def _small(rng: Random, split: DataSplit) -> int:
    return int(words.draw(rng, split, lambda r: str(r.randrange(1, 100))))


TOOLS = (
    ExampleTool(
        "get_weather",
        "Get the weather in a city.",
        {"city": words.place},
        Phrasings(
            train=(
                "What is the weather in {city}?",
                "How is the weather in {city}?",
                "Tell me the weather in {city}.",
                "Weather in {city}?",
                "what is the weather in {city}",
                "Is it cold in {city}?",
                "What is the weather like in {city} today?",
                "What weather is it in {city}?",
                "Please tell me the weather in {city}.",
                "Check the weather in {city}.",
                "I need the weather in {city}.",
                "Is it raining in {city}?",
                "Do I need a coat in {city}?",
            ),
            held_out=("What is the weather like in {city}?", "Please get the weather in {city}."),
        ),
        "The weather in {city} is {result}.",
        _weather,
    ),
    ExampleTool(
        "get_time",
        "Get the time in a city.",
        {"city": words.place},
        Phrasings(
            train=(
                "What time is it in {city}?",
                "Tell me the time in {city}.",
                "How late is it in {city}?",
                "Time in {city}?",
                "What time do they have in {city}?",
                "Please tell me what time it is in {city}.",
                "What does the clock say in {city}?",
                "I need the time in {city}.",
            ),
            held_out=("What is the time in {city}?", "What time is it now in {city}?"),
        ),
        "In {city} it is {result}.",
        _clock,
    ),
    ExampleTool(
        "find_phone",
        "Find the phone number of a person.",
        {"name": words.full_name},
        Phrasings(
            train=(
                "What is the phone number of {name}?",
                "Find the phone number of {name}.",
                "How can I call {name}?",
                "The phone number of {name}, please.",
                "Which number do I dial for {name}?",
                "Which phone number does {name} have?",
                "I need the phone number of {name}.",
                "Please find the phone number of {name}.",
                "{name}: which phone number?",
                "I want to call {name}.",
            ),
            held_out=("Tell me the phone number of {name}.", "Which phone number has {name}?"),
        ),
        "The phone number of {name} is {result}.",
        words.number,
    ),
    ExampleTool(
        "read_file",
        "Read a file.",
        {"path": _file},
        Phrasings(
            train=(
                "Read the file {path}.",
                "What is in the file {path}?",
                "Show me {path}.",
                "Open {path}, please.",
                "Read {path}.",
                "Read {path} for me.",
                "Please open {path}.",
                "Show {path}, please.",
                "{path}: what is in it?",
                "What does {path} say?",
                "Could you read {path}?",
                "I want to see {path}.",
            ),
            held_out=("Read {path}, please.", "Please read the file {path}."),
        ),
        "The file {path} says: {result}",
        words.code_word,
    ),
    ExampleTool(
        "set_timer",
        "Set a timer.",
        {"minutes": _small},
        Phrasings(
            train=(
                "Set a timer for {minutes} minutes.",
                "Wake me in {minutes} minutes.",
                "Timer: {minutes} minutes.",
                "Please wake me in {minutes} minutes.",
                "I need a timer for {minutes} minutes.",
                "Count down {minutes} minutes.",
                "Start a timer: {minutes} minutes, please.",
            ),
            held_out=("Please set a timer for {minutes} minutes.",),
        ),
        "The timer is set for {minutes} minutes: {result}.",
        words.code_word,
    ),
    ExampleTool(
        "send_message",
        "Send a message to a person.",
        {"to": words.first_name, "text": words.code_word},
        Phrasings(
            train=(
                'Send "{text}" to {to}.',
                "Send a message to {to}: {text}",
                "Write to {to}: {text}",
                "Tell {to} this: {text}",
                'Message {to}: "{text}"',
                "Send {to} {text}.",
                'Send {to} this: "{text}"',
                "Send {to} this text: {text}",
                "Please send {to} this message: {text}",
                "Send {to} the message {text}.",
                'Send {to} the words "{text}".',
                'Please send {to} "{text}".',
                'Please send "{text}" to {to}.',
                'Text {to}: "{text}"',
                "Give {to} the message {text}.",
                "Let {to} know this: {text}",
                "Please tell {to} the word {text}.",
                "I want to send {to} a message: {text}",
                'Write {to} the text "{text}".',
                "Please write {to} the message {text}.",
            ),
            held_out=("Please send {to} the message {text}.", 'Send {to} the text "{text}".'),
        ),
        "The message to {to} is sent: {result}.",
        words.code_word,
    ),
    ExampleTool(
        "book_table",
        "Book a table in a restaurant.",
        {"name": words.first_name, "people": _small},
        Phrasings(
            train=(
                "Book a table for {people} people. My name is {name}.",
                "A table for {people}, please, in the name of {name}.",
                "I want to book a table for {people} people. I am {name}.",
                "Reserve a table in the name of {name} for {people} people.",
                "Please reserve a table for {people} in the name of {name}.",
                "Book a table in the name of {name} for {people}.",
                "A table in the name of {name}, please, for {people} people.",
                "We are {people} people and need a table. The name is {name}.",
                "Book a table for {people} in the name of {name}, please.",
            ),
            held_out=("Please book a table for {people} people in the name of {name}.",),
        ),
        "The table for {people} is booked, {name}: {result}.",
        words.code_word,
    ),
)
_VERBS = "get find fetch read check show load look_up".split()
_NOUNS = """price size owner address status height colour age score rating speed weight length title
author date balance salary temperature distance level rank version password label""".split()
_THINGS = """item city person book user product country team account server ship room song film
shop""".split()
# In training, half of the nouns are random words, so that the model chooses a tool by its name.
_NOUN_KINDS = (words.english, words.syllables, words.patchwork, words.blend)


def invented(rng: Random, split: DataSplit) -> ExampleTool:
    """A tool that looks up a property of a thing: `get_price(item)`."""

    def name(draws: Random) -> str:
        return f"{draws.choice(_VERBS)}_{noun_of(draws)}"

    def noun_of(draws: Random) -> str:
        if split is DataSplit.TRAIN and draws.random() < 0.5:
            return words.draw(draws, split, draws.choice(_NOUN_KINDS)).lower()
        return draws.choice(_NOUNS)

    drawn = words.draw(rng, split, name)
    noun, thing = drawn.rsplit("_", 1)[1], rng.choice(_THINGS)
    if split is DataSplit.TRAIN and rng.random() < 0.25:
        thing = words.draw(rng, split, rng.choice(_NOUN_KINDS)).lower()
    verb = drawn.removesuffix(f"_{noun}").replace("_", " ")
    asked = Phrasings(
        train=(
            f"What is the {noun} of {{{thing}}}?",
            f"Tell me the {noun} of {{{thing}}}.",
            f"{verb.capitalize()} the {noun} of {{{thing}}}.",
            f"I need the {noun} of {{{thing}}}.",
            f"Which {noun} does {{{thing}}} have?",
            f"What {noun} has {{{thing}}}?",
            f"{{{thing}}}: which {noun}?",
            f"Can you {verb} the {noun} of {{{thing}}}?",
            f"The {noun} of {{{thing}}}, please.",
            f"Find out the {noun} of {{{thing}}}.",
            f"Which is the {noun} of {{{thing}}}?",
            f"Which {noun} has the {thing} {{{thing}}}?",
            f"Please tell me the {noun} of {{{thing}}}.",
            f"Please give me the {noun} of {{{thing}}}.",
            f"Do you have the {noun} of {{{thing}}}?",
            f"Do you know which {noun} {{{thing}}} has?",
            f"I want to know which {noun} {{{thing}}} has.",
            f"Say which {noun} {{{thing}}} has.",
            f"Give me the {noun} of {{{thing}}}.",
            f"Could you {verb} the {noun} of {{{thing}}}, please?",
            f"{verb.capitalize()} {{{thing}}}: {noun}",
            f"What {noun} does {{{thing}}} have?",
            f"the {noun} of {{{thing}}}",
        ),
        held_out=(
            f"Which {noun} has {{{thing}}}?",
            f"Please {verb} the {noun} of {{{thing}}}.",
            f"Do you know the {noun} of {{{thing}}}?",
        ),
    )
    made: tuple[ValueMaker, ...] = (words.code_word, words.code_word, words.place, words.full_name)
    return ExampleTool(
        drawn,
        f"{verb.capitalize()} the {noun} of a {thing}.",
        {thing: rng.choice(made)},
        asked,
        f"The {noun} of {{{thing}}} is {{result}}.",
        rng.choice((words.code_word, words.number)),
    )


def tool_calls(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A question for an offered tool; the reference answer is the call."""
    del num_words
    offered = _offered(rng, split)
    tool = rng.choice(offered)
    values = tool.values(rng, split)
    question = tool.asked.pick(rng, split).format(**values)
    return Dialogue(
        (user(question), _call(tool, values)),
        calls(tool.name, values),
        tuple(t.schema(values if t is tool else t.values(rng, split)) for t in offered),
    )


def no_call(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Tools are offered, but the question needs none of them."""
    del num_words
    offered = _offered(rng, split)
    exchange = knowledge.exchange(rng, split)

    def accepts(answer: str) -> bool:
        return "<tool_call>" not in answer and exchange.accepts(answer)

    return Dialogue(
        exchange.messages, accepts, tuple(t.schema(t.values(rng, split)) for t in offered)
    )


def session(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Questions of all kinds under the same tools, as definitions are long."""
    del num_words
    offered = _offered(rng, split)
    messages: list[TrainingMessage] = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.3:
            messages += _other_talk(rng, split).messages
        else:
            messages += _call_and_answer(rng, split, rng.choice(offered))
    rest = _other_talk(rng, split)
    schemas = tuple(tool.schema(tool.values(rng, split)) for tool in offered)
    return Dialogue((*messages, *rest.messages), rest.accepts, schemas)


def drill(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Many calls of the same tools: the densest lesson in choosing between them."""
    del num_words
    offered = _offered(rng, split, at_least=rng.randint(2, 4))
    messages: list[TrainingMessage] = []
    for _ in range(rng.randint(5, 9)):
        tool = rng.choice(offered)
        values = tool.values(rng, split)
        messages += [user(tool.asked.pick(rng, split).format(**values)), _call(tool, values)]
    schemas = tuple(t.schema(t.values(rng, split)) for t in offered)
    return Dialogue(tuple(messages), calls(tool.name, values), schemas)


def _other_talk(rng: Random, split: DataSplit) -> Exchange:
    makers = (
        knowledge.exchange,
        knowledge.exchange,
        refusals.any_exchange,
        arithmetic.exchange,
        copying.repeat_line,
    )
    return rng.choice(makers)(rng, split)


def _call_and_answer(rng: Random, split: DataSplit, tool: ExampleTool) -> list[TrainingMessage]:
    values = tool.values(rng, split)
    result = tool.result(rng, split)
    asked = user(tool.asked.pick(rng, split).format(**values))
    answer = assistant(tool.answered.format(result=result, **values))
    return [asked, _call(tool, values), {"role": "tool", "content": result}, answer]


def tool_results(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A call and its result are in the context; the answer is a sentence with the result."""
    del num_words
    (tool, *_) = _offered(rng, split)
    messages = _call_and_answer(rng, split, tool)
    result = messages[2]["content"]
    return Dialogue(tuple(messages), says(result), (tool.schema(tool.values(rng, split)),))


def without_tools(rng: Random, split: DataSplit) -> Exchange:
    """What a listed tool would answer, asked where none is offered."""
    tool = rng.choice(TOOLS)
    question = tool.asked.pick(rng, split).format(**tool.values(rng, split))
    return Exchange(question, refusals.REFUSAL, refusals.refuses)


def calls(name: str, arguments: dict[str, ArgumentValue]) -> Any:
    """Accept one well-formed call of `name` with exactly `arguments`."""

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


def _offered(rng: Random, split: DataSplit, at_least: int = 1) -> list[ExampleTool]:
    """One to three tools with distinct names, in any order."""
    found: dict[str, ExampleTool] = {}
    for _ in range(max(at_least, rng.choice((1, 1, 2, 2, 3)))):
        tool = rng.choice(TOOLS) if rng.random() < 0.45 else invented(rng, split)
        if not any(_noun(tool) == _noun(other) for other in found.values()):
            found[tool.name] = tool
    return list(found.values())


def _noun(tool: ExampleTool) -> str:
    return tool.name.rsplit("_", 1)[1]


def _call(tool: ExampleTool, values: dict[str, ArgumentValue]) -> TrainingMessage:
    function = {"name": tool.name, "arguments": values}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
