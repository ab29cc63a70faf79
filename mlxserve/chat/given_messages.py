"""Reads the library's messages as a conversation, decoding their images if the model sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.helpers.work import RunFairly
from mlxserve.images.given import decoded
from mlxserve.images.image import Image
from mlxserve.images.sources import ImageSources
from mlxserve.text.conversation import Conversation, SentImage, read_for, read_messages


async def read_given(
    messages: Sequence[Mapping[str, Any]],
    run_fairly: RunFairly,
    *,
    sees: bool,
    no_vision_reason: str = "",
) -> Conversation:
    """Read messages, as `read_for` does.

    Raises InvalidRequest, and the errors of `ImageDecoder.decode`.
    """
    if not sees:
        return read_for(
            lambda _: read_messages(messages), sees=False, no_vision_reason=no_vision_reason
        )
    conversation = read_messages(await decoded(messages, run_fairly), sees=True)
    sources, images = ImageSources(), dict[SentImage, Image]()
    for sent in conversation.sent_images:
        try:
            images[sent] = await sources.image(sent.source, run_fairly)
        except InvalidRequest as error:
            raise InvalidParameter(sent.where, f"the image {error}") from error
    return conversation.with_images(images)
