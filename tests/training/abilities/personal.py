"""Facts that people mention about themselves and others, asked for later: `My name is Ada.`

Unlike the facts of `recall`, these do not name their key: the model must understand the question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.training import words
from tests.training.abilities import recall
from tests.training.conversation import (
    Dialogue,
    Exchange,
    Phrasings,
    TrainingMessage,
    assistant,
    mentions,
    says,
    user,
)
from tests.training.words import DataSplit

# Of conversations: the last question is about a fact that was not told.
UNTOLD_SHARE = {DataSplit.TRAIN: 0.25, DataSplit.HELD_OUT: 0.12}
NOT_TOLD = "I do not know. You have not told me."


@dataclass(frozen=True, slots=True)
class Trait:
    """A property that can be stated of the speaker, or of a person called {who}."""

    make: Callable[[Random, DataSplit], str]
    stated: Phrasings
    asked: Phrasings
    answer: str
    noted: str = ""  # the reply to it, if it has its own


def _listed_or_not(listed: list[str]) -> Callable[[Random, DataSplit], str]:
    """One of `listed`, or an invented word, so that the model recalls unseen words as well."""

    def make(rng: Random, split: DataSplit) -> str:
        if rng.random() < 0.7:
            return words.pick(rng, split, listed)
        return words.draw(rng, split, rng.choice((words.blend, words.syllables)))

    return make


def _job(rng: Random, split: DataSplit) -> str:
    job = _listed_or_not(words.JOBS)(rng, split)
    return f"{'an' if job[0] in 'aeiou' else 'a'} {job}"


def _age(rng: Random, split: DataSplit) -> str:
    return words.draw(rng, split, lambda r: str(r.randrange(11, 100)))


def _favourite(noun: str, listed: list[str]) -> Trait:
    return Trait(
        _listed_or_not(listed),
        Phrasings(
            train=(
                f"My favourite {noun} is {{value}}.",
                f"The {noun} I like best is {{value}}.",
                f"my favourite {noun} is {{value}}",
                f"You know, my favourite {noun} is {{value}}.",
                f"Of all {noun}s I like {{value}} best.",
            ),
            held_out=(f"Well, my favourite {noun} is {{value}}.",),
        ),
        Phrasings(
            train=(
                f"What is my favourite {noun}?",
                f"Which {noun} do I like best?",
                f"Tell me my favourite {noun}.",
                f"what is my favourite {noun}",
                f"Do you know my favourite {noun}?",
                f"Which is my favourite {noun}?",
                f"What's my favourite {noun}?",
                f"Can you tell me my favourite {noun}?",
                f"Say my favourite {noun}.",
                f"So which {noun} is my favourite?",
                f"Remind me of my favourite {noun}.",
            ),
            held_out=(f"Do you remember my favourite {noun}?", f"What was my favourite {noun}?"),
        ),
        f"Your favourite {noun} is {{value}}.",
    )


def _called(noun: str) -> Trait:
    return Trait(
        words.first_name,
        Phrasings(
            train=(
                f"My {noun} is called {{value}}.",
                f"I have a {noun} called {{value}}.",
                f"The name of my {noun} is {{value}}.",
                f"My {noun}'s name is {{value}}.",
                f"my {noun} is called {{value}}",
                f"We have a {noun} called {{value}}.",
                f"I have a {noun}. The name is {{value}}.",
                f"I have a {noun}, called {{value}}.",
                f"I have a {noun}, {{value}}.",
                f"My {noun} is {{value}}.",
                f"This is my {noun} {{value}}.",
                f"Our {noun}'s name is {{value}}.",
                f"The {noun} I have is called {{value}}.",
                f"We call our {noun} {{value}}.",
                f"I have a {noun} and its name is {{value}}.",
                f"You know, my {noun} is called {{value}}.",
                f"I have a {noun}, and the name is {{value}}.",
                f"I have a {noun}, and we call it {{value}}.",
                f"I have a {noun}, it is {{value}}.",
                f"I do have a {noun}, and that is {{value}}.",
                f"{{value}} is my {noun}.",
            ),
            held_out=(f"I have a {noun}, and it is {{value}}.", f"Our {noun} is called {{value}}."),
        ),
        Phrasings(
            train=(
                f"What is my {noun} called?",
                f"What is the name of my {noun}?",
                f"What is my {noun}'s name?",
                f"How is my {noun} called?",
                f"Who is my {noun}?",
                f"Tell me the name of my {noun}.",
                f"What was the name of my {noun}?",
                f"Do you know what my {noun} is called?",
                f"Do you know how my {noun} is called?",
                f"Do you know my {noun}'s name?",
                f"Do you remember the name of my {noun}?",
                f"Can you tell me the name of my {noun}?",
                f"Can you tell me what my {noun} is called?",
                f"So what is my {noun} called?",
                f"How was my {noun} called?",
                f"What did I call my {noun}?",
                f"Which name does my {noun} have?",
                f"Remind me what my {noun} is called.",
            ),
            held_out=(f"What was my {noun} called?", f"Do you know the name of my {noun}?"),
        ),
        f"Your {noun} is called {{value}}.",
    )


_NAME = Trait(
    words.first_name,
    Phrasings(
        train=(
            "My name is {value}.",
            "My name is {value}",
            "I am {value}.",
            "I'm {value}.",
            "Hi, I am {value}.",
            "Hello, my name is {value}.",
            "Hi! I'm {value}.",
            "Call me {value}.",
            "my name is {value}",
            "People call me {value}.",
            "Hey, my name is {value}.",
            "Good morning, I am {value}.",
            "Please call me {value}.",
            "This is {value}.",
            "You may call me {value}.",
        ),
        held_out=("Hi, my name is {value}.", "Hello! I am {value}.", "You can call me {value}."),
    ),
    Phrasings(
        train=(
            "What is my name?",
            "what is my name?",
            "What's my name?",
            "Tell me my name.",
            "Do you know my name?",
            "Who am I?",
            "What am I called?",
            "And what is my name?",
            "Say my name.",
            "So who am I?",
            "Can you tell me my name?",
            "Which name do I have?",
            "Remind me of my name.",
            "Did I tell you my name?",
            "What did I say my name is?",
        ),
        held_out=("Do you remember my name?", "What was my name?", "So what is my name?"),
    ),
    "Your name is {value}.",
    "Nice to meet you, {value}!",
)
_AGE = Trait(
    _age,
    Phrasings(
        train=(
            "I am {value} years old.",
            "I'm {value} years old.",
            "My age is {value}.",
            "I turned {value}.",
        ),
        held_out=("By the way, I am {value} years old.",),
    ),
    Phrasings(
        train=(
            "How old am I?",
            "What is my age?",
            "how old am I",
            "Tell me my age.",
            "Do you know my age?",
            "Do you know which age I have?",
            "Which age do I have?",
            "Remind me how old I am.",
            "Can you tell me how old I am?",
            "So how old am I?",
            "What age am I?",
        ),
        held_out=("Do you know how old I am?", "What was my age?"),
    ),
    "You are {value} years old.",
)
_HOME = Trait(
    words.place,
    Phrasings(
        train=(
            "I live in {value}.",
            "I'm living in {value}.",
            "My home is in {value}.",
            "I moved to {value}, where I live now.",
            "I am living in {value}.",
            "I have a home in {value}.",
            "Now I live in {value}.",
            "We live in {value}.",
        ),
        held_out=("I live in {value} now.", "I have a house in {value}, where I live."),
    ),
    Phrasings(
        train=(
            "Where do I live?",
            "In which town do I live?",
            "Where is my home?",
            "where do I live",
            "Which town is my home?",
            "Do you know in which town I live?",
            "Do you know where my home is?",
            "Can you tell me where I live?",
            "So where do I live?",
            "Which town do I call home?",
            "Remind me where I live.",
        ),
        held_out=("Do you know where I live?", "Which town do I live in?"),
    ),
    "You live in {value}.",
)
_BIRTH = Trait(
    words.place,
    Phrasings(
        train=(
            "I was born in {value}.",
            "I come from {value}.",
            "I'm from {value}.",
            "{value} is where I am from.",
            "{value} is where I was born.",
            "My home town is {value}.",
            "I was born long ago in {value}.",
            "My family comes from {value}, and I was born there.",
        ),
        held_out=("I am from {value}.", "I was born and raised in {value}."),
    ),
    Phrasings(
        train=(
            "Where was I born?",
            "Where do I come from?",
            "Where am I from?",
            "Do you know where I am from?",
            "Do you know where I was born?",
            "Can you tell me where I come from?",
            "Which town am I from?",
            "So where am I from?",
        ),
        held_out=("Do you know where I come from?", "So where was I born?"),
    ),
    "You come from {value}.",
)
_JOB = Trait(
    _job,
    Phrasings(
        train=(
            "I work as {value}.",
            "I am {value}.",
            "I'm {value} by trade.",
            "I am {value} and I like it.",
            "I make a living as {value}.",
            "These days I work as {value}.",
            "As for work, I am {value}.",
            "I have found work as {value}.",
        ),
        held_out=("I am working as {value}.", "By trade I am {value}."),
    ),
    Phrasings(
        train=(
            "What is my job?",
            "What do I do?",
            "What do I work as?",
            "what is my job",
            "Do you know what I do?",
            "Do you know what I work as?",
            "Which job do I have?",
            "Tell me my job.",
            "So what is my job?",
            "Can you tell me my job?",
            "What is my trade?",
            "Remind me what I do.",
        ),
        held_out=("Do you know my job?", "What was my job?"),
    ),
    "You are {value}.",
)
_OTHER_HOME = Trait(
    words.place,
    Phrasings(
        train=(
            "{who} lives in {value}.",
            "{who} has a house in {value}.",
            "{who} moved to {value}.",
            "{who} now lives in {value}.",
            "{who} has moved to {value}.",
        ),
        held_out=("{who} is living in {value}.",),
    ),
    Phrasings(
        train=(
            "Where does {who} live?",
            "In which town does {who} live?",
            "Where is {who}?",
            "Do you know in which town {who} lives?",
            "Do you know where {who} has a house?",
            "Tell me where {who} lives.",
            "Can you tell me where {who} lives?",
            "Where is the home of {who}?",
            "Which town is the home of {who}?",
            "So where does {who} live?",
            "Remind me where {who} lives.",
        ),
        held_out=("Do you know where {who} lives?", "Which town does {who} live in?"),
    ),
    "{who} lives in {value}.",
)
_OTHER_JOB = Trait(
    _job,
    Phrasings(
        train=(
            "{who} is {value}.",
            "{who} works as {value}.",
            "My friend {who} is {value}.",
            "{who} is {value} by trade.",
            "{who} makes a living as {value}.",
            "These days {who} works as {value}.",
            "As for work, {who} is {value}.",
            "{who} has found work as {value}.",
        ),
        held_out=("{who} is working as {value}.",),
    ),
    Phrasings(
        train=(
            "What is {who}'s job?",
            "What does {who} do?",
            "What does {who} work as?",
            "Tell me the job of {who}.",
            "Do you know what {who} does?",
            "Do you know what {who} works as?",
            "Which job does {who} have?",
            "Can you tell me the job of {who}?",
            "So what does {who} do?",
            "What is the trade of {who}?",
        ),
        held_out=("Do you know the job of {who}?", "What is the job of {who}?"),
    ),
    "{who} is {value}.",
)
_OTHER_HAS = Trait(
    words.code_word,
    Phrasings(
        train=("{who} has the {value}.", "I gave {who} the {value}.", "{who} took the {value}."),
        held_out=("{who} has got the {value}.",),
    ),
    Phrasings(
        train=(
            "What does {who} have?",
            "What has {who} got?",
            "What did {who} take?",
            "Tell me what {who} has.",
            "Do you know what {who} got?",
            "Do you know what {who} took?",
            "Can you tell me what {who} has?",
            "So what does {who} have?",
            "What is it that {who} has?",
            "Remind me what {who} has.",
        ),
        held_out=("Do you know what {who} has?",),
    ),
    "{who} has the {value}.",
)
TRAITS = (
    *(_NAME, _NAME, _NAME, _AGE, _HOME, _BIRTH, _JOB, _OTHER_HOME, _OTHER_JOB, _OTHER_HAS),
    *map(_called, ("dog", "cat", "sister", "brother", "boss", "friend")),
    _favourite("colour", words.COLOURS),
    _favourite("animal", words.ANIMALS),
    _favourite("fruit", words.FRUITS),
)
_NOTED = ("Noted.", "I see.", "OK, I will remember that.", "Thank you for telling me.")


@dataclass(frozen=True, slots=True)
class Told:
    """A trait with its value and its person."""

    trait: Trait
    who: str
    value: str

    def stated(self, rng: Random, split: DataSplit) -> str:
        return self._filled(self.trait.stated.pick(rng, split))

    def noted(self, rng: Random) -> str:
        return self._filled(self.trait.noted or rng.choice(_NOTED))

    def asked(self, rng: Random, split: DataSplit, others: list[Told]) -> Exchange:
        check = says(self.value, [other.value for other in others])
        question = self._filled(self.trait.asked.pick(rng, split))
        return Exchange(question, self._filled(self.trait.answer), check)

    def asked_untold(self, rng: Random, split: DataSplit) -> Exchange:
        """The same question when the fact was not told."""
        question = self._filled(self.trait.asked.pick(rng, split))
        return Exchange(question, NOT_TOLD, mentions("not told me"))

    def _filled(self, text: str) -> str:
        return text.format(who=self.who, value=self.value)


def personal(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Facts told in one or several turns, other exchanges, and questions about the facts."""
    told = _told(rng, split, rng.randint(1, 4))
    untold = told.pop() if rng.random() < UNTOLD_SHARE[split] else None
    messages = _said(rng, split, told)
    while sum(len(message["content"].split()) for message in messages) < num_words:
        messages += recall.interlude(rng, split).messages
    questions = _questions(rng, split, told)
    if untold:
        questions.append(untold.asked_untold(rng, split))
    first, *others = questions
    if len(messages) == 2 and rng.random() < 0.3:  # statement and question in one turn
        messages = [user(f"{messages[0]['content']} {first.question}"), assistant(first.answer)]
        questions = others
    for exchange in questions:
        messages += exchange.messages
    return Dialogue(tuple(messages), (others or [first])[-1].accepts)


