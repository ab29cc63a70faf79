"""Prompts as token ids: rendering and encoding for all routes that take text.

Both are plain CPU work on texts of any length, so they run in the client's turn, beside the event
loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.requests import Request

from mlxserve.api.access.security import client_name, key_id
from mlxserve.api.bodies.fields import Prompt
from mlxserve.api.bodies.prompt_source import PromptSource
from mlxserve.api.errors import invalid_value
from mlxserve.api.fair_work import body_hold, pixel_hold, refusal, run_fairly
from mlxserve.api.warnings import FITTED, warn
from mlxserve.chat.document_prompts import DocumentPrompts, MeasuredDocuments
from mlxserve.chat.part_scores import PartScores
from mlxserve.core.errors import InvalidParameter, InvalidRequest, QueueFull
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.work import MaybeWork, RunsIn, Work
from mlxserve.images.image import Image
from mlxserve.images.sources import ImageSources
from mlxserve.text.conversation import Conversation, SentImage, read_for
from mlxserve.text.costs import MESSAGES_PER_SECOND, encode_seconds, render_seconds
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.reading import read_documents
from mlxserve.text.documents.scan import with_scans
from mlxserve.text.documents.sent import SentDocument
from mlxserve.text.fill_in_middle import OtherFile
from mlxserve.text.tokenizer import without_reserved

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.chat.writer import Writer

_PIXELS_PER_SECOND = 10_000_000  # resized and normalised for the model
MAX_IMAGES, MAX_PIXELS = 256, 128 << 20  # of one request
MAX_DOCUMENTS = 64  # of one request
_COMPARED_PER_SECOND = 5_000_000  # characters of documents whose words are compared
# In the scope of a request: returns the loaded embedding model that it may use, or None.
EMBEDDER = "mlxserve.embedder"


def _no_model(_: Request) -> None:
    return None


@dataclass(frozen=True, slots=True)
class WithoutFiles:
    """A conversation whose images and documents have yet to be read."""

    source: PromptSource
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """Prompts for the text between a prefix and a suffix, and how it is sampled."""

    params: SamplingParams
    prompts: list[list[int]]


Begun: TypeAlias = list[int] | WithoutFiles  # a prompt, or what lacks only its files


class Prompts:
    """Makes prompts for one `TextModel`. Methods raise InvalidRequest and ApiError.

    The results of `begin` and `encoding` are work for the client's turn: a route runs it in the job
    that reads the body, and then awaits `finish`.
    """

    def __init__(self, model: TextModel, images: ImageSources) -> None:
        self._model = model
        self._images = images
        self._documents = DocumentPrompts(model.codec)
        self._part_scores = PartScores()

    async def encode(
        self,
        request: Request,
        texts: Sequence[Prompt],
        field: str = "prompt",
        *,
        is_cut: bool = False,
    ) -> list[list[int]]:
        """Encode texts in the client's turn, as `encoding` describes.

        is_cut: encode the beginning of a text that can never fit, instead of refusing it
        """
        if is_cut:
            max_characters = self._model.codec.max_characters
            texts = [text[:max_characters] for text in texts]
        encoding = self.encoding(texts, field)
        return await run_fairly(request, encoding)

    def encoding(self, texts: Sequence[Prompt], field: str = "prompt") -> Work[list[list[int]]]:
        """Work that encodes texts; lists of token ids pass unchanged.

        field: the name of the field in errors
        """
        seconds = encode_seconds(sum(len(text) for text in texts if isinstance(text, str)))
        return Work(seconds, lambda: [self._encoded(text, field) for text in texts])

    def infilling(
        self,
        prefixes: Sequence[Prompt],
        suffix: str,
        params: SamplingParams,
        *,
        field: str = "suffix",
        files: Sequence[OtherFile] = (),
    ) -> Work[InfillPrompt]:
        """Work that encodes prompts for the text before a suffix, in the model's own tokens.

        field: the name of the suffix in errors

        Raises ApiError 400 for a model without such tokens, and for prefixes that are no texts.
        """
        codec = self._model.codec
        if (ends := codec.middle_ends) is None:
            raise invalid_value(
                field,
                "this model's tokenizer has no tokens to fill in the middle; leave it out, or name a "
                "model for code, such as Qwen2.5-Coder",
            )
        texts = [prefix for prefix in prefixes if isinstance(prefix, str)]
        if len(texts) < len(prefixes):
            raise invalid_value(field, "the prompt before it must be a text")
        size = sum(map(len, texts)) + len(texts) * len(suffix) + sum(len(f.text) for f in files)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        return Work(
            encode_seconds(size),
            lambda: InfillPrompt(
                params, [codec.encode_middle(text, suffix, files) for text in texts]
            ),
        )

    async def render(self, request: Request, source: PromptSource) -> list[int]:
        """Render a conversation. The reply warns of changes made to fit the model's template."""
        begun = self.begin(request, source)
        return await self.finish(request, await run_fairly(request, begun))

    def begin(self, request: Request, source: PromptSource) -> Work[Begun]:
        """Work that reads a conversation and, unless it has images or documents, renders it."""
        seconds = source.num_messages / MESSAGES_PER_SECOND
        return Work(seconds, partial(self._read, request, source))

    async def finish(self, request: Request, begun: Begun) -> list[int]:
        """Return the prompt, after reading images and documents if there are any."""
        if not isinstance(begun, WithoutFiles):
            return begun
        conversation, documents = await self._with_scans(request, begun.conversation)
        conversation = await self._with_images(request, conversation)
        conversation = await self._with_documents(request, conversation, documents, begun.source)
        left = self._render(request, self._model.require_writer(), begun.source, conversation)
        token_ids: list[int] = await run_fairly(request, left)
        return token_ids

    def _read(self, request: Request, source: PromptSource) -> MaybeWork[Begun]:
        writer = self._model.require_writer()
        conversation = read_for(
            source.read, sees=writer.supports_images, no_vision_reason=writer.no_vision_reason
        )
        if conversation.sent_images or conversation.sent_documents:
            return WithoutFiles(source, conversation)
        work: MaybeWork[Begun] = self._render(request, writer, source, conversation)
        return work

    @staticmethod
    def _render(
        request: Request, writer: Writer, source: PromptSource, conversation: Conversation
    ) -> Work[Any]:
        variables = source.variables
        reserved: list[str] = []
        if variables:
            variables, reserved = without_reserved(variables)
        texts = [message.text for message in conversation.messages]
        seconds = render_seconds(texts, source.tools, variables)
        seconds += conversation.num_pixels / _PIXELS_PER_SECOND

        def render() -> list[int]:
            fitted = writer.fit(conversation)
            changes = list(fitted.changes)
            token_ids: list[int] = writer.render(
                fitted.messages,
                tools=source.tools,
                add_generation_prompt=source.add_generation_prompt and not source.continues,
                on_change=changes.append,
                **variables,
            )
            if reserved:
                warn(request, f"chat_template_kwargs: {', '.join(reserved)} cannot be set")
            if left_out := conversation.left_out:
                warn(request, f"left out: {', '.join(left_out)}")
            if changes:
                warn(request, f"{FITTED}: {', '.join(changes)}")
            return token_ids

        return Work(seconds, render, place=RunsIn.PROCESS)

    async def _with_images(self, request: Request, conversation: Conversation) -> Conversation:
        """Fetch and decode each image once."""
        sent = conversation.sent_images
        if len(sent) > MAX_IMAGES:
            raise InvalidParameter(
                sent[MAX_IMAGES].where, f"at most {MAX_IMAGES} images are allowed, got {len(sent)}"
            )
        hold = pixel_hold(request)
        decoded: dict[str | None, Image] = {}
        num_pixels = 0
        for image_part in sent:
            if image_part.source in decoded:
                continue
            image = await self._image(request, image_part)
            num_pixels += image.width * image.height
            if num_pixels > MAX_PIXELS:
                raise InvalidParameter(
                    image_part.where,
                    f"the images have more than {MAX_PIXELS >> 20} million pixels together; send fewer, "
                    "or smaller ones",
                )
            try:
                hold.grow_to(3 * num_pixels)
            except QueueFull as error:
                raise refusal(error) from error
            decoded[image_part.source] = image
        return conversation.with_images(
            {image_part: decoded[image_part.source] for image_part in sent}
        )

    async def _with_scans(
        self, request: Request, conversation: Conversation
    ) -> tuple[Conversation, Mapping[SentDocument, Document]]:
        """Read each document once. Those without text become images of their pages."""
        sent = conversation.sent_documents
        if len(sent) > MAX_DOCUMENTS:
            raise InvalidParameter(
                sent[MAX_DOCUMENTS].where,
                f"at most {MAX_DOCUMENTS} documents are allowed, got {len(sent)}",
            )
        if not sent:
            return conversation, {}
        read = await read_documents(
            dict.fromkeys(sent),
            partial(run_fairly, request),
            key_id(request),
            sees=self._model.require_writer().supports_images,
        )
        warn(request, *read.notes)
        return with_scans(conversation, read.scans), read.documents

    async def _with_documents(
        self,
        request: Request,
        conversation: Conversation,
        documents: Mapping[SentDocument, Document],
        source: PromptSource,
    ) -> Conversation:
        """Insert the documents' texts. The reply warns of those that do not fit the context."""
        if not documents:
            return conversation
        size = sum(len(document.text) for document in documents.values())
        measure = partial(self._documents.measure, conversation, documents, source.tools)
        measuring: Work[MeasuredDocuments] = Work(encode_seconds(size), measure, RunsIn.PROCESS)
        measured = await run_fairly(request, measuring)
        scores = None if measured.fits else await self._scores(request, measured)
        inserting: Work[tuple[Conversation, list[str]]] = Work(
            size / _COMPARED_PER_SECOND, partial(self._documents.insert, measured, scores)
        )
        whole, notes = await run_fairly(request, inserting)
        warn(request, *notes)
        return whole

    async def _scores(self, request: Request, measured: MeasuredDocuments) -> list[float] | None:
        """Compare the parts of documents with the question; None without an embedding model."""
        model: TextModel | None = request.scope.get(EMBEDDER, _no_model)(request)
        if model is None:
            return None
        return await self._part_scores.compare(
            model,
            measured.parts,
            measured.question,
            partial(run_fairly, request),
            owner=key_id(request),
            client=client_name(request),
        )

    async def _image(self, request: Request, sent: SentImage) -> Image:
        file_hold = body_hold(request)
        try:
            turn = partial(run_fairly, request)
            return await self._images.image(
                sent.source, turn, key_id(request), take=file_hold.grow_to
            )
        except InvalidRequest as error:
            raise InvalidParameter(sent.where, f"the image {error}") from error
        finally:
            file_hold.close()

    def _encoded(self, prompt: Prompt, field: str) -> list[int]:
        token_ids = self._model.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise invalid_value(field, "is empty")
        return token_ids
