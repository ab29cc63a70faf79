"""How a model family marks its thinking and its tool calls, taken from the model's tokenizer.

mlx-lm knows the families: its tokenizer wrapper says which markers a model uses and which of its
parsers reads a whole call. Two formats are added here: OpenAI's harmony, and Llama 3's calls,
which are JSON answers without a marker.

    part     TEXT      THINKING         CALL              HEADER
    edge       <think> ──▶ </think> ──▶ ...               between messages, never shown
               <tool_call> ───────────▶ (its reader finds the end)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

ParseCall: TypeAlias = Callable[[str, Sequence[Mapping[str, Any]]], Any]


class Part(Enum):
    """What a part of an answer's text is."""

    TEXT = auto()
    THINKING = auto()
    CALL = auto()
    HEADER = auto()


Edges: TypeAlias = Mapping[Part, tuple[tuple[str, Part], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """
    edges: for each part, the markers that end it and the part that follows; markers are not shown
    first: the part an answer starts in
    call_format: the name of mlx-lm's parser, "harmony" or "llama3"
    is_bare: an answer may be a call without a marker
    call_end: the marker that ends a call; empty if only the end of the answer does
    parse_call: mlx-lm's parser of one whole call; it may raise almost any exception
    think_start, think_end: the thinking markers as token ids; empty if the model does not think
    is_taught: the chat template mentions thinking; some vocabularies have unused markers
    text_start: in Lark, what precedes an answer's text; empty if nothing does
    call_start: the marker that opens a call, as token ids
    call_tail: the text of its last token, if the tokenizer may merge it with what follows
    token_ids: token ids of the markers that are single tokens
    tokens: special tokens of the markup, which the parser has to see as text
    call_tokens: the subset of `tokens` that occurs only in calls
    """

    edges: Edges = field(default_factory=dict)
    first: Part = Part.TEXT
    call_format: str | None = None
    is_bare: bool = False
    call_end: str = ""
    parse_call: ParseCall | None = None
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    is_taught: bool = False
    text_start: str = ""
    call_start: tuple[int, ...] = ()
    call_tail: str = ""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    tokens: frozenset[int] = frozenset()
    call_tokens: frozenset[int] = frozenset()

    @property
    def can_call(self) -> bool:
        return self.call_format is not None

    @property
    def can_think(self) -> bool:
        return bool(self.think_end)

    def opens_thinking(self, token_ids: Sequence[int], text_of: Callable[..., str]) -> bool:
        """Whether a prompt ends inside thinking, because the template wrote the opening marker."""
        length = len(self.think_start)
        tail = token_ids[-(length + _MOST_BLANKS) :]
        if not length:
            return False
        for at in range(len(tail) - length, -1, -1):
            if tuple(tail[at : at + length]) == self.think_start:
                return not text_of(tail[at + length :]).strip()
        return False


_MOST_BLANKS = 4  # most tokens of white space that a template writes after the opening marker
# Special tokens inside calls, which the decoder would otherwise drop.
_INNER_TOKENS = {
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "laguna": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "muse_spark": ("<|message|>", "<|eom|>", "<|eot|>"),
    "harmony": ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"),
}
_PYTHON_TAG = "<|python_tag|>"  # precedes some calls of Llama 3
_PARTS = {
    "normal": Part.TEXT,
    "reasoning": Part.THINKING,
    "tool": Part.CALL,
    "header": Part.HEADER,
}
_HARMONY: Edges = {
    Part.HEADER: (
        ("<|channel|>analysis<|message|>", Part.THINKING),
        ("<|channel|>commentary<|message|>", Part.TEXT),
        ("<|channel|>final<|message|>", Part.TEXT),
        ("to=functions.", Part.CALL),
    ),
    Part.THINKING: (("<|end|>", Part.HEADER),),
    Part.TEXT: (("<|end|>", Part.HEADER),),
}


def markup_of(wrapper: Any, mentions: Callable[[str], bool]) -> Markup:
    """The markup of the model whose tokenizer mlx-lm has wrapped.

    mentions: whether the chat template contains a word
    """
    vocabulary = wrapper.get_vocab()
    if wrapper.tool_parser is None and all(t in vocabulary for t in _INNER_TOKENS["harmony"]):
        return _harmony(wrapper)
    if wrapper.tool_parser is None and mentions(_PYTHON_TAG) and _PYTHON_TAG in vocabulary:
        return Markup(
            edges={Part.TEXT: ((_PYTHON_TAG, Part.CALL),)},
            call_format="llama3",
            is_bare=True,
            tokens=frozenset({vocabulary[_PYTHON_TAG]}),
            call_tokens=frozenset({vocabulary[_PYTHON_TAG]}),
        )
    name = wrapper.init_kwargs.get("tool_parser_type") if wrapper.has_tool_calling else None
    edges = _edges(wrapper)
    pairs = [pair for found in edges.values() for pair in found]
    markers = [marker for marker, to in pairs if to is not Part.CALL]
    call_markers = [marker for marker, to in pairs if to is Part.CALL]
    call_markers += [wrapper.tool_call_end or "", *_INNER_TOKENS.get(name or "", ())]
    tokens, call_tokens = _special(wrapper, markers), _special(wrapper, call_markers)
    return Markup(
        edges=edges,
        first=_PARTS.get(wrapper.response_initial_state, Part.TEXT),
        call_format=name,
        call_end=wrapper.tool_call_end or "",
        parse_call=wrapper.tool_parser,
        think_start=tuple(wrapper.think_start_tokens or ()),
        think_end=tuple(wrapper.think_end_tokens or ()),
        is_taught=wrapper.has_thinking
        and any(map(mentions, (wrapper.think_start, wrapper.think_end, "enable_thinking"))),
        call_start=tuple(wrapper.tool_call_start_tokens or ()),
        call_tail=_tail(wrapper, wrapper.tool_call_start_tokens or ()),
        token_ids={marker: vocabulary[marker] for marker in call_markers if marker in vocabulary},
        tokens=tokens | call_tokens,
        call_tokens=call_tokens - tokens,
    )


def _tail(wrapper: Any, marker: Sequence[int]) -> str:
    """The text of the last of several tokens; empty for a token that never merges with others."""
    if len(marker) < 2 or marker[-1] in wrapper.added_tokens_decoder:
        return ""
    return str(wrapper.decode([marker[-1]]))


def _special(wrapper: Any, markers: Sequence[str]) -> frozenset[int]:
    """The special tokens that occur in these markers."""
    added = wrapper.added_tokens_decoder.items()
    return frozenset(
        token_id
        for token_id, token in added
        if token.special and any(token.content in marker for marker in markers)
    ) - frozenset(wrapper.eos_token_ids)


def _harmony(wrapper: Any) -> Markup:
    vocabulary = wrapper.get_vocab()
    channel, message = vocabulary["<|channel|>"], vocabulary["<|message|>"]
    return Markup(
        edges=_HARMONY,
        first=Part.HEADER,
        call_format="harmony",
        call_end="<|call|>",
        think_start=_ids(wrapper, "<|channel|>analysis<|message|>"),
        think_end=_ids(wrapper, "<|end|>"),
        is_taught=True,
        text_start=f'{_again(vocabulary)} <[{channel}]> "final" <[{message}]>',
        token_ids={token: vocabulary[token] for token in _INNER_TOKENS["harmony"]},
        tokens=frozenset(vocabulary[token] for token in _INNER_TOKENS["harmony"]),
    )


def _again(vocabulary: Mapping[str, int]) -> str:
    """After its thinking the model repeats that it is the assistant."""
    return f'(<[{vocabulary["<|start|>"]}]> "assistant")?'


def _ids(wrapper: Any, marker: str) -> tuple[int, ...]:
    return tuple(wrapper.encode(marker, add_special_tokens=False))


def _edges(wrapper: Any) -> Edges:
    edges: dict[Part, list[tuple[str, Part]]] = {part: [] for part in Part}
    if wrapper.has_thinking:
        edges[Part.TEXT] += [
            (wrapper.think_start, Part.THINKING),
            (wrapper.think_end, Part.TEXT),  # a closing marker without an opening one
        ]
        edges[Part.THINKING].append((wrapper.think_end, Part.TEXT))
    found = {
        _PARTS[part]: [(marker, _PARTS[to]) for marker, to in transitions]
        for part, transitions in wrapper.response_transitions.items()
    }
    calls_in_header = any(to is Part.CALL for pairs in found.values() for _, to in pairs)
    if wrapper.has_tool_calling and not calls_in_header:
        # Thinking models sometimes start a call without closing their thinking.
        edges[Part.TEXT].append((wrapper.tool_call_start, Part.CALL))
        edges[Part.THINKING].append((wrapper.tool_call_start, Part.CALL))
    edges[Part.TEXT] += [(marker, Part.TEXT) for marker in wrapper.structural_markers]
    for part, pairs in found.items():
        edges[part] += pairs
    return {part: tuple(pairs) for part, pairs in edges.items()}
