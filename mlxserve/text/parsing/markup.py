"""How a model marks its thinking and its tool calls: rows of `formats`, in its tokenizer's tokens.

part     TEXT      THINKING         CALL              HEADER
edge       <think> ──▶ </think> ──▶ ...               between messages, never shown
           <tool_call> ───────────▶ (its reader finds the end)

`places` has the table of edges: which marker means something where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from mlxserve.text.parsing.formats import THINKING, CallFormat


class Part(Enum):
    """The parts of an answer's text."""

    TEXT = auto()
    THINKING = auto()
    CALL = auto()
    HEADER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """The markup of one model.

    format: of the calls; None if it is not known
    thinking: the markers around it; None if the model has none
    first: the part an answer starts in
    think_start, think_end: the thinking markers as token ids; empty if the model does not think
    think_ends: tokens that are the last of `think_end` merged with white space, of a vocabulary in
        which the marker is plain text
    blanks, quotes: tokens of white space, and those that end in a quote
    is_taught: the chat template mentions thinking; some vocabularies have unused markers
    text_start: in Lark, what precedes an answer's text; empty if nothing does
    call_start: the marker that opens a call, as token ids
    call_tail: the text of its last token, if the tokenizer may merge it with what follows
    token_ids: token ids of the markers, and of parts of markers, that are single tokens
    tokens: special tokens of the markup, which the parser has to see as text
    call_tokens: the subset of `tokens` that occurs only in calls
    """

    format: CallFormat | None = None
    thinking: tuple[str, str] | None = None
    first: Part = Part.TEXT
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    think_ends: frozenset[int] = frozenset()
    blanks: frozenset[int] = frozenset()
    quotes: frozenset[int] = frozenset()
    is_taught: bool = False
    text_start: str = ""
    call_start: tuple[int, ...] = ()
    call_tail: str = ""
    token_ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    tokens: frozenset[int] = frozenset()
    call_tokens: frozenset[int] = frozenset()

    @property
    def can_call(self) -> bool:
        return self.format is not None

    @property
    def can_think(self) -> bool:
        return bool(self.think_end)

    def opens_thinking(self, token_ids: Sequence[int], text_of: Callable[..., str]) -> bool:
        """True if a prompt ends inside thinking, because the template wrote the opening marker."""
        length = len(self.think_start)
        if not length or self.thinking is None:
            return False
        tail = token_ids[-(length + _MAX_BLANKS) :]
        for at in range(len(tail) - length, -1, -1):
            if tuple(tail[at : at + length]) == self.think_start:
                after = tail[at + length :]
                return self.tokens.isdisjoint(after) and not text_of(after).strip()
        # Plain text, whose last token may be merged with the white space after it.
        if not self.tokens.isdisjoint(tail):
            return False
        return text_of(tail).rstrip().endswith(self.thinking[0].strip())


# Most tokens of white space that a template writes after the opening marker.
_MAX_BLANKS = 4
_WRITTEN_BLANKS = " \t\r\n\u0120\u010a\u010d\u0109\u2581"  # also as vocabularies write them
_QUOTES = ("`", "'", '"')
_BLANK_BYTES = ("<0x09>", "<0x0A>", "<0x0D>")
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\n]+\]")


def markup_of(wrapper: Any, row: CallFormat | None) -> Markup:
    """Return the markup of the model whose tokenizer mlx-lm has wrapped, and whose calls are in `row`."""
    template, vocabulary = template_text(wrapper), wrapper.get_vocab()
    if row is not None and row.channels and not _knows(vocabulary, row.channels.messages):
        row = replace(row, channels=None)
    has_channels = row is not None and row.channels is not None
    thinking = None if has_channels else thinking_of(template, vocabulary)
    calls = row.call_markers if row is not None else ()
    others = (*(thinking or ()), *(row.other_markers if row is not None else ()))
    tokens, call_tokens = _special(wrapper, others), _special(wrapper, calls)
    start = _ids(wrapper, row.starts[0]) if row is not None and row.starts else ()
    think_end = _ids(wrapper, thinking[1]) if thinking is not None else ()
    markup = Markup(
        format=row,
        thinking=thinking,
        first=Part.HEADER if has_channels else Part.TEXT,
        think_start=_ids(wrapper, thinking[0]) if thinking is not None else (),
        think_end=think_end,
        think_ends=_merged(wrapper, think_end),
        blanks=_blanks(vocabulary),
        quotes=frozenset(n for token, n in vocabulary.items() if token.endswith(_QUOTES)),
        is_taught=thinking is not None
        and (any(word in template for word in (*thinking, "enable_thinking")) or not template),
        call_start=start,
        call_tail=_tail(wrapper, start),
        token_ids=_tokens_in((*calls, *others), wrapper),
        tokens=tokens | call_tokens,
        call_tokens=call_tokens - tokens,
    )
    return _with_harmony(markup, wrapper) if row is not None and row.name == "harmony" else markup


