"""Following a system prompt: a name, a phrase at the start or end, a fixed answer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.training import words
from tests.training.abilities import arithmetic, copying, knowledge, refusals
from tests.training.conversation import (
    Check,
    Dialogue,
    Exchange,
    Phrasings,
    equals,
    says,
    single,
    system,
)
from tests.training.words import DataSplit

_NAMED = Phrasings(
    train=(
        "Your name is {name}.",
        "You are {name}.",
        "You are {name}, a helpful assistant.",
        "You are an assistant called {name}.",
        "Your name is {name}. Be brief.",
        "You are called {name} and you help people.",
        "You are {name}, a small model.",
        "Act as {name}.",
        "Your name is {name}. You are a friendly assistant.",
        "You are an assistant. Your name is {name}.",
        "You are a friendly assistant called {name}.",
        "You are a helpful assistant. Your name is {name}.",
        "You are a helpful assistant named {name}.",
        "You are a small assistant called {name}. Be brief.",
        "You are {name}, who helps people with questions.",
        "You are named {name}.",
        "From now on your name is {name}.",
        "Users call you {name}.",
        "This assistant is called {name}.",
        "The name of the assistant is {name}.",
        "You go by the name of {name}.",
        "Always introduce yourself as {name}.",
        "Today you are {name}.",
    ),
    held_out=("You are a helpful assistant called {name}.", "You are called {name}."),
)
_ASK_NAME = Phrasings(
    train=(
        "What is your name?",
        "Who are you?",
        "Tell me your name.",
        "what is your name",
        "What are you called?",
        "Hi, who are you?",
        "What's your name?",
        "Tell me your name, please.",
        "Please say your name.",
        "Please tell me who you are.",
        "Please tell me what you are called.",
        "Can you tell me your name?",
        "Could you tell me your name?",
        "Say your name.",
        "Give me your name.",
        "Your name?",
        "And who are you?",
        "Hello! What is your name?",
        "So what is your name?",
        "What is your name, please?",
        "Do you have a name?",
        "May I ask your name?",
        "How are you called?",
        "What should I call you?",
        "Introduce yourself.",
        "And your name is?",
    ),
    held_out=("Please tell me your name.", "And what is your name?"),
)
_FORMS = Phrasings(
    train=(
        "{side} every answer with {phrase}.",
        "Always {side_lower} your answer with {phrase}.",
        "{side} your answers with {phrase}.",
        "{side} each answer with {phrase}. Be brief.",
        "Every answer has to {side_lower} with {phrase}.",
        "You are a helpful assistant. {side} every answer with {phrase}.",
        "Please {side_lower} each answer with {phrase}.",
        "{side} all answers with {phrase}.",
        "{side} everything you say with {phrase}.",
        "Whatever you answer, {side_lower} it with {phrase}.",
        "{side} every reply with {phrase}.",
        "Make sure to {side_lower} every answer with {phrase}.",
    ),
    held_out=("Please {side_lower} every answer with {phrase}.",),
)
_FIXED = Phrasings(
    train=(
        "Answer every question with {p}.",
        "Always answer {p} and nothing else.",
        "Say {p} to everything.",
        "Whatever I ask, answer {p}.",
        "Reply with {p} only.",
        "You only ever say {p}.",
        "Answer {p} to everything.",
        "Answer {p}, whatever the question is.",
        "Answer {p} to all questions.",
        "Answer {p} to each question.",
        "Answer only {p}.",
        "Say {p} to every question.",
        "Reply {p} to every question.",
        "Reply {p} to everything I ask.",
        "Respond with {p} to every question.",
        "Respond {p} to everything.",
        "Always reply {p}.",
        "Always reply with {p} and nothing else.",
        "Always say {p} and nothing else.",
        "Always respond {p} and nothing more.",
        "Always answer with {p}, nothing else.",
        "Always answer {p}.",
        "Never say anything but {p}.",
        "Your only answer is {p}.",
        "The answer to every question is {p}.",
        "To every question you answer {p}.",
        "No matter what I ask, reply {p}.",
        "Each answer is {p} and nothing else.",
        "You are a helpful assistant. Answer every question with {p}.",
        "You know one word: {p}. Answer with it.",
    ),
    held_out=("Answer {p} to every question.", "Always reply {p} and nothing else."),
)


PersonaReply = Callable[[Exchange], Exchange]  # an exchange -> the exchange under the system prompt


def named(rng: Random, split: DataSplit) -> Dialogue:
    """The system prompt gives a name; the user asks for it."""
    name = words.first_name(rng, split)
    return single(_name(rng, split, name), system(_NAMED.pick(rng, split).format(name=name)))


def framed(rng: Random, split: DataSplit) -> Dialogue:
    """The system prompt asks for a phrase before or after each answer."""
    prompt, reply = _framing(rng, split, words.code_word(rng, split))
    return single(reply(_inner(rng, split)), system(prompt))


def fixed(rng: Random, split: DataSplit) -> Dialogue:
    """The system prompt fixes the answer to everything."""
    prompt, reply = _fixing(rng, split, words.code_word(rng, split))
    return single(reply(_inner(rng, split)), system(prompt))


def persona(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Any of the above."""
    del num_words
    return rng.choice((named, named, framed, fixed))(rng, split)


