"""Words, names and numbers that a model must copy or recall.

Every word belongs to one of two splits: a listed word to its list's, any other to the one that a hash
of its letters selects. So evaluation never uses a training word, whatever the seeds. This module
knows nothing of sentences or questions.
"""

# ruff: noqa: SIM905  (a list of words is read as words)

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from random import Random

from mlxserve.hub.embedded import model_path


class DataSplit(Enum):
    """Whether a word or a phrasing is for training or for evaluation."""

    TRAIN = "train"
    HELD_OUT = "held-out"


HELD_OUT_SHARE = 0.12
INVENTED_SHARE = 0.4  # of the listed words, replaced by invented ones in training
# The example of the README and the tests: never trained on, whatever its hash.
ALWAYS_HELD_OUT = frozenset({"plum-42"})
# Words of the phrasings that random letters and syllables could spell.
_PHRASE_WORDS = frozenset(
    """age agis ago alive answer api bang bark beer bench bike born brother change city class comes
    compare con das date dia disk echo esc feel fix flight for four fun give got gpt gui have
    hmm ist jak jaka kas kto label later laut level li load lol mail main many mare measure meeting
    mille mir mkuu mona more my nothing number pagi party php pope power pun quina rating
    richest same save show sign sleep soep stain status stdio stock tcp they this total try type
    una va vim weight when while wird with work write""".split()
)

_HELD_OUT_LISTED: set[str] = set()


def _held_out(listed: str) -> list[str]:
    """Words that no training text contains."""
    _HELD_OUT_LISTED.update(listed.lower().split())
    return listed.split()


FRUITS = (
    """apple apricot banana cherry fig grape kiwi lemon lime mango melon olive orange papaya
peach pear plum quince raisin berry""".split()
    + _held_out("""coconut guava lychee nectarine pomelo tangerine""")
)

ANIMALS = (
    """badger bear beaver bison camel cat cobra cow crab crane crow deer dog dolphin donkey
duck eagle falcon ferret fox frog gecko goat goose hare hawk heron horse ibis jackal koala lemur
lion lizard llama lynx mole moose mouse newt otter owl panda parrot pigeon puma rabbit raven robin
salmon seal shark sheep skunk snail snake sparrow spider squid stork swan tiger toad trout turtle
viper walrus weasel whale wolf wombat yak zebra""".split()
    + _held_out("""antelope beetle cheetah elephant giraffe hamster
hedgehog leopard octopus ostrich penguin rhino tortoise vulture""")
)

OBJECTS = (
    """anchor anvil arrow axe ball barrel basket beacon bell blanket boat book bottle bowl
box branch brick bridge brush bucket button cabin camera candle canoe canvas card carpet castle
chain chair chest clock cloud coin compass copper cork cradle crown cup curtain desk diamond door
dragon drum engine feather fence fiddle flag flame flute forest fork fountain garden gate glass
glove guitar hammer harbour hat helmet hill hook horn house island jacket jar kettle key kite knife
ladder lake lamp lantern leaf lens letter lock magnet map marble mask meadow mirror moon mountain
nail needle nest net oak ocean paddle page paint paper pebble pencil piano pillow pipe planet plate
pocket pond prism quilt radio rail rain ribbon ring river road robot rocket roof rope rose saddle
sail salt sand scarf shell ship shoe signal silk silver sky snow spoon spring stable star statue
stone storm street sugar summer sun table temple tent thread thunder ticket tower train tree trumpet
tunnel umbrella valley vase velvet village violin wagon wall watch water wheel whistle willow wind
window winter wire wood yarn""".split()
    + _held_out("""acorn balcony bicycle blossom
bracelet candy cannon carriage chimney crystal dagger envelope fortress hatchet jewel kennel
lightning mattress mitten notebook orchard pyramid satchel scissors spade teapot thimble tractor
tulip veranda waterfall windmill""")
)

