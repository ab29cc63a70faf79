"""The prompt of a language model that was trained as a reranker: Qwen3-Reranker's.

The model reads an instruction, a query and a document, and its next word is "yes" or "no".
"""

from __future__ import annotations

from mlxserve.core.errors import InvalidRequest, UnsupportedModel
from mlxserve.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def answers_of(tokenizer: Tokenizer, name: str) -> tuple[int, int]:
    """Return the tokens "no" and "yes". Raises UnsupportedModel."""
    no, yes = tokenizer.encode_plain("no"), tokenizer.encode_plain("yes")
    if len(no) != 1 or len(yes) != 1:
        raise UnsupportedModel(
            f'{name}: its tokenizer writes "yes" and "no" with several tokens, so it cannot be asked to judge.'
        )
    return no[0], yes[0]


class Judging:
    """Builds prompts with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode_plain(_BEFORE)
        self._after = tokenizer.encode_plain(_AFTER)

    def prompt(
        self, query: str, document: str, instruction: str | None, max_len: int
    ) -> tuple[list[int], bool]:
        """Return a prompt of at most `max_len` tokens, and True if the document was cut for it.

        Special tokens in the inputs are encoded as text. Raises InvalidRequest if the query leaves
        no room for a document.
        """
        question = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
        token_ids = self._tokenizer.encode_plain(question + document, as_text=True)
        room = max_len - len(self._before) - len(self._after)
        if (
            len(token_ids) > room
            and len(self._tokenizer.encode_plain(question, as_text=True)) >= room
        ):
            raise InvalidRequest(
                f"query: it has more tokens than the {max_len} of this model's context, beside which no document "
                "fits"
            )
        return [*self._before, *token_ids[: max(room, 0)], *self._after], len(token_ids) > room
