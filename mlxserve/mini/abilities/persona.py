"""Following a system prompt: a name to answer by, a phrase to begin or end with, a fixed form."""

from __future__ import annotations

from random import Random

from mlxserve.mini import words
from mlxserve.mini.abilities import arithmetic, copying, knowledge
from mlxserve.mini.conversation import (
    Check,
    Conversation,
    Exchange,
    Phrasings,
    equals,
    says,
    single,
    system,
)
from mlxserve.mini.words import Split

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
    ),
    held_out=("Answer {p} to every question.", "Always reply {p} and nothing else."),
)


def named(rng: Random, split: Split) -> Conversation:
    """The system prompt gives a name; the user asks for it."""
    name = words.first_name(rng, split)
    exchange = Exchange(_ASK_NAME.pick(rng, split), f"My name is {name}.", says(name))
    return single(exchange, system(_NAMED.pick(rng, split).format(name=name)))


def framed(rng: Random, split: Split) -> Conversation:
    """The system prompt asks for a word before or after each answer."""
    phrase = words.code_word(rng, split)
    inner = _inner(rng, split)
    begins = rng.random() < 0.5
    side = "Begin" if begins else "End"
    prompt = _FORMS.pick(rng, split).format(side=side, side_lower=side.lower(), phrase=phrase)
    answer = f"{phrase}: {inner.answer}" if begins else f"{inner.answer} {phrase}"
    return single(Exchange(inner.question, answer, _frame(phrase, begins)), system(prompt))


def fixed(rng: Random, split: Split) -> Conversation:
    """The system prompt fixes the one answer there is."""
    phrase = words.code_word(rng, split)
    inner = _inner(rng, split)
    return single(
        Exchange(inner.question, phrase, equals(phrase)),
        system(_FIXED.pick(rng, split).format(p=phrase)),
    )


def persona(rng: Random, split: Split, num_words: int) -> Conversation:
    """Any of the above."""
    del num_words
    return rng.choice((named, named, framed, fixed))(rng, split)


def _inner(rng: Random, split: Split) -> Exchange:
    makers = (copying.repeat_line, arithmetic.exchange, knowledge.exchange)
    return rng.choice(makers)(rng, split)


def _frame(phrase: str, begins: bool) -> Check:
    if begins:
        return lambda answer: answer.strip().startswith(phrase)
    return lambda answer: answer.strip().endswith(phrase)
