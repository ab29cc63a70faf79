"""Copying a line, a list or a chosen line exactly."""

from __future__ import annotations

from random import Random

from tests.training import prose, words
from tests.training.abilities.styles import casual
from tests.training.conversation import (
    Dialogue,
    Exchange,
    Phrasings,
    equals,
    says,
    single,
)
from tests.training.words import DataSplit

_ASK = Phrasings(
    train=(
        "Repeat this line: {line}",
        "Repeat: {line}",
        "Repeat after me: {line}",
        "Copy this line: {line}",
        "Copy this line exactly:\n{line}",
        "Copy the following text:\n{line}",
        "Write this again: {line}",
        "Please repeat: {line}",
        "Please repeat the following line.\n{line}",
        "Say this: {line}",
        "Say exactly this: {line}",
        "Echo: {line}",
        "Echo the next line.\n\n{line}",
        "Type this text once more: {line}",
        "Give me this line back: {line}",
        "Can you repeat this line?\n{line}",
        "Please copy: {line}",
        "Please say this: {line}",
        "Please echo this line: {line}",
        "Now copy this line: {line}",
        "Please write this line: {line}",
        "Copy this, please: {line}",
        "Repeat this: {line}",
        "Say: {line}",
        "Say {line}",
        "Copy this: {line}",
        "Write this: {line}",
        "Repeat {line}",
        "Just say: {line}",
        "Can you repeat this: {line}",
        "Repeat this text exactly: {line}",
        "Say this line once more: {line}",
        "{line}\n\nRepeat the line above.",
        "{line}\n\nPlease repeat this line.",
        "{line}\nWrite the line above again.",
        "{line}\nCopy the text above.",
    ),
    held_out=(
        "Please copy this line: {line}",
        "Please repeat this line exactly: {line}",
        "Repeat the following text:\n{line}",
        "Copy: {line}",
        "Say this again: {line}",
        "Copy the following line.\n\n{line}",
        "{line}\n\nRepeat the text above.",
    ),
)
_ASK_NUMBERED = Phrasings(
    train=(
        "{lines}\n\nWhat is line {n}?",
        "{lines}\nRepeat line {n}.",
        "Here is a list:\n{lines}\nWhat is item {n}?",
        "Read this list.\n{lines}\nCopy line {n}.",
    ),
    held_out=(
        "{lines}\n\nRepeat line {n}, please.",
        "Here are some lines:\n{lines}\nWhat is line {n}?",
    ),
)


def line(rng: Random, split: DataSplit) -> str:
    """A line to copy: a sentence, a list of words, a run of codes or of digits."""
    kind = rng.randrange(6)
    if kind == 0:
        return prose.sentence_of(rng, split)
    if kind == 1:
        return " ".join(words.code_word(rng, split) for _ in range(rng.randint(1, 8)))
    if kind == 2:
        return ", ".join(words.code_word(rng, split) for _ in range(rng.randint(2, 7)))
    if kind == 3:
        return " ".join(words.number(rng, split) for _ in range(rng.randint(1, 6)))
    if kind == 4:
        kinds = (words.code_word, words.number, words.full_name, words.place)
        return " ".join(rng.choice(kinds)(rng, split) for _ in range(rng.randint(2, 6)))
    first, second = words.code_word(rng, split), words.full_name(rng, split)
    return f"{second} {rng.choice(('has', 'lost', 'sent', 'wants'))} {first} in {prose.sentence_of(rng, split)}"


def repeat_line(rng: Random, split: DataSplit) -> Exchange:
    """One line to copy; only an equal answer is right."""
    text = line(rng, split)
    return Exchange(casual(rng, split, _ASK).format(line=text), text, equals(text))


def pieces(rng: Random, split: DataSplit) -> Exchange:
    """A line of word fragments to copy, so that every token occurs in answers."""
    kinds = (words.fragment, words.fragment, words.patchwork, words.english, words.common)
    gap = rng.choice((" ", " ", ", ", "-"))
    text = gap.join(words.draw(rng, split, rng.choice(kinds)) for _ in range(rng.randint(2, 14)))
    return Exchange(casual(rng, split, _ASK).format(line=text), text, equals(text))


def numbered_line(rng: Random, split: DataSplit) -> Exchange:
    """Numbered lines, one of which is to be copied."""
    lines = [words.code_word(rng, split) for _ in range(rng.randint(2, 7))]
    n = rng.randint(1, len(lines))
    listing = "\n".join(f"{i}. {text}" for i, text in enumerate(lines, 1))
    wanted = lines[n - 1]
    others = [text for text in lines if text != wanted]
    question = casual(rng, split, _ASK_NUMBERED).format(lines=listing, n=n)
    return Exchange(question, wanted, says(wanted, but_not=others))


def copy(rng: Random, split: DataSplit, num_words: int) -> Dialogue:
    """A line to copy. `num_words` is not used: the line is the whole context."""
    del num_words
    return single(repeat_line(rng, split))
