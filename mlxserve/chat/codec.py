"""TextCodec: text to token ids and back, within one model's context and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxserve.core.errors import InvalidParameter, PromptTooLong
from mlxserve.text.fill_in_middle import OtherFile
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # it imports mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine

_MARGIN = 4  # a text is refused unread if it has this many times more characters than can fit


class TextCodec:
    """A tokenizer that refuses texts and ids its engine cannot take. Thread-safe."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._engine = engine

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return self._engine.max_model_len

    @property
    def max_characters(self) -> int:
        """Maximum characters of a text to tokenise: a longer one cannot fit, and would take seconds.

        The margin allows for tokenizers that drop or join characters first.
        """
        return self.max_model_len * _MARGIN * self.tokenizer.max_token_size - 1

    def encode(self, text: str) -> list[int]:
        """Encode a text. Raises InvalidRequest, and PromptTooLong if it is far too long."""
        self.refuse_huge(len(text))
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids. Raises InvalidParameter for ids outside the vocabulary.

        Tokenizers treat those inconsistently: some fail, some ignore them.
        """
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise InvalidParameter("tokens", f"must be from 0 to {self.vocab_size - 1}")
        return self.tokenizer.decode(token_ids)

    @property
    def middle_ends(self) -> tuple[int, ...] | None:
        """Tokens that end a text in the middle; None for a model that does not fill it in."""
        way = self.tokenizer.fill_in_middle
        return None if way is None else way.ends

    def encode_middle(self, prefix: str, suffix: str, files: Sequence[OtherFile] = ()) -> list[int]:
        """Encode a prompt for the text between two others. Raises PromptTooLong if it is far too long."""
        texts = (prefix, suffix, *(file.text for file in files))
        self.refuse_huge(sum(map(len, texts)))
        return self.tokenizer.encode_middle(prefix, suffix, files)

    def refuse_huge(self, num_characters: int) -> None:
        """Raises PromptTooLong for a text that can never fit."""
        if num_characters > self.max_characters:
            raise self.too_long(num_characters)

    def too_long(self, num_characters: int) -> PromptTooLong:
        """Build the error for a text that is too long to be tokenised."""
        num_tokens = num_characters // (_MARGIN * self.tokenizer.max_token_size)
        return PromptTooLong.for_answer(
            num_tokens, self.max_model_len, num_characters=num_characters
        )

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises InvalidParameter, which names `field`, for ids outside the vocabulary."""
        if not all(isinstance(token, int) for token in token_ids) or not (
            min(token_ids) >= 0 and max(token_ids) < self.vocab_size
        ):
            raise InvalidParameter(
                field, f"token ids must be whole numbers from 0 to {self.vocab_size - 1}"
            )