def _knows(vocabulary: Container[str], markers: Sequence[str]) -> bool:
    return all(marker in vocabulary or not marker.strip() for marker in markers)


def template_text(wrapper: Any) -> str:
    """Return the text of the chat template; of several templates, all of them."""
    template = wrapper.chat_template
    if isinstance(template, dict):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""


def thinking_of(template: str, vocabulary: Container[str]) -> tuple[str, str] | None:
    """Return the thinking markers that a template writes, or else that are tokens; None if it does not think."""
    template = template.replace("\\n", "\n")
    for begin, end in THINKING:
        if begin in template and end in template:
            return begin, end
    for begin, end in THINKING:
        tags = _TAG.findall(begin + end)
        if tags and all(tag in vocabulary for tag in tags):
            return begin, end
    return None


def _with_harmony(markup: Markup, wrapper: Any) -> Markup:
    """Add the headers around thinking and text in gpt-oss's messages."""
    ids = markup.token_ids
    # Said again after its thinking.
    again = f'(<[{ids["<|start|>"]}]> "assistant")?'
    return replace(
        markup,
        think_start=_ids(wrapper, "<|channel|>analysis<|message|>"),
        think_end=_ids(wrapper, "<|end|>"),
        is_taught=True,
        text_start=f'{again} <[{ids["<|channel|>"]}]> "final" <[{ids["<|message|>"]}]>',
    )


def _ids(wrapper: Any, marker: str) -> tuple[int, ...]:
    return tuple(wrapper.encode(marker, add_special_tokens=False))


def _tail(wrapper: Any, marker: Sequence[int]) -> str:
    """Text of the last of several tokens; empty for a token that never merges with others."""
    if len(marker) < 2 or marker[-1] in wrapper.added_tokens_decoder:
        return ""
    return str(wrapper.decode([marker[-1]]))


def _merged(wrapper: Any, marker: Sequence[int]) -> frozenset[int]:
    """Tokens that begin with the last one of several and continue with white space."""
    if not _tail(wrapper, marker):
        return frozenset()
    last = wrapper.convert_ids_to_tokens(marker[-1])
    return frozenset(
        number
        for token, number in wrapper.get_vocab().items()
        if token.startswith(last) and not token[len(last) :].strip(_WRITTEN_BLANKS)
    )


def _blanks(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Tokens of white space alone, including those that are named by their byte."""
    return frozenset(
        number
        for token, number in vocabulary.items()
        if token in _BLANK_BYTES or not token.strip(_WRITTEN_BLANKS)
    )


def _special(wrapper: Any, markers: Sequence[str]) -> frozenset[int]:
    """The special tokens that occur in these markers."""
    added = wrapper.added_tokens_decoder.items()
    return frozenset(
        token_id
        for token_id, token in added
        if token.special and any(token.content in marker for marker in markers)
    ) - frozenset(wrapper.eos_token_ids)


def _tokens_in(markers: Sequence[str], wrapper: Any) -> dict[str, int]:
    """The tags in these markers that are single tokens."""
    vocabulary = wrapper.get_vocab()
    added = {token.content: number for number, token in wrapper.added_tokens_decoder.items()}
    tags = {tag for marker in markers for tag in _TAG.findall(marker)}
    tags |= {text for text in added if any(text in marker for marker in markers) and len(text) > 2}
    return {
        tag: number
        for tag in sorted(tags)
        if (number := added.get(tag, vocabulary.get(tag) if tag[1:2] in "|｜" else None))
        is not None
    }
