"""Facts that the model memorises: who it is, manners, and a primer of mlxserve.

These are the only prose answers in training, so they contain its Markdown as well: lists, code
fences, a table.
"""

from __future__ import annotations

from random import Random

from tests.training.abilities import styles
from tests.training.abilities.topic import Topic
from tests.training.abilities.topics_of_chat import CHAT
from tests.training.abilities.topics_of_engine import ENGINE
from tests.training.abilities.topics_of_manners import MANNERS
from tests.training.abilities.topics_of_use import USE
from tests.training.conversation import Dialogue, Exchange, mentions, single
from tests.training.words import DataSplit

TOPICS = (*MANNERS, *ENGINE, *USE, *CHAT)
_DRAWN = (*TOPICS, *MANNERS)  # manners twice: most visits begin with them
HELD_OUT_QUESTIONS = frozenset(question for topic in TOPICS for question in topic.held_out)


def ask(rng: Random, split: DataSplit, topic: Topic) -> Exchange:
    """One question on one topic."""
    if split is DataSplit.TRAIN:
        question = styles.styled(rng, split, rng.choice(topic.train))
        if question in HELD_OUT_QUESTIONS:
            question = topic.train[0]
    else:
        question = rng.choice(topic.held_out)
    return Exchange(question, topic.answer, mentions(*topic.keywords))


def exchange(rng: Random, split: DataSplit) -> Exchange:
    return ask(rng, split, rng.choice(_DRAWN))


def knowledge(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A conversation of one question."""
    del num_words
    return single(exchange(rng, split))