COLOURS = (
    """amber beige black blue bronze brown crimson gold green grey indigo ivory magenta maroon
navy orange pink purple red scarlet silver teal turquoise violet white yellow""".split()
    + _held_out("""khaki lavender lilac mauve ochre""")
)

ADJECTIVES = (
    """ancient bitter bold brave bright broken calm clever cold curious dark deep distant
dusty early empty fast fierce fresh gentle giant happy heavy hidden hollow honest hungry icy kind
large late lazy light little lonely loud lucky narrow new noisy old open pale polite proud quick
quiet rapid rare rough round rusty sharp shiny short silent simple sleepy slow small smooth soft
steady strange strong sunny sweet tall tiny tired warm wet wide wild wise young""".split()
    + _held_out("""awkward brisk
clumsy crooked delicate eager faint fluffy gloomy humble jolly lively mighty plump ragged sturdy
tender vivid weary""")
)

NAMES = (
    """Aaron Ada Adam Agnes Alan Alba Alice Amir Amy Anna Anton Arthur Ben Bella Boris Bruno
Carla Carlos Clara Daniel Dario David Diana Dora Edith Elena Eli Elsa Emil Emma Eric Eva Felix Fiona
Frank Freya George Gina Grace Greta Hana Hannah Hugo Ida Igor Ines Iris Isaac Ivan Jack James Jana
Jonas Jora Julia Karim Karl Kate Kenji Lara Laura Lena Leo Lily Linda Louis Lucas Lucy Luna Maria
Marco Mark Marta Max Maya Mia Milan Mira Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul
Petra Pia Quentin Rafael Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Tara Theo Thomas Tina Tom
Uma Vera Victor Walter Wanda Xenia Yara Yusuf Zara Zoe""".split()
    + _held_out("""Abigail Beatrix Bernard Cecilia Cyrus Edgar Esther
Fabian Gloria Harriet Ingrid Jasper Jonathan Leonard Margot Matilda Nikolai Ophelia Philip Priya
Rashid Rupert Selma Tobias Ursula Wendy Yvonne""")
)

PLACES = (
    """Amsterdam Athens Basel Bergen Berlin Bern Boston Bristol Brussels Cairo Chicago Cologne
Cork Dallas Delhi Denver Dublin Florence Geneva Genoa Ghent Hamburg Hanoi Havana Helsinki Istanbul
Kyoto Leeds Lima Lisbon London Lyon Madrid Malmo Manila Milan Montreal Munich Nairobi Naples Nice
Osaka Oslo Oxford Paris Perth Porto Prague Quebec Riga Rome Seattle Seoul Seville Sofia Sydney
Tallinn Tokyo Toronto Toulouse Tunis Turin Venice Vienna Vilnius Warsaw York Zagreb Zurich""".split()
    + _held_out("""Adelaide Ankara Antwerp
Auckland Belgrade Bogota Bremen Bucharest Calgary Caracas Dakar Dresden Edinburgh Glasgow Houston
Jakarta Lagos Liverpool Marrakesh Melbourne Mumbai Nagoya Odessa Ottawa Palermo Phoenix Reykjavik
Salzburg Santiago Stockholm Valencia Zaragoza""")
)

JOBS = (
    """actor artist baker barber builder butcher carpenter chef clerk cook dancer dentist doctor
driver editor engineer farmer fisher gardener guard hunter judge lawyer librarian mason mechanic
miller musician nurse painter pilot plumber poet potter printer sailor singer smith tailor teacher
waiter weaver writer""".split()
    + _held_out("""astronomer barista brewer chemist diver drummer florist jeweller
locksmith optician pharmacist plasterer ranger surgeon translator welder""")
)

ENGLISH = sorted({*FRUITS, *ANIMALS, *OBJECTS, *COLOURS, *ADJECTIVES})

LISTED = frozenset({*ENGLISH, *NAMES, *PLACES})  # every listed word that is copied literally

