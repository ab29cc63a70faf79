"""Recall of a fact from the context, asked for in the same turn or several turns later.

Keys are open-ended (`code word`, `name of my sister's dog`, `ticket number of the brave otter`),
so the model must match the words of the question with the words of the statement.
"""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.training import prose, words
from tests.training.abilities import arithmetic, copying, knowledge, lists, refusals
from tests.training.conversation import (
    Dialogue,
    Exchange,
    Phrasings,
    TrainingMessage,
    assistant,
    says,
    system,
    user,
)
from tests.training.words import DataSplit

_CODE_KEYS = """code word|code word|code word|code word|secret word|password|pass phrase|magic word|
access code|security code|project name|safe word|code name|key word|user name|ship name|
answer""".replace("\n", "").split("|")
_NUMBER_KEYS = """secret number|number|room number|door code|locker number|phone number|lucky number|
order number|flight number|house number|page number|ticket number|pin|score|price|
total""".replace("\n", "").split("|")
_NAME_KEYS = """name of the captain|name of my teacher|name of my dog|name of my cat|name of my sister|
name of the manager|name of the doctor|winner|author|owner|guest|name of the ship|
best player""".replace("\n", "").split("|")
_PLACE_KEYS = """meeting place|destination|home town|birthplace|capital|next stop|
place of the party|location""".replace("\n", "").split("|")
_ATTRIBUTES = "code colour number name password price label token key weight address".split()

