"""ImagePrompts: puts a conversation's images into its prompt, or refuses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.core.errors import InvalidParameter
from mlxserve.images.image import Image
from mlxserve.images.picture import PicturePrompt, PictureReader, pictures_of, with_pictures
from mlxserve.text.conversation import UnseenMedia, images_in, without_images

Messages = Sequence[Mapping[str, Any]]


class ImagePrompts:
    """The images of prompts for one model."""

    def __init__(self, reader: PictureReader | None, no_vision_reason: str = "") -> None:
        """Handle images with a model's reader, if it has one.

        reader: None for a model that reads text only
        no_vision_reason: the reason if such a model was trained to see; empty otherwise
        """
        self.reader = reader
        self.no_vision_reason = no_vision_reason

    def split(self, messages: Messages) -> tuple[Messages, list[Image]]:
        """Separate images from messages for the template. Raises InvalidParameter."""
        images = [image for message in messages for image in images_in(message)]
        if not images:
            return messages, images
        if self.reader is None:
            raise (
                UnseenMedia("image", why=self.no_vision_reason)
                if self.no_vision_reason
                else UnseenMedia("image")
            )
        return [without_images(message) for message in messages], images

    def join(self, token_ids: list[int], images: Sequence[Image]) -> list[int]:
        """Replace the template's placeholders by the images. Raises InvalidParameter."""
        if self.reader is None or not images:
            return token_ids
        pictures = [self.reader.read(image) for image in images]
        prompt = with_pictures(token_ids, self.reader.placeholder, pictures)
        if prompt is None:
            num_places = token_ids.count(self.reader.placeholder)
            raise InvalidParameter(
                "messages",
                f"the model's chat template has places for {num_places} of {len(images)} images; leave "
                "images out of roles for which it has none, and its marker of images out of texts",
            )
        return prompt


def after_prefix(prefix: Sequence[int], prompt: Sequence[int]) -> Sequence[int]:
    return prompt.after(prefix) if isinstance(prompt, PicturePrompt) else (*prefix, *prompt)


def text_of(prompt: Sequence[int]) -> Sequence[int]:
    """The ids of text tokens, without the rows of images."""
    return [token for token in prompt if token >= 0] if pictures_of(prompt) else prompt
