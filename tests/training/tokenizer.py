"""The tokenizer of the embedded model: a small byte-level BPE, made for copying.

A word must be split into the same pieces everywhere, or a model cannot copy a word that it has never
seen. So a space is a token of its own, except before the most frequent words of the generator's
prose, which never need copying, and each digit and each sign is one token.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
# Parsers look for these in the text, so they are single tokens but not special ones.
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
)
NUM_FREQUENT = 256
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, copied: Collection[str] = ()
) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens, special ones first.

    The words in `copied` are never merged with the space before them, however frequent they are.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split_pattern(frequent_words(texts, copied))), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, special=False, normalized=False) for text in MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trainer.vocab_size = vocab_size - len(markers)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(markers)
    return tokenizer


def frequent_words(texts: Iterable[str], copied: Collection[str]) -> list[str]:
    """The words that most often follow a space, longest first, as the alternation needs."""
    found = (word for text in texts for word in re.findall(r"(?<= )[A-Za-z]+", text))
    counts = Counter(word for word in found if word not in copied)
    frequent = [word for word, _ in counts.most_common(NUM_FREQUENT)]
    return sorted(frequent, key=lambda word: (-len(word), word))


def split_pattern(frequent: Sequence[str]) -> str:
    """A regular expression for the units that BPE never merges across."""
    letters, digits = r"[\p{L}\p{M}]", r"\p{N}"
    return "|".join(
        (
            f" (?:{'|'.join(frequent)})(?!{letters}|{digits})",
            f"{letters}+",
            digits,
            "```|\\*\\*|---",
            " {2,}",
            "[^\\p{L}\\p{M}\\p{N}]",
        )
    )


def tokenizer_config(max_positions: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": TEMPLATE.read_text(),
    }


class ChatEncoder:
    """Renders conversations with the chat template and marks the assistant's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # With transformers' settings for templates, so that training and serving render the same.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(TEMPLATE.read_text())
        self._tokenizer = tokenizer
        self._start, self._end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
        self._opening = tokenizer.encode(f"{START}assistant\n").ids

    def render(self, messages: Sequence[Any], tools: Sequence[Any], *, open_turn: bool) -> str:
        """The text of a conversation; `open_turn` ends it at the start of the assistant's message."""
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=open_turn
        )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def taught(self, ids: Sequence[int]) -> list[bool]:
        """Which tokens the assistant produces: its text and the end of its turn."""
        marks = [False] * len(ids)
        speaking = False
        for i, token in enumerate(ids):
            if speaking:
                marks[i] = True
                speaking = token != self._end
            else:
                first = i + 1 - len(self._opening)
                speaking = first >= 0 and list(ids[first : i + 1]) == self._opening
        return marks


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(max_positions), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
