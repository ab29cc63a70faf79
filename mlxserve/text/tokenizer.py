"""Tokenizer: text to token ids and back, chat messages to a prompt, and streaming decoding.

Thread-safe; uses no mlx arrays. Templates are rendered in a helper process, and large
texts are encoded in another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.helpers.fair_executor import Lane, lane_of
from mlxserve.system.well_formed import well_formed, well_formed_value
from mlxserve.text.chat_template import ChatTemplate
from mlxserve.text.controls import Attempt, with_word
from mlxserve.text.conversation import completed_tool
from mlxserve.text.costs import encode_seconds, render_seconds
from mlxserve.text.fill_in_middle import FillInMiddle, OtherFile
from mlxserve.text.large_texts import LargeTexts
from mlxserve.text.parsing.markup import Markup, markup_of
from mlxserve.text.probing import RESERVED
from mlxserve.text.stream_decoder import StreamDecoder
from mlxserve.text.template_compat import single_typed_tool
from mlxserve.text.templates import (
    TextRenderer,
    at_most,
    check_length,
    helper_renderer,
    released_while_rendering,
    render_with,
)
from mlxserve.text.tokenizer_files import load_tokenizer
from mlxserve.text.tool_prompt import show_tools

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # a warning of transformers


class Tokenizer:
    """The tokenizer and chat template of one model folder."""

    def __init__(
        self,
        path: Path,
        eos_token_ids: Sequence[int] = (),
        *,
        renderer: TextRenderer | None = None,
    ) -> None:
        """Read a folder's tokenizer. Raises UnsupportedModel if it cannot be read.

        renderer: renders the chat templates of all tokenizers of this process; None creates a
            helper
        """
        self._wrapper = load_tokenizer(path, eos_token_ids)
        show_tools(self._wrapper)
        # transformers warns once of a text longer than the model's context; those are refused in our words.
        self._wrapper.deprecation_warnings[_TOO_LONG] = True
        renderer = renderer or helper_renderer()
        render_with(renderer)
        self.template = ChatTemplate(self._wrapper, renderer, lambda: self.markup)
        # One for each lane of the executor, so that no text waits for a much longer one.
        self._large: dict[Lane, LargeTexts] = {
            lane: LargeTexts(path, eos_token_ids) for lane in (Lane.MEDIUM, Lane.LONG)
        }
        self._fast = getattr(self._wrapper, "backend_tokenizer", None)
        # Every transformers call sets truncation on the shared Rust object; two concurrent calls
        # fail with "Already borrowed".
        self._lock = threading.Lock()
        self._added_tokens = frozenset(self._wrapper.get_added_vocab())
        self._texts: dict[frozenset[int] | None, dict[int, str]] = {}  # per set of shown tokens

    def close(self) -> None:
        """End the helper processes of large texts, if any were needed."""
        for texts in self._large.values():
            texts.close()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self._wrapper.eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary. The model's embedding may be larger."""
        return len(self._wrapper)

    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens by their names."""
        with self._lock:
            return dict(self._wrapper.get_vocab())

    def serialized(self) -> str | None:
        """The contents of a tokenizer.json; None for the few tokenizers without a Rust backend."""
        if self._fast is None:
            return None
        with self._lock:
            fast = copy(self._fast)
        fast.no_padding()
        fast.no_truncation()
        return str(fast.to_str())

    @cached_property
    def max_token_size(self) -> int:
        """Upper bound for the bytes of one token: n bytes of text take at least n / this tokens.

        An upper bound because vocabularies write a byte as a character of one or two bytes, or as
        a name in angle brackets.
        """
        with self._lock:
            tokens = self._wrapper.get_vocab().keys()
        return max((len(token.encode("utf-8", "replace")) for token in tokens), default=1)

    def encode(self, text: str) -> list[int]:
        """Encode plain text, beginning with the BOS token if the model has one.

        A lone surrogate is U+FFFD, here and in everything that is rendered.
        """
        text = well_formed(text)
        texts = self._large.get(lane_of(encode_seconds(len(text))))
        return self.encode_here(text) if texts is None else texts.encode(text)

    def encode_here(self, text: str) -> list[int]:
        """Encode plain text of any size in this process."""
        with self._lock:
            return list(self._wrapper.encode(text))

    def encode_plain(self, text: str, *, as_text: bool = False) -> list[int]:
        """Encode text in this process, without the special tokens around it.

        as_text: encode special tokens in the text as ordinary characters
        """
        text = well_formed(text)
        with self._lock:
            return list(
                self._wrapper.encode(text, add_special_tokens=False, split_special_tokens=as_text)
            )

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name; None if the vocabulary lacks it."""
        with self._lock:
            token_id = self._wrapper.convert_tokens_to_ids(token)
            known = token_id is not None and self._wrapper.convert_ids_to_tokens(token_id) == token
        return int(token_id) if known else None

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """How the model fills in the middle of a text; None if it has no tokens for that."""
        return FillInMiddle.find(self.token_id)

    def encode_middle(self, prefix: str, suffix: str, files: Sequence[OtherFile] = ()) -> list[int]:
        """Encode a prompt for the text between two others, for a model that fills in the middle."""
        assert self.fill_in_middle is not None
        encode = partial(self.encode_plain, as_text=True)
        first = [token for token in self.encode_here("") if token == self._wrapper.bos_token_id]
        return [*first, *self.fill_in_middle.encode(prefix, suffix, encode, files)]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int], list[int]]:
        """Encode two texts as one.

        Returns (token ids, 0 or 1 for each as the model distinguishes the texts, positions of the
        second one's tokens without the special tokens around it). Raises InvalidRequest.
        """
        with self._lock:
            if self._fast is None:
                raise InvalidRequest("This model's tokenizer does not take pairs of texts.")
            encoding = self._fast.encode(well_formed(first), well_formed(second))
        seconds = [number for number, text in enumerate(encoding.sequence_ids) if text == 1]
        return list(encoding.ids), list(encoding.type_ids), seconds

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, without special tokens."""
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=True))
        with self._lock:
            return str(self._wrapper.decode(list(token_ids), skip_special_tokens=True))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_characters: int | None = None,
        on_change: Callable[[str], None] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render a conversation in the model's chat template.

        Control tokens typed in a message are encoded as text: only the template emits them.

        max_characters: of the rendered text; a longer one is not encoded
        on_change: called with each change of the variables that the template requires

        Raises InvalidRequest, and RenderedTooLong.
        """
        self._check_rendering(messages, tools, template_kwargs)
        unread: Sequence[str] = ()
        if template_kwargs:
            template_kwargs, unread = self.template.usable(template_kwargs)
        conversation = [well_formed_value(dict(message)) for message in messages]
        tools = [well_formed_value(completed_tool(tool)) for tool in tools or ()]
        if tools and not self.template.caps.loose_types:
            tools = [single_typed_tool(tool) for tool in tools]
        template_kwargs = well_formed_value(template_kwargs)
        texts = self._large.get(lane_of(render_seconds(conversation, tools, template_kwargs)))
        render = self.render_here if texts is None else texts.render

        def rendered(attempt: Attempt) -> list[int]:
            every = {**attempt.variables, "add_generation_prompt": add_generation_prompt}
            said = with_word(conversation, attempt.word) if attempt.word else conversation
            return render(said, tools or self.template.no_tools, every, max_characters)

        token_ids, changes = self.template.first_accepted(template_kwargs, rendered)
        changes = (*unread, *changes)
        if changes:
            self.template.log_changes(changes)
        if on_change is not None:
            for change in changes:
                on_change(change)
        return token_ids

    def _check_rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        """Raises InvalidRequest for inputs that no template can render."""
        if not messages:
            raise InvalidRequest("messages: at least one is needed")
        if not self.template.exists:
            raise InvalidRequest(
                "This model has no chat template. Send a plain prompt instead (/v1/completions, or "
                "LLM.generate)."
            )
        if template_kwargs:
            check_names(template_kwargs)
        if tools and not self.template.supports_tools:
            raise InvalidParameter(
                "tools", "the chat template of this model does not support tools; remove them"
            )
        for message in messages:
            if not isinstance(message, Mapping):
                raise InvalidRequest(f"messages: each must be an object, got {message!r:.80}")

    def render_here(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        max_characters: int | None,
    ) -> list[int]:
        """Render in this process, for texts of any size. Raises TEMPLATE_ERRORS.

        variables: of the template, including `add_generation_prompt`
        """
        apply = partial(self._wrapper.apply_chat_template, list(messages), tools=tools)
        with at_most(max_characters):
            if self._types_control_tokens(messages, tools):
                with self._lock, released_while_rendering(self._lock):
                    return list(apply(sanitize_control_tokens=True, **variables))
            text = check_length(apply(tokenize=False, **variables))
        with self._lock:
            return list(self._wrapper.encode(text, add_special_tokens=False))

    @cached_property
    def markup(self) -> Markup:
        """How the model marks its thinking and its tool calls."""
        return markup_of(self._wrapper, self.template.call_format.row)

    def stream(self, shown: frozenset[int] | None = None) -> StreamDecoder:
        """Return a streaming decoder. It omits special tokens except those in `shown`."""
        texts = self._texts.setdefault(shown, {})
        if shown is None:
            return StreamDecoder(self.decode, texts)
        hidden = self._special - shown
        return StreamDecoder(lambda token_ids: self._decode_without(hidden, token_ids), texts)

    def _decode_without(self, hidden: frozenset[int], token_ids: Sequence[int]) -> str:
        shown = [token for token in token_ids if token not in hidden]
        if self._fast is not None:
            return str(self._fast.decode(shown, skip_special_tokens=False))
        with self._lock:
            return str(self._wrapper.decode(shown, skip_special_tokens=False))

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._wrapper.added_tokens_decoder.items()
        special = frozenset(token_id for token_id, token in added if token.special)
        return special | frozenset(self._wrapper.all_special_ids)

    def _types_control_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> bool:
        """True if user or tool messages, or tool definitions, contain a control token.

        If none does, rendering without sanitising gives the same tokens, and templates that inspect
        earlier answers (to drop their thinking, for example) see them unchanged.
        """
        outside = [message for message in messages if _is_from_outside(message)]
        texts = [text for message in outside for text in _texts_in(message)]
        texts.append(json.dumps(list(tools or ()), ensure_ascii=False))
        return any(token in text for text in texts for token in self._added_tokens)


# `render` receives its own arguments and the variables as keywords.
_NO_VARIABLES = RESERVED | signature(Tokenizer.render).parameters.keys()


def without_reserved(variables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The variables without the names that no template variable can have, and these names."""
    reserved = sorted(_NO_VARIABLES & variables.keys())
    return {n: value for n, value in variables.items() if n not in _NO_VARIABLES}, reserved


def check_names(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for names that no template variable can have."""
    if reserved := sorted(_NO_VARIABLES & variables.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs: {', '.join(reserved)} cannot be set. Only variables of the "
            "model's chat template are allowed."
        )


def _is_from_outside(message: Mapping[str, Any]) -> bool:
    return message.get("role") != "assistant"


def _texts_in(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content, which is a text or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]
