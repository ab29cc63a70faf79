"""Tokenizer: text to token ids and back, chat messages to a prompt, and text as it streams.

Loads the files beside a model through mlx-lm (which adds its fixes per model family to
transformers). Safe to use from several threads; needs no mlx arrays.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mlxserve.errors import InvalidParameter, InvalidRequest, UnsupportedModel
from mlxserve.text.parsing.markup import Markup, markup_of
from mlxserve.text.template_limits import bound_chat_templates

# A folder with none of these would get a tokenizer without a single token.
_TABLES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
# What transformers takes for itself instead of passing it on to the template: with some of these
# the answer would be no list of token ids, or the template another one.
_RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
_READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ImportError,
    AttributeError,
    RecursionError,
)
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
_REPLACEMENT = "\ufffd"  # what a decoder writes where bytes are not (yet) a character


class Tokenizer:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, path: Path, eos_token_ids: Sequence[int] = ()) -> None:
        """Raises UnsupportedModel when the folder's tokenizer cannot be read."""
        self._wrapper = _load(path, eos_token_ids)
        self._fast = getattr(self._wrapper, "backend_tokenizer", None)
        # transformers sets truncation on the shared Rust object in each call; two threads at once
        # fail with "Already borrowed".
        self._lock = threading.Lock()
        self._added_tokens = frozenset(self._wrapper.get_added_vocab())
        self._texts: dict[frozenset[int] | None, dict[int, str]] = {}  # by what is shown

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self._wrapper.eos_token_ids)

    def _takes(self, word: str) -> bool:
        """Whether the chat template speaks of something. One that is code may do anything."""
        template = self._wrapper.chat_template
        if isinstance(template, dict):
            return any(word in text for text in template.values())
        return word in template if isinstance(template, str) else self.has_chat_template

    def _with_arguments(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of earlier calls as objects, unless the template says that it takes text.

        As text they are what the model wrote, so that the conversation is found in the cache.
        """
        calls = message.get("tool_calls")
        if not calls or self._takes("arguments is string"):
            return dict(message)
        return {**message, "tool_calls": [_with_object(call) for call in calls]}

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows; the model may have places for more."""
        return len(self._wrapper)

    def serialized(self) -> str | None:
        """The contents of a tokenizer.json; None for the few tokenizers that are not made so."""
        if self._fast is None:
            return None
        with self._lock:
            fast = copy(self._fast)
        fast.no_padding()
        fast.no_truncation()
        return str(fast.to_str())

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token, or more: no text has fewer tokens than it has of these.

        Tables write a byte as a character of one or two bytes, or by a name in angle brackets.
        """
        with self._lock:
            tokens = self._wrapper.get_vocab().keys()
        return max((len(token.encode("utf-8", "replace")) for token in tokens), default=1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self.has_chat_template and self._takes("tools")

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the model's own beginning token where it has one."""
        _check_text(text)
        with self._lock:
            return list(self._wrapper.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
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
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template. Raises InvalidRequest.

        A control token that somebody typed is text: only the template writes control tokens.
        """
        if not messages:
            raise InvalidRequest("messages: at least one is needed")
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template. Send a plain prompt to the completions endpoint."
            )
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: {', '.join(reserved)} cannot be set; give variables of the "
                "model's template only."
            )
        if tools and not self.knows_tools:
            raise InvalidParameter(
                "tools", "the chat template of this model knows no tools; leave them out"
            )
        for message in messages:
            if not isinstance(message, Mapping):
                raise InvalidRequest(f"messages: each must be an object, got {message!r:.80}")
            if isinstance(message.get("content"), str):
                _check_text(message["content"])
        conversation = [self._with_arguments(message) for message in messages]
        try:
            if self._types_control_tokens(messages, tools):
                template_kwargs["sanitize_control_tokens"] = True
            with self._lock:
                ids = self._wrapper.apply_chat_template(
                    conversation,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    **template_kwargs,
                )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template does not accept these messages: {_first_line(error)}"
            ) from error
        return list(ids)

    @cached_property
    def markup(self) -> Markup:
        """How the model marks its thinking and its calls of tools."""
        return markup_of(self._wrapper, self._takes)

    def stream(self, shown: frozenset[int] | None = None) -> StreamDecoder:
        """Special tokens are left out, but for those that are to be shown."""
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
        """Whether a control token stands in what people or tools said, or in what tools are.

        Without one the plain rendering is the same, and templates that look into earlier answers
        (to drop their thinking, say) see them unmarked.
        """
        said = [str(message.get("content")) for message in messages if _is_from_outside(message)]
        said.append(json.dumps(list(tools or ()), ensure_ascii=False))
        return any(token in text for text in said for token in self._added_tokens)


class StreamDecoder:
    """Text of a growing list of token ids, piece by piece, never half a character.

        ids    [ ......... | prefix .... | read ......... ]
                            ^ _prefix     ^ _read          what came since _read is decoded
                                                           together with the few ids before it

    The pieces' concatenation is the decoding of all ids. The window is what vLLM and
    text-generation-inference use; it makes the work per token constant.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], texts: dict[int, str] | None = None
    ) -> None:
        """`texts` of tokens alone, kept between streams: half of what is decoded."""
        self._decode = decode
        self._texts = {} if texts is None else texts
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._shown = ""  # text of ids[_prefix:_read]

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while a character is unfinished."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._prefix = self._read
        self._read = len(self._ids)
        self._shown = self._text_of(self._ids[self._prefix : self._read])
        return piece

    def _text_of(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) != 1:
            return self._decode(token_ids)
        [token] = token_ids
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode(token_ids)
        return text

    def finish(self) -> str:
        """What was held back: bytes that never became a character show as U+FFFD."""
        text = self._decode(self._ids[self._prefix :])[len(self._shown) :]
        self._prefix = self._read = len(self._ids)
        self._shown = ""
        return text


def _load(path: Path, eos_token_ids: Sequence[int]) -> Any:
    from mlx_lm.tokenizer_utils import load

    bound_chat_templates()
    try:
        if not any(file for pattern in _TABLES for file in path.glob(pattern)):
            raise ValueError("it has no tokens")
        return load(path, {"trust_remote_code": False}, eos_token_ids=list(eos_token_ids) or None)
    except Exception as error:
        # The Rust library raises a bare Exception for a table it cannot read.
        if type(error) is not Exception and not isinstance(error, _READ_ERRORS):
            raise
        raise UnsupportedModel(
            f"The tokenizer in {path} cannot be read: {_first_line(error)}. The folder needs a "
            "tokenizer.json (or tokenizer.model) and a tokenizer_config.json."
        ) from error


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError as error:
            raise InvalidRequest(
                f"messages: the arguments of a call of {function.get('name')!r} are no JSON: {error}"
            ) from error
    return {**call, "function": function}


def _is_from_outside(message: Mapping[str, Any]) -> bool:
    return message.get("role") != "assistant"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text holds a lone surrogate at character {error.start}, which is no Unicode text."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