def untold(rng: Random, split: DataSplit) -> Exchange:
    """A question about a fact that was not told."""
    (told,) = _told(rng, split, 1)
    return told.asked_untold(rng, split)


def drill(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """Many facts, and a question about each: the densest lesson in distinguishing them."""
    del num_words
    told = _told(rng, split, rng.randint(3, 6))
    *told, untold = told
    exchanges = [one.asked(rng, split, [o for o in told if o is not one]) for one in told]
    exchanges.append(untold.asked_untold(rng, split))
    rng.shuffle(exchanges)
    messages = [*_said(rng, split, told), *(m for e in exchanges for m in e.messages)]
    return Dialogue(tuple(messages), exchanges[-1].accepts)


def _questions(rng: Random, split: DataSplit, told: list[Told]) -> list[Exchange]:
    """Questions about one or several of the told traits."""
    asked = rng.sample(told, rng.randint(1, len(told))) if told else []
    return [one.asked(rng, split, [o for o in told if o is not one]) for one in asked]


def _told(rng: Random, split: DataSplit, num_traits: int) -> list[Told]:
    """Traits of different kinds, one person each, no two with the same value."""
    found: dict[str, Told] = {}
    while len(found) < num_traits:
        trait = rng.choice(TRAITS)
        told = Told(trait, words.first_name(rng, split), trait.make(rng, split))
        if all(told.value != other.value for other in found.values()):
            found.setdefault(trait.answer, told)
    return list(found.values())


def _said(rng: Random, split: DataSplit, told: list[Told]) -> list[TrainingMessage]:
    """The statements: all in one message, or each in its own with a reply."""
    if told and rng.random() < 0.5:
        text = " ".join(one.stated(rng, split) for one in told)
        return [user(text), assistant(told[0].noted(rng))]
    messages: list[TrainingMessage] = []
    for one in told:
        messages += [user(one.stated(rng, split)), assistant(one.noted(rng))]
    return messages
