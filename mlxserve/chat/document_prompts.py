"""DocumentPrompts: as much of a conversation's documents as its model has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxserve.text.conversation import USER, Conversation
from mlxserve.text.costs import text_size
from mlxserve.text.documents.choice import chosen_parts
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.placement import Excerpt, whole, with_documents
from mlxserve.text.documents.sent import SentDocument

if TYPE_CHECKING:
    from mlxserve.chat.codec import TextCodec

# Of the context, for documents that do not fit: the first that leaves room for the rest. They are few, so
# that a chat that grows does not have other parts chosen, and all of them computed again, with each turn.
_SHARES = (0.75, 0.6, 0.45, 0.3, 0.15)
_ANSWER_SHARE, _MAX_ANSWER = 0.125, 1_024  # of the context, and tokens, for the answer
_MESSAGE_TOKENS = 32  # of a template around each message, and of marks around each document
_PART_TOKENS = 8  # of a mark before each part
_CHARACTERS_PER_TOKEN = 3  # in definitions of tools


@dataclass(frozen=True, slots=True)
class MeasuredDocuments:
    """The documents of a conversation, and the tokens that there are for them.

    sizes: tokens of each part of each document
    room: tokens that the rest of the conversation and its answer leave
    """

    conversation: Conversation
    documents: Mapping[SentDocument, Document]
    sizes: Mapping[Document, Sequence[int]]
    room: int

    @property
    def fits(self) -> bool:
        return sum(map(sum, self.sizes.values())) <= self.room

    @property
    def parts(self) -> list[str]:
        """All parts of all documents, in order."""
        return [part for document in self.sizes for part in document.parts]

    @property
    def question(self) -> str:
        messages = self.conversation.messages
        return "\n".join(message.text for message in messages if message.role == USER)


@dataclass(frozen=True, slots=True)
class DocumentPrompts:
    """Puts documents into the conversations of one model."""

    codec: TextCodec

    def measure(
        self,
        conversation: Conversation,
        documents: Mapping[SentDocument, Document],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> MeasuredDocuments:
        """Measure the documents of a conversation. Linear in the size of its texts."""
        different = dict.fromkeys(documents.values())
        sizes = {each: self._sizes(each) for each in different}
        return MeasuredDocuments(conversation, documents, sizes, self._room(conversation, tools))

    def insert(
        self, measured: MeasuredDocuments, scores: Sequence[float] | None = None
    ) -> tuple[Conversation, list[str]]:
        """Return the conversation with its documents' texts, and a sentence for each that was cut.

        scores: how well each of `measured.parts` matches the question; None to compare words
        """
        if measured.fits:
            excerpts = {each: whole(each) for each in measured.sizes}
        else:
            budget = self._budget(measured.room)
            excerpts = _chosen(measured.sizes, measured.question, budget, scores)
        read = {sent: excerpts[document] for sent, document in measured.documents.items()}
        notes = [excerpt.note for excerpt in excerpts.values() if not excerpt.is_whole]
        return with_documents(measured.conversation, read), notes

    def _sizes(self, document: Document) -> list[int]:
        """Tokens of each part."""
        return [_PART_TOKENS + self._count(part) for part in document.parts]

    def _count(self, text: str) -> int:
        if len(text) > self.codec.max_characters:
            # Encoding it would take seconds, and be refused.
            return self.codec.max_model_len
        return len(self.codec.encode(text)) if text else 0

    def _room(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Tokens that the rest of the conversation and its answer leave."""
        limit = self.codec.max_model_len
        messages = conversation.messages
        rest = sum(_MESSAGE_TOKENS + self._count(message.text) for message in messages)
        rest += sum(_MESSAGE_TOKENS for message in messages for _ in message.documents)
        rest += _MESSAGE_TOKENS + text_size(tools or ()) // _CHARACTERS_PER_TOKEN
        return limit - rest - min(_MAX_ANSWER, int(_ANSWER_SHARE * limit))

    def _budget(self, room: int) -> int:
        limit = self.codec.max_model_len
        return next((int(each * limit) for each in _SHARES if each * limit <= room), max(0, room))


def _chosen(
    sizes: Mapping[Document, Sequence[int]],
    question: str,
    budget: int,
    scores: Sequence[float] | None,
) -> dict[Document, Excerpt]:
    """Choose from all documents together, as one would from the pages of a book."""
    pages = [(document, at) for document in sizes for at in range(len(document.parts))]
    shown = chosen_parts(
        [document.parts[at] for document, at in pages],
        [sizes[document][at] for document, at in pages],
        question,
        budget,
        first={n for n, (document, at) in enumerate(pages) if document.is_folder and at == 0},
        scores=scores,
    )
    return {
        document: Excerpt(document, tuple(pages[n][1] for n in shown if pages[n][0] == document))
        for document in sizes
    }