def at_length(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Several questions under one system prompt, each answered accordingly."""
    del num_words
    phrase = words.code_word(rng, split)
    prompt, reply = rng.choice((_framing, _framing, _fixing, _fixing, _naming))(rng, split, phrase)
    exchanges = [reply(_inner(rng, split)) for _ in range(rng.randint(2, 5))]
    messages = (message for exchange in exchanges for message in exchange.messages)
    return Dialogue((system(prompt), *messages), exchanges[-1].accepts)


def _framing(rng: Random, split: DataSplit, phrase: str) -> tuple[str, PersonaReply]:
    """The prompt that asks for `phrase` before or after answers, and its effect on an exchange."""
    begins = rng.random() < 0.5
    side = "Begin" if begins else "End"
    prompt = _FORMS.pick(rng, split).format(side=side, side_lower=side.lower(), phrase=phrase)

    def reply(inner: Exchange) -> Exchange:
        answer = f"{phrase}: {inner.answer}" if begins else f"{inner.answer} {phrase}"
        return Exchange(inner.question, answer, _frame(phrase, begins))

    return prompt, reply


def _fixing(rng: Random, split: DataSplit, phrase: str) -> tuple[str, PersonaReply]:
    """The prompt that asks for `phrase` as every answer, and its effect on an exchange."""
    prompt = _FIXED.pick(rng, split).format(p=phrase)
    return prompt, lambda inner: Exchange(inner.question, phrase, equals(phrase))


def _naming(rng: Random, split: DataSplit, phrase: str) -> tuple[str, PersonaReply]:
    """The prompt that gives a name; half of the questions ask for it, the others are unchanged."""
    name = phrase.capitalize()
    prompt = _NAMED.pick(rng, split).format(name=name)
    return prompt, lambda inner: _name(rng, split, name) if rng.random() < 0.5 else inner


def _name(rng: Random, split: DataSplit, name: str) -> Exchange:
    return Exchange(_ASK_NAME.pick(rng, split), f"My name is {name}.", says(name))


def _inner(rng: Random, split: DataSplit) -> Exchange:
    makers = (
        copying.repeat_line,
        arithmetic.exchange,
        knowledge.exchange,
        knowledge.exchange,
        refusals.exchange,
    )
    return rng.choice(makers)(rng, split)


def _frame(phrase: str, begins: bool) -> Check:
    if begins:
        return lambda answer: answer.strip().startswith(phrase)
    return lambda answer: answer.strip().endswith(phrase)
