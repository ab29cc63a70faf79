"""Conversations of people who try the model out: what it can do next to what it refuses.

The pairs differ in one respect: add or multiply, repeat or translate, sort numbers or words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tests.training.abilities import (
    arithmetic,
    copying,
    knowledge,
    lists,
    newcomer_requests,
    personal,
    recall,
    refusals,
    requests,
    structured,
    styles,
    tools,
)
from tests.training.abilities import request_phrasings as phrasings
from tests.training.conversation import (
    Check,
    Dialogue,
    Exchange,
    Phrasings,
    TrainingMessage,
    mentions,
    says,
    single,
)
from tests.training.words import DataSplit

ExchangeMaker = Callable[[Random, DataSplit], Exchange]


def _refused(kind: Phrasings) -> ExchangeMaker:
    def make(rng: Random, split: DataSplit) -> Exchange:
        text = styles.styled(rng, split, requests.composed(rng, split, kind))
        return Exchange(text, refusals.REFUSAL, refusals.refuses)

    return make


_PAIRS: tuple[tuple[ExchangeMaker, ExchangeMaker], ...] = (
    (arithmetic.exchange, _refused(phrasings.CALCULATE)),
    (copying.repeat_line, _refused(phrasings.TRANSLATE)),
    (copying.repeat_line, _refused(phrasings.REWRITE)),
    (lists.exchange, _refused(phrasings.COUNT)),
    (lists.exchange, _refused(phrasings.COUNT)),
    (knowledge.exchange, _refused(phrasings.KNOWLEDGE)),
    (knowledge.exchange, _refused(phrasings.OTHER)),
    (knowledge.exchange, _refused(phrasings.CODE)),
    (knowledge.exchange, refusals.foreign_exchange),
    (personal.untold, _refused(phrasings.KNOWLEDGE)),
    (structured.exchange, _refused(phrasings.WRITE)),
    (knowledge.exchange, tools.without_tools),
)


def contrasts(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Exchanges of one pair, in any order."""
    del num_words
    pair = rng.choice(_PAIRS)
    exchanges = [_opened(rng, split, rng.choice(pair)) for _ in range(rng.randint(1, 4))]
    messages = tuple(message for exchange in exchanges for message in exchange.messages)
    return Dialogue(messages, exchanges[-1].accepts)


_FIRST = tuple(
    topic
    for topic in knowledge.TOPICS
    if {"Is it private?", "Do you send my data away?", "Do I need a Mac?", "Are you fast?"}
    & set(topic.train)
)
_CLOCK = (
    "What time is it?",
    "what time is it",
    "What time is it now?",
    "What is the time?",
    "Tell me the time.",
    "Do you know what time it is?",
    "What day is it?",
    "What is the date?",
)


def first_minutes(rng: Random, split: DataSplit) -> Exchange:
    """What people ask of any new program, in training: is it private, does it run here, is it fast,
    what time is it."""
    if rng.random() < 0.3:
        text = styles.styled(rng, split, rng.choice(_CLOCK))
        return Exchange(text, refusals.REFUSAL, refusals.refuses)
    return knowledge.ask(rng, split, rng.choice(_FIRST))


def visit(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Facts that are told, then requests of all kinds, then questions about the facts."""
    told = personal.personal(rng, split, num_words)
    messages: list[TrainingMessage] = list(told.messages[:2])
    for _ in range(rng.randint(1, 3)):
        messages += rng.choice((refusals.any_exchange, recall.interlude))(rng, split).messages
    return Dialogue((*messages, *told.messages[2:]), told.accepts)


def _opened(rng: Random, split: DataSplit, make: ExchangeMaker) -> Exchange:
    made = make(rng, split)
    return Exchange(styles.opened(rng, split, made.question), made.answer, made.accepts)


def refused(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A request beyond the model, written by hand; in training, one of the generator's."""
    if split is DataSplit.TRAIN:
        return refusals.refusal(rng, split, num_words)
    return rng.choice(REFUSED)


def answered(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A question that the model can answer, written by hand; in training, one of a pair."""
    if split is DataSplit.TRAIN:
        return contrasts(rng, split, num_words)
    return rng.choice(ANSWERED)


def _says_all(words: Sequence[str]) -> Check:
    """Accept an answer that is no refusal and has all `words`: numbers as the result, as numbers."""

    def accepts(answer: str) -> bool:
        result = answer.split(" = ")[-1]
        found = (says(w)(result) if w.isdigit() else mentions(w)(answer) for w in words)
        return not refusals.refuses(answer) and all(found)

    return accepts


REFUSED = tuple(
    single(Exchange(text, refusals.REFUSAL, refusals.refuses))
    for text in newcomer_requests.REQUESTS
)
ANSWERED = tuple(
    single(Exchange(text, words.replace("|", " "), _says_all(words.split("|"))))
    for text, words in newcomer_requests.ANSWERED
)
