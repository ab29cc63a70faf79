r"""Fill in the middle: the text between a prefix and a suffix, in a code model's own tokens.

    <|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n\nprint(add(1, 2))<|fim_middle|>

The text around the tokens is encoded without them, as it is: a suffix cannot hold one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

TokenId: TypeAlias = Callable[[str], int | None]  # None for a token that the vocabulary lacks
Encode: TypeAlias = Callable[[str], Sequence[int]]


class Hole(Enum):
    """A text in a family's prompt."""

    PREFIX = auto()
    SUFFIX = auto()


@dataclass(frozen=True, slots=True)
class _Family:
    """The tokens and texts of a prompt, in order, and the token before another file's name."""

    prompt: tuple[str | Hole, ...]
    file: str | None = None


_P, _S = Hole.PREFIX, Hole.SUFFIX
_FAMILIES = (
    # Qwen 2.5 Coder and 3, Granite 4, CodeGemma
    _Family(("<|fim_prefix|>", _P, "<|fim_suffix|>", _S, "<|fim_middle|>"), "<|file_sep|>"),
    # StarCoder 2, Granite
    _Family(("<fim_prefix>", _P, "<fim_suffix>", _S, "<fim_middle>"), "<file_sep>"),
    # DeepSeek
    _Family(("<｜fim▁begin｜>", _P, "<｜fim▁hole｜>", _S, "<｜fim▁end｜>")),
    # GLM 4
    _Family(("<|code_prefix|>", _P, "<|code_suffix|>", _S, "<|code_middle|>")),
    # Seed-Coder
    _Family(("<[fim-suffix]>", _S, "<[fim-prefix]>", _P, "<[fim-middle]>")),
    # Code Llama
    _Family(("▁<PRE>", _P, "▁<SUF>", _S, "▁<MID>")),
    # Codestral
    _Family(("[SUFFIX]", _S, "[PREFIX]", _P)),
)
# Tokens after which a model goes on with another file, beside those of its prompt.
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<fim_pad>", "<repo_name>", "▁<EOT>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file beside the one that is completed."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """How one model fills in the middle of a text.

    prompt: tokens and texts, in order
    file: the token before another file's name; None if the model has none
    ends: tokens that end the answer
    """

    prompt: tuple[int | Hole, ...]
    file: int | None
    ends: tuple[int, ...]

    @classmethod
    def find(cls, token_id: TokenId) -> FillInMiddle | None:
        """The first family whose tokens are in the vocabulary; None if there is none."""
        for family in _FAMILIES:
            parts = [part if isinstance(part, Hole) else token_id(part) for part in family.prompt]
            prompt = tuple(part for part in parts if part is not None)
            if len(prompt) < len(parts):
                continue
            file = None if family.file is None else token_id(family.file)
            own = [part for part in prompt if isinstance(part, int)]
            others = (file, *map(token_id, _ENDS))
            return cls(prompt, file, (*own, *(end for end in others if end is not None)))
        return None

    def encode(
        self, prefix: str, suffix: str, encode: Encode, files: Sequence[OtherFile] = ()
    ) -> list[int]:
        """Return the prompt, without the tokens at the beginning of every text.

        files: shown before the text, the most relevant last
        """
        token_ids = [token for file in files for token in self._file(file, encode)]
        if files and self.file is not None:
            token_ids += [self.file, *encode("\n")]
        texts = {Hole.PREFIX: prefix, Hole.SUFFIX: suffix}
        for part in self.prompt:
            token_ids += encode(texts[part]) if isinstance(part, Hole) else [part]
        return token_ids

    def _file(self, file: OtherFile, encode: Encode) -> Sequence[int]:
        text = encode(f"{file.name}\n{file.text}\n")
        return text if self.file is None else (self.file, *text)