_WORD = re.compile(r"[a-z]+")
_LETTERED = re.compile(r"[A-Za-z][a-z]+")

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr pl pr sh sl sp st th tr".split()
_VOWELS = "a e i o u a e i o u ai ea oo ou".split()
_CODAS = [""] * 8 + "b d g k l m n p r s t x nd rk st".split()
_ACCENTS = (("a", "ä"), ("o", "ö"), ("u", "ü"), ("e", "é"), ("n", "ñ"), ("o", "ø"), ("s", "ß"))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def split_of(word: str) -> DataSplit:
    """The split of a word in any case.

    A compound with a held-out listed word is held out (`acorn-42`); a hash of the letters decides
    for words that are not listed.
    """
    folded = word.lower()
    if folded in ALWAYS_HELD_OUT or not _HELD_OUT_LISTED.isdisjoint(_WORD.findall(folded)):
        return DataSplit.HELD_OUT
    if folded in _TRAINED_LISTED:
        return DataSplit.TRAIN
    draw = int.from_bytes(hashlib.sha256(folded.encode()).digest()[:4], "big") / 2**32
    return DataSplit.HELD_OUT if draw < HELD_OUT_SHARE else DataSplit.TRAIN


def trained(listed: Sequence[str]) -> list[str]:
    """The words of `listed` that training may use."""
    return [word for word in listed if word.lower() not in _HELD_OUT_LISTED]


def draw(rng: Random, split: DataSplit, make: Callable[[Random], str]) -> str:
    """A word of `split`, made by `make`."""
    while split_of(word := make(rng)) is not split:
        pass
    return word


def pick(rng: Random, split: DataSplit, words: list[str]) -> str:
    """One of `words` of `split`; in training, sometimes an invented word instead.

    Listed training words are often a single token. Held-out ones have several, so the model must
    learn that any word may.
    """
    if split is DataSplit.TRAIN and rng.random() < INVENTED_SHARE:
        word = draw(rng, split, rng.choice((patchwork, patchwork, blend, syllables)))
        return word.capitalize() if words[0][0].isupper() else word
    return draw(rng, split, lambda r: r.choice(words))


_WHOLE_WORDS = trained(sorted({*ENGLISH, *NAMES, *PLACES, *JOBS}))
_BLENDED = trained(ENGLISH)
_TRAINED_LISTED = _PHRASE_WORDS.union(word.lower() for word in _WHOLE_WORDS)

# --- kinds of words; each takes a Random and ignores splits ---


def english(rng: Random) -> str:
    return rng.choice(ENGLISH)


