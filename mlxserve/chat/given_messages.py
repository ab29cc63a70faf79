"""Reads the library's messages as a conversation: their documents, and images if the model sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlxserve.chat.document_prompts import DocumentPrompts, MeasuredDocuments
from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.helpers.work import RunFairly, RunsIn, Work
from mlxserve.images.given import decoded
from mlxserve.images.image import Image
from mlxserve.images.sources import ImageSources
from mlxserve.text.conversation import Conversation, SentImage, read_for, read_messages
from mlxserve.text.costs import encode_seconds
from mlxserve.text.documents.reading import read_documents
from mlxserve.text.documents.scan import with_scans

logger = logging.getLogger(__name__)


async def read_given(
    messages: Sequence[Mapping[str, Any]],
    run_fairly: RunFairly,
    *,
    documents: DocumentPrompts,
    sees: bool,
    no_vision_reason: str = "",
    on_cut: Callable[[str], None] = logger.warning,
) -> Conversation:
    """Read messages, as `read_for` does, and their documents.

    on_cut: called with a sentence about each document that does not fit

    Raises InvalidRequest, and the errors of `ImageDecoder.decode` and `DocumentReader.read`.
    """
    if sees:
        conversation = read_messages(await decoded(messages, run_fairly), sees=True)
    else:
        conversation = read_for(
            lambda _: read_messages(messages), sees=False, no_vision_reason=no_vision_reason
        )
    sent = dict.fromkeys(conversation.sent_documents)
    read = await read_documents(sent, run_fairly, sees=sees)
    conversation = await _with_images(with_scans(conversation, read.scans), run_fairly)
    for note in read.notes:
        on_cut(note)
    if not read.documents:
        return conversation
    size = sum(len(document.text) for document in read.documents.values())
    measure = partial(documents.measure, conversation, read.documents)
    measuring: Work[MeasuredDocuments] = Work(encode_seconds(size), measure, RunsIn.PROCESS)
    whole, notes = documents.insert(await run_fairly(measuring))
    for note in notes:
        on_cut(note)
    return whole


async def _with_images(conversation: Conversation, run_fairly: RunFairly) -> Conversation:
    sources, images = ImageSources(), dict[SentImage, Image]()
    for sent in conversation.sent_images:
        try:
            images[sent] = await sources.image(sent.source, run_fairly)
        except InvalidRequest as error:
            raise InvalidParameter(sent.where, f"the image {error}") from error
    return conversation.with_images(images)