_STATE = Phrasings(
    train=(
        "The {key} is {value}.",
        "The {key} is {value}.",
        "The {key} is {value}",
        "Remember the {key} {value}.",
        "Remember the {key}: {value}.",
        "Remember that the {key} is {value}.",
        "Remember: the {key} is {value}.",
        "Remember this {key}: {value}.",
        "Please remember that the {key} is {value}.",
        "Please remember the {key} {value}.",
        "Note that the {key} is {value}.",
        "Note: the {key} is {value}.",
        "Let the {key} be {value}.",
        "Keep in mind that the {key} is {value}.",
        "For later: the {key} is {value}.",
        "I tell you the {key}: {value}.",
        "Today the {key} is {value}.",
        "My {key} is {value}.",
        "my {key} is {value}",
        "Remember that my {key} is {value}.",
        "{value} is the {key}.",
        "{key}: {value}",
        "{key} = {value}",
        "The {key} is '{value}'.",
        'The {key} is "{value}".',
        "The {key} is `{value}`.",
        "The {key} is **{value}**.",
    ),
    held_out=(
        "Please note that the {key} is {value}.",
        "Remember, the {key} is {value}.",
        "Please remember this {key}: {value}.",
        "Please keep in mind that the {key} is {value}.",
        "Note the {key}: {value}.",
        "I want you to remember that the {key} is {value}.",
    ),
)
_ASK = Phrasings(
    train=(
        "What is the {key}?",
        "What is the {key}?",
        "What was the {key}?",
        "Tell me the {key}.",
        "Please tell me the {key}.",
        "What {key} did I give you?",
        "Do you remember the {key}?",
        "Which {key} did I tell you?",
        "Repeat the {key}.",
        "Say the {key}.",
        "I forgot the {key}. What is it?",
        "Now, what is the {key}?",
        "And what is the {key}?",
        "Can you tell me the {key}?",
        "Give me the {key}.",
        "what is the {key}",
        "{key}?",
        "Recall the {key}.",
        "What is my {key}?",
        "what was my {key}",
    ),
    held_out=(
        "So what is the {key}?",
        "Can you repeat the {key}?",
        "Please give me the {key}.",
        "Do you recall the {key}?",
        "What was the {key} again?",
        "Now tell me the {key}.",
    ),
)
_ASK_BARE = Phrasings(
    train=(
        "What is the {key}? Answer with the {key} only.",
        "What is the {key}? Only the {key}, please.",
        "Answer with one word: what is the {key}?",
        "Reply with the {key} only.",
        "What is the {key}? Reply with it and nothing else.",
        "Answer with the {key} and nothing else.",
    ),
    held_out=(
        "What is the {key}? Reply with the {key} only.",
        "Tell me the {key} and nothing else.",
    ),
)
_ASK_ROW = Phrasings(
    train=(
        "What is the value of {key}?",
        "What is the value of {key}?",
        "What does {key} have?",
        "Look up {key}.",
        "Tell me the value of {key}.",
        "Which value belongs to {key}?",
        "{key}?",
        "What stands beside {key}?",
    ),
    held_out=(
        "Please look up {key}.",
        "Which value has {key}?",
        "What is the value beside {key}?",
        "Give me the value of {key}.",
    ),
)
_NOTED = (
    "I will remember that the {key} is {value}.",
    "Noted: the {key} is {value}.",
    "OK. The {key} is {value}.",
    "OK, I will remember it.",
    "Noted.",
    "Thank you, I have noted it.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    key: str
    value: str

    def stated(self, rng: Random, split: DataSplit) -> str:
        text = _STATE.pick(rng, split).format(key=self.key, value=self.value)
        return text[0].upper() + text[1:] if text.startswith(self.key) else text

    def asked(self, rng: Random, split: DataSplit, others: list[Fact]) -> Exchange:
        """The question, answered with a sentence, or with the bare value if it asks for that."""
        bare = rng.random() < 0.25
        phrasing = (_ASK_BARE if bare else _ASK).pick(rng, split).format(key=self.key)
        question = phrasing[0].upper() + phrasing[1:] if phrasing.startswith(self.key) else phrasing
        answer = self.value if bare else f"The {self.key} is {self.value}."
        return Exchange(question, answer, says(self.value, [fact.value for fact in others]))


def facts(rng: Random, split: DataSplit, num_facts: int) -> list[Fact]:
    """`num_facts` facts, no two with the same key or with a common word in their values."""
    found: dict[str, Fact] = {}
    used: set[str] = set()
    while len(found) < num_facts:
        fact = _fact(rng, split)
        parts = fact.value.split()
        if fact.key not in found and used.isdisjoint(parts):
            found[fact.key] = fact
            used.update(parts)
    return list(found.values())


def _fact(rng: Random, split: DataSplit) -> Fact:
    kind = rng.randrange(8)
    if kind < 3:
        share = 0.3 if split is DataSplit.TRAIN else 0.1  # pass phrases are hard to end
        make = words.pass_phrase if rng.random() < share else words.code_word
        return Fact(rng.choice(_CODE_KEYS), make(rng, split))
    if kind == 3:
        return Fact(rng.choice(_NUMBER_KEYS), words.number(rng, split))
    if kind == 4:
        name = rng.choice((words.first_name, words.full_name))(rng, split)
        return Fact(rng.choice(_NAME_KEYS), name)
    if kind == 5:
        return Fact(rng.choice(_PLACE_KEYS), words.place(rng, split))
    attribute = rng.choice(_ATTRIBUTES)
    holder = rng.choice(
        (
            words.pick(rng, split, words.ENGLISH),
            f"{words.pick(rng, split, words.ADJECTIVES)} {words.pick(rng, split, words.ENGLISH)}",
            words.draw(rng, split, words.syllables),
            words.pick(rng, split, words.NAMES),
        )
    )
    made = rng.choice((words.code_word, words.number))
    if rng.random() < 0.5:
        return Fact(f"{attribute} of {holder}", made(rng, split))
    return Fact(f"{holder} {attribute}", made(rng, split))


def in_one_turn(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Facts within `num_words` words of other text, and the question, all in one message."""
    told = facts(rng, split, _few(rng, num_words))
    asked = rng.choice(told)
    text = _mixed(rng, split, [fact.stated(rng, split) for fact in told], num_words)
    exchange = asked.asked(rng, split, [fact for fact in told if fact is not asked])
    separator = rng.choice((" ", "\n", "\n\n"))
    return Dialogue(
        (user(f"{text}{separator}{exchange.question}"), assistant(exchange.answer)),
        exchange.accepts,
    )


def in_system_prompt(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Facts in the system prompt, the question in the user's message."""
    told = facts(rng, split, _few(rng, num_words))
    asked = rng.choice(told)
    text = _mixed(rng, split, [fact.stated(rng, split) for fact in told], num_words)
    exchange = asked.asked(rng, split, [fact for fact in told if fact is not asked])
    opening = rng.choice(("You are a helpful assistant. ", "You are a helpful assistant.\n\n", ""))
    return Dialogue((system(opening + text), *exchange.messages), exchange.accepts)


def over_turns(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Facts in earlier turns, other exchanges, then the question."""
    told = facts(rng, split, rng.randint(1, 4))
    messages: list[TrainingMessage] = []
    for fact in told:
        share = num_words // (2 * len(told))
        stated = _mixed(rng, split, [fact.stated(rng, split)], share)
        noted = rng.choice(_NOTED).format(key=fact.key, value=fact.value)
        messages += [user(stated), assistant(noted)]
        for _ in range(rng.randint(0, 2)):
            messages += interlude(rng, split).messages
    spent = sum(len(message["content"].split()) for message in messages)
    while spent < num_words:
        other = interlude(rng, split)
        messages += other.messages
        spent += len(f"{other.question} {other.answer}".split())
    asked = rng.choice(told)
    last = asked.asked(rng, split, [fact for fact in told if fact is not asked])
    return Dialogue((*messages, *last.messages), last.accepts)


def many_questions(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Many facts at once, then many questions: the densest lesson."""
    return _questioned(rng, split, num_words, rng.randint(2, 8))


def _questioned(rng: Random, split: DataSplit, num_words: int, num_facts: int) -> Dialogue:
    told = facts(rng, split, num_facts)
    text = _mixed(rng, split, [fact.stated(rng, split) for fact in told], num_words)
    asked = rng.sample(told, rng.randint(1, len(told)))
    exchanges = [fact.asked(rng, split, [f for f in told if f is not fact]) for fact in asked]
    separator = rng.choice((" ", "\n", "\n\n"))
    first = user(f"{text}{separator}{exchanges[0].question}")
    messages: list[TrainingMessage] = [first, assistant(exchanges[0].answer)]
    for exchange in exchanges[1:]:
        messages += exchange.messages
    return Dialogue(tuple(messages), exchanges[-1].accepts)


def long_questions(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A long text with scattered facts, and many questions: dense training in long contexts."""
    return _questioned(rng, split, num_words, rng.randint(6, 16))


def table(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Lines of names and values, as in a file, and questions about some."""
    del num_words
    make = rng.choice((words.code_word, words.number, words.place))
    key_of = rng.choice((words.first_name, words.code_word))
    rows = {key_of(rng, split): make(rng, split) for _ in range(rng.randint(2, 10))}
    shape = rng.choice(("{k}: {v}", "{k} = {v}", "- {k}: {v}", "| {k} | {v} |", "{k} has {v}."))
    listing = "\n".join(shape.format(k=k, v=v) for k, v in rows.items())
    asked = rng.sample(sorted(rows), rng.randint(1, len(rows)))
    messages: list[TrainingMessage] = []
    for i, key in enumerate(asked):
        question = _ASK_ROW.pick(rng, split).format(key=key)
        messages += [user(question if i else f"{listing}\n\n{question}"), assistant(rows[key])]
    others = [value for key, value in rows.items() if key != asked[-1] and value != rows[asked[-1]]]
    return Dialogue(tuple(messages), says(rows[asked[-1]], others))


def interlude(rng: Random, split: DataSplit) -> Exchange:
    """A short exchange about something else."""
    makers: tuple[Callable[[Random, DataSplit], Exchange], ...] = (
        copying.repeat_line,
        copying.repeat_line,
        copying.numbered_line,
        arithmetic.exchange,
        lists.exchange,
        knowledge.exchange,
        refusals.any_exchange,
        _remark,
    )
    return rng.choice(makers)(rng, split)


def _remark(rng: Random, split: DataSplit) -> Exchange:
    """A remark without a question."""
    answer = rng.choice(("I see.", "Thank you for telling me.", "OK.", "Good to know."))
    return Exchange(" ".join(prose.paragraph(rng, split, rng.randint(5, 30))), answer, bool)


def _mixed(rng: Random, split: DataSplit, statements: list[str], num_words: int) -> str:
    """Statements scattered in a paragraph of `num_words` words."""
    sentences = prose.paragraph(rng, split, num_words)
    for statement in statements:
        sentences.insert(rng.randint(0, len(sentences)), statement)
    joint = rng.choice((" ", " ", "\n"))
    return joint.join(sentences)


def _few(rng: Random, num_words: int) -> int:
    """The number of facts: one or two in a short context, up to five in a long one."""
    return rng.randint(1, 2 + min(3, num_words // 40))