def syllables(rng: Random) -> str:
    """A pronounceable word of two or three syllables: `brokat`, `souplindea`."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((2, 2, 3)))
    )


def letters(rng: Random) -> str:
    """Three to eight random letters: `qzvtab`."""
    return "".join(rng.choices(_LETTERS, k=rng.randint(3, 8)))


def blend(rng: Random) -> str:
    """The head of one English word and the tail of another: `lanvet`."""
    head, tail = rng.choice(_BLENDED), rng.choice(_BLENDED)
    return head[: rng.randint(2, 5)] + tail[-rng.randint(2, 4) :]


def fragment(rng: Random) -> str:
    """Two or more consecutive letters of a listed word (`ridg`, `Ams`, `arpen`), or a whole token."""
    if rng.random() < 0.5:
        return rng.choice(lettered_tokens())
    word = rng.choice(_WHOLE_WORDS)
    first = rng.choice((0, 0, rng.randrange(len(word) - 1)))
    return word[first : rng.choice((len(word), rng.randint(first + 2, len(word))))]


def patchwork(rng: Random) -> str:
    """Two or three fragments in a row: `ridgAms`, `adgerolet`."""
    return "".join(fragment(rng) for _ in range(rng.choice((2, 2, 3))))


def digits(rng: Random) -> str:
    """A number of three to six digits, from 200 on: smaller ones occur as sums."""
    num_digits = rng.randint(3, 6)
    return str(rng.randrange(max(200, 10 ** (num_digits - 1)), 10**num_digits))


def hyphenated(rng: Random) -> str:
    """`plum-42`, `zorba-7`, `amber-falcon`, `kx-81-fig`."""
    parts = [stem(rng), rng.choice((tag, tag, stem))(rng)]
    if rng.random() < 0.15:
        parts.append(rng.choice((tag, stem))(rng))
    return "-".join(parts)


def serial(rng: Random) -> str:
    """Alternating letters and digits, as on a label: `K7-92B`, `xq48`."""
    body = "".join(rng.choice((rng.choice(_LETTERS), str(rng.randrange(10)))) for _ in range(4))
    text = f"{rng.choice(_LETTERS)}{body[:2]}{rng.choice(('', '-'))}{body[2:]}"
    return text.upper() if rng.random() < 0.5 else text


def accented(rng: Random) -> str:
    """A pronounceable word with a letter outside ASCII: `zübrak`, `sloñar`."""
    word = syllables(rng)
    plain, marked = rng.choice(_ACCENTS)
    return word.replace(plain, marked, 1) if plain in word else word + marked


@cache
def lettered_tokens() -> list[str]:
    """The packaged tokenizer's tokens of two or more letters.

    With random words, over a third of the vocabulary never occurs in an answer within a million
    tokens, and the model does not copy such tokens: 20 % of the held-out answers have one.
    """
    vocabulary = json.loads((model_path() / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return sorted(token for token in vocabulary if _LETTERED.fullmatch(token))


@cache
def common_words() -> list[str]:
    """Words that the packaged tokenizer joins with the space before them: ` one`, ` code`.

    In lists and lines to copy they have another token than after a quote or at the start.
    """
    vocabulary = json.loads((model_path() / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    listed = (token[1:] for token in vocabulary if token.startswith("\u0120"))
    return sorted(
        word for word in listed if _WORD.fullmatch(word) and split_of(word) is DataSplit.TRAIN
    )


def common(rng: Random) -> str:
    return rng.choice(common_words())


def stem(rng: Random) -> str:
    return rng.choice((english, english, syllables, letters, blend))(rng)


def tag(rng: Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 3)))


_CODE_KINDS = (
    *(english, english, syllables, syllables, letters, letters, blend, blend),
    *(hyphenated, hyphenated, hyphenated, hyphenated, serial, serial, accented),
)
_TRAIN_KINDS = (*_CODE_KINDS, fragment, patchwork, patchwork, patchwork)


def code_word(rng: Random, split: DataSplit) -> str:
    """A code word of any kind, sometimes capitalised. Training has more kinds than evaluation."""
    word = draw(
        rng, split, rng.choice(_CODE_KINDS if split is DataSplit.HELD_OUT else _TRAIN_KINDS)
    )
    return word.capitalize() if rng.random() < 0.12 else word


def pass_phrase(rng: Random, split: DataSplit) -> str:
    """Two to four English words in a row."""
    return " ".join(pick(rng, split, ENGLISH) for _ in range(rng.randint(2, 4)))


def number(rng: Random, split: DataSplit) -> str:
    return draw(rng, split, digits)


def first_name(rng: Random, split: DataSplit) -> str:
    """A given name: half listed, half invented, so that the model copies letter by letter."""
    if rng.random() < 0.5:
        return pick(rng, split, NAMES)
    return draw(rng, split, syllables).capitalize()


def full_name(rng: Random, split: DataSplit) -> str:
    return f"{first_name(rng, split)} {draw(rng, split, syllables).capitalize()}"


def place(rng: Random, split: DataSplit) -> str:
    if rng.random() < 0.6:
        return pick(rng, split, PLACES)
    return draw(rng, split, blend).capitalize()
