"""Prompts as token ids: what the routes that take text have in common.

Rendering and encoding are plain CPU work on texts of any length, so they are done in the client's
turn, beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from mlxserve.api.bodies.fields import Prompt, TemplateKwargs
from mlxserve.api.errors import invalid_value
from mlxserve.api.fair_work import pixel_hold, refusal, run_fairly
from mlxserve.api.warnings import FITTED, warn
from mlxserve.core.errors import InvalidParameter, InvalidRequest, QueueFull
from mlxserve.images.image import Image
from mlxserve.images.sources import ImageSources
from mlxserve.text.conversation import Conversation, SentImage, read_for
from mlxserve.text.costs import MESSAGES_PER_SECOND, encode_seconds, render_seconds
from mlxserve.text.tokenizer import check_names

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

# Messages that are read in the event loop: leaving it takes as long.
_READ_HERE = 20
_PIXELS_PER_SECOND = 10_000_000  # resized and normalised for the model
MAX_IMAGES, MAX_PIXELS = 256, 128 << 20  # of one request


class Prompts:
    """Makes prompts for one `TextModel`. Methods raise InvalidRequest and ApiError."""

    def __init__(self, chat: TextModel, images: ImageSources) -> None:
        self._chat = chat
        self._images = images

    async def of_texts(
        self,
        request: Request,
        texts: Sequence[Prompt],
        field: str = "prompt",
        *,
        is_cut: bool = False,
    ) -> list[list[int]]:
        """Texts, or lists of token ids, which stay as they are.

        field: for errors
        is_cut: of a text that can never fit, the beginning is encoded, instead of being refused
        """
        if is_cut:
            most = self._chat.codec.most_characters
            texts = [text[:most] for text in texts]
        seconds = encode_seconds(sum(len(text) for text in texts if isinstance(text, str)))
        return await run_fairly(
            request, seconds, lambda: [self._encoded(text, field) for text in texts]
        )

    async def of_conversation(
        self,
        request: Request,
        read: Callable[[bool], Conversation],
        num_messages: int,
        template_kwargs: TemplateKwargs,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """A conversation in the model's template. The reply warns of what was changed for that.

        read: makes the conversation from about `num_messages` of the body, with images or without
        continues: the answer continues the last message
        """
        check_names(template_kwargs)
        variables: dict[str, Any] = {**template_kwargs}
        if continues:
            add_generation_prompt = False
            variables["continue_final_message"] = True

        writer = self._chat.require_writer()
        sees, no_vision_reason = writer.supports_images, writer.no_vision_reason
        made = partial(read_for, read, sees=sees, no_vision_reason=no_vision_reason)
        if num_messages <= _READ_HERE:
            conversation = made()
        else:
            conversation = await run_fairly(request, num_messages / MESSAGES_PER_SECOND, made)
        conversation = await self._with_images(request, conversation)

        def render() -> tuple[list[int], list[str]]:
            fitted = writer.fit(conversation)
            changes = list(fitted.changes)
            ids = writer.render(
                fitted.messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                on_change=changes.append,
                **variables,
            )
            return ids, changes

        seconds = render_seconds([message.text for message in conversation.messages], tools)
        seconds += conversation.num_pixels / _PIXELS_PER_SECOND
        token_ids, changes = await run_fairly(request, seconds, render)
        if left_out := conversation.left_out:
            warn(request, f"left out: {', '.join(left_out)}")
        if changes:
            warn(request, f"{FITTED}: {', '.join(changes)}")
        return token_ids

    async def _with_images(self, request: Request, conversation: Conversation) -> Conversation:
        """With the images that were sent, each fetched and decoded once."""
        sent = conversation.sent_images
        if len(sent) > MAX_IMAGES:
            raise InvalidParameter(
                sent[MAX_IMAGES].where, f"at most {MAX_IMAGES} images are allowed, got {len(sent)}"
            )
        hold = pixel_hold(request)
        found: dict[str | None, Image] = {}
        num_pixels = 0
        for one in sent:
            if one.source in found:
                continue
            image = await self._image(request, one)
            num_pixels += image.width * image.height
            if num_pixels > MAX_PIXELS:
                raise InvalidParameter(
                    one.where,
                    f"the images have more than {MAX_PIXELS >> 20} million pixels together; send fewer, "
                    "or smaller ones",
                )
            try:
                hold.grow_to(3 * num_pixels)
            except QueueFull as error:
                raise refusal(error) from error
            found[one.source] = image
        return conversation.with_images({one: found[one.source] for one in sent})

    async def _image(self, request: Request, sent: SentImage) -> Image:
        try:
            return await self._images.image(sent.source, partial(run_fairly, request))
        except InvalidRequest as error:
            raise InvalidParameter(sent.where, f"the image {error}") from error

    def _encoded(self, prompt: Prompt, field: str) -> list[int]:
        token_ids = self._chat.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise invalid_value(field, "is empty")
        return token_ids
