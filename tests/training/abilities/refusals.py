"""Refusing in one sentence what the model cannot do, in any words and language."""

from __future__ import annotations

import re
from random import Random

from tests.training.abilities import foreign, knowledge, requests, styles
from tests.training.conversation import Dialogue, Exchange, TrainingMessage
from tests.training.words import DataSplit

_REASON = "I am a small demonstration model; load a larger one with `/model` in the chat or `-m` in a command."
REFUSAL = f"I can't help with that: {_REASON}"
ONLY_ENGLISH = f"I only know English: {_REASON}"

_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|$)")
_EARLIER_SHARE = 0.4  # of conversations: something was said before


def refuses(answer: str) -> bool:
    """Accept one sentence that says no, names `/model` and `-m` and contains no call markup."""
    text = answer.strip()
    return (
        text.startswith(("I can't", "I only know"))
        and "`/model`" in text
        and "`-m`" in text
        and "<" not in text
        and "\n" not in text
        and [match.end() for match in _END_OF_SENTENCE.finditer(text)] == [len(text)]
    )


def exchange(rng: Random, split: DataSplit) -> Exchange:
    """A request in English, as people type it."""
    text = styles.styled(rng, split, requests.request(rng, split))
    return Exchange(text, REFUSAL, refuses)


def foreign_exchange(rng: Random, split: DataSplit) -> Exchange:
    """A message in another language."""
    text = styles.misspelt(rng, styles.cased(rng, foreign.message(rng, split)))
    return Exchange(text, ONLY_ENGLISH, refuses)


def any_exchange(rng: Random, split: DataSplit) -> Exchange:
    return (exchange if rng.random() < 0.8 else foreign_exchange)(rng, split)


def refusal(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A request in English, sometimes after other exchanges."""
    del num_words
    return _after_others(rng, split, exchange(rng, split))


def in_other_languages(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A message in another language, sometimes after other exchanges."""
    del num_words
    return _after_others(rng, split, foreign_exchange(rng, split))


def _after_others(rng: Random, split: DataSplit, last: Exchange) -> Dialogue:
    messages: list[TrainingMessage] = []
    if rng.random() < _EARLIER_SHARE:
        for _ in range(rng.randint(1, 2)):
            messages += rng.choice((knowledge.exchange, any_exchange))(rng, split).messages
    return Dialogue((*messages, *last.messages), last.accepts)
