"""Adapts a conversation to its chat template: one pure function per missing capability.

The template alone decides which of them apply, so a conversation's prompt never changes its shape
from one turn to the next. Each makes the smallest change that keeps the beginning of the prompt:
nothing moves to the front, which would compute the whole conversation again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mlxserve.images.image import Image
from mlxserve.text.conversation import (
    ASSISTANT,
    PARAGRAPH,
    SYSTEM,
    TOOL,
    USER,
    Call,
    Conversation,
    Message,
    SentImage,
)
from mlxserve.text.parsing.values import kinds_of
from mlxserve.text.template_caps import Arguments, CallIds, TemplateCaps

Messages: TypeAlias = tuple[Message, ...]
WriteCalls: TypeAlias = Callable[[Sequence[Call]], str]
# An answer between a tool's result and a user message.
_BRIDGE = "Understood."
_OPENING = "Continue."  # a user message before an assistant's
NOT_RUN = "[not run]"  # the result of a call that has none


@dataclass(frozen=True, slots=True)
class AdaptedConversation:
    """Messages as the template takes them, and descriptions of the changes."""

    messages: list[dict[str, Any]]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Step:
    """`change` applies to templates for which `is_needed`; `said` describes it."""

    is_needed: Callable[[TemplateCaps], bool]
    change: Callable[[Messages], Messages]
    said: str


def calls_as_json(calls: Sequence[Call]) -> str:
    """Write calls as text, for a template that shows none and a model of unknown format."""
    return "\n".join(
        json.dumps({"name": call.name, "arguments": call.as_object()}, ensure_ascii=False)
        for call in calls
    )


class Fitting:
    """The steps that one template needs, in order."""

    def __init__(self, abilities: TemplateCaps, write_calls: WriteCalls = calls_as_json) -> None:
        self.abilities = abilities
        steps = [*_STEPS]
        if not abilities.calls:
            steps.insert(_CALLS_AT, _calls_as_text(write_calls))
        self._steps = [step for step in steps if step.is_needed(abilities)]

    def fit(self, conversation: Conversation) -> AdaptedConversation:
        """Apply the steps. Thread-safe."""
        messages = conversation.messages
        changes = []
        for step in self._steps:
            changed = step.change(messages)
            if changed != messages:
                changes.append(step.said)
            messages = changed
        return AdaptedConversation(
            [self._for_template(message) for message in messages], tuple(changes)
        )

    def _for_template(self, message: Message) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "role": message.role,
            "content": message.content(),
            **message.extra,
        }
        if message.reasoning:
            fields[self.abilities.reasoning or "reasoning_content"] = message.reasoning
        if message.calls:
            fields["tool_calls"] = [self._call(call) for call in message.calls]
        if message.call_id is not None:
            fields["tool_call_id"] = message.call_id
        if message.name is not None:
            fields["name"] = message.name
        return fields

    def _call(self, call: Call) -> dict[str, Any]:
        is_text = self.abilities.arguments is Arguments.TEXT
        arguments = call.arguments if is_text else call.as_object()
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}


def _leading(messages: Messages) -> int:
    """Number of system messages at the beginning."""
    return next((n for n, message in enumerate(messages) if message.role != SYSTEM), len(messages))


def join_first_systems(messages: Messages) -> Messages:
    end = _leading(messages)
    return messages if end < 2 else (_joined(messages[:end]), *messages[end:])


def results_after_calls(messages: Messages) -> Messages:
    """Move each result directly after the last answer with its call."""
    answers: dict[str | None, int] = {}  # answers by id of a call; None for a result without an id
    results: dict[int, list[Message]] = {}
    others: list[tuple[int, Message]] = []
    for number, message in enumerate(messages):
        answers.update((key, number) for call in message.calls for key in (call.id, None))
        if message.role == TOOL and message.call_id in answers:
            results.setdefault(answers[message.call_id], []).append(message)
        else:
            others.append((number, message))
    return tuple(each for number, other in others for each in (other, *results.get(number, ())))


def late_systems_as_users(messages: Messages) -> Messages:
    """Turn late system messages into user messages, or append them to a tool's result.

    A user message after a result would move the tools of Mistral's templates to it, and drop the
    reasoning before it in Qwen 3.5's, which computes most of the prompt again.
    """
    end = _leading(messages)
    fitted = [*messages[:end]]
    for message in messages[end:]:
        if message.role == SYSTEM and fitted and fitted[-1].role == TOOL:
            both = message.after(fitted[-1])
            fitted[-1] = replace(
                fitted[-1], text=both.text, images=both.images, left_out=both.left_out
            )
        else:
            fitted.append(_as_user(message) if message.role == SYSTEM else message)
    return tuple(fitted)


def systems_into_first_user(messages: Messages) -> Messages:
    end = _leading(messages)
    if not end:
        return messages
    system = _as_user(_joined(messages[:end]))
    if end < len(messages) and messages[end].role == USER:
        return (messages[end].after(system), *messages[end + 1 :])
    return (system, *messages[end:])


def last_system_as_user(messages: Messages) -> Messages:
    """Turn the last system message into the user's, if there is no user at all."""
    end = _leading(messages)
    if not end or any(message.role == USER for message in messages):
        return messages
    return (*messages[: end - 1], _as_user(messages[end - 1]), *messages[end:])


def results_as_users(messages: Messages) -> Messages:
    return tuple(_as_user(message) if message.role == TOOL else message for message in messages)


def images_after_results(messages: Messages) -> Messages:
    """Move images from results to a user message after them, before its text if there is one."""
    fitted: list[Message] = []
    images: list[Image | SentImage] = []
    for message in messages:
        if message.role == TOOL:
            images += [placed.image for placed in message.images]
            fitted.append(replace(message, images=()))
            continue
        if images:
            shown = Message.from_parts(USER, images)
            if message.role == USER:
                message = message.after(shown)
            else:
                fitted.append(shown)
        images = []
        fitted.append(message)
    return (*fitted, Message.from_parts(USER, images)) if images else tuple(fitted)


def orphans_as_users(messages: Messages) -> Messages:
    known: set[str | None] = set()
    fitted = []
    for message in messages:
        known.update(call.id for call in message.calls)
        is_orphan = message.role == TOOL and not (
            known if message.call_id is None else message.call_id in known
        )
        fitted.append(_as_user(message) if is_orphan else message)
    return tuple(fitted)


def split_calls(messages: Messages) -> Messages:
    """Split an answer into one per call, each followed by its result."""
    fitted: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.calls) < 2:
            fitted.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at].role == TOOL:
            results.append(messages[at])
            at += 1
        for number, call in enumerate(message.calls):
            first = message if number == 0 else Message(role=ASSISTANT)
            fitted.append(replace(first, calls=(call,)))
            own = [result for result in results if result.call_id == call.id]
            fitted += own
            results = [result for result in results if result.call_id != call.id]
        fitted += results
    return tuple(fitted)


def results_of_all_calls(messages: Messages) -> Messages:
    """Insert a result for each call without one, after those of its neighbours.

    A user who denies a call, or stops an agent while a tool runs, leaves such calls.
    """
    answered = {message.call_id for message in messages if message.role == TOOL}
    fitted: list[Message] = []
    missing: list[Message] = []
    for message in messages:
        if message.role != TOOL:
            fitted += missing
            missing = [
                Message(role=TOOL, text=NOT_RUN, call_id=call.id, name=call.name)
                for call in message.calls
                if call.id not in answered
            ]
        fitted.append(message)
    return (*fitted, *missing)


def texts_as_reasoning(messages: Messages) -> Messages:
    """Merge text into reasoning, in answers that have both, and calls."""
    return tuple(
        replace(m, reasoning=PARAGRAPH.join((m.reasoning, m.text)), text="", images=())
        if m.calls and m.reasoning and m.text
        else m
        for m in messages
    )


def texts_before_calls(messages: Messages) -> Messages:
    """Move a text that is dropped beside calls to a message of its own; the thinking stays."""
    fitted: list[Message] = []
    for message in messages:
        if message.calls and (message.text or message.images):
            fitted.append(replace(message, calls=(), reasoning=""))
            message = replace(message, text="", images=(), left_out=())
        fitted.append(message)
    return tuple(fitted)


def texts_after_calls(messages: Messages) -> Messages:
    """Move a text that is dropped beside calls to the beginning of the message after them.

    For templates that take no answer before a call either. The message is a result, if the calls
    have any.
    """
    fitted: list[Message] = []
    said = ""
    for message in messages:
        if said:
            text = said if message.role == ASSISTANT else f"[Said before this call: {said}]"
            message = message.after(Message(role=message.role, text=text))
        said = message.text if message.calls else ""
        fitted.append(message)
    return tuple(fitted)


def drop_empty_answers(messages: Messages) -> Messages:
    return tuple(m for m in messages if m.role != ASSISTANT or m.text or m.images or m.calls)


def begin_with_a_user(messages: Messages) -> Messages:
    end = _leading(messages)
    if end == len(messages) or messages[end].role == USER:
        return messages
    return (*messages[:end], Message(role=USER, text=_OPENING), *messages[end:])


def answer_results(messages: Messages) -> Messages:
    """Insert a short answer between a tool's result and a user message."""
    fitted: list[Message] = []
    for message in messages:
        if message.role == USER and _last_role(fitted) == TOOL:
            fitted.append(Message(role=ASSISTANT, text=_BRIDGE))
        fitted.append(message)
    return tuple(fitted)


def _last_role(messages: Sequence[Message]) -> str | None:
    return next((message.role for message in reversed(messages) if message.role != SYSTEM), None)


def join_users(messages: Messages) -> Messages:
    return _join(messages, lambda message: message.role == USER)


def join_answers(messages: Messages) -> Messages:
    """Join consecutive answers; calls stay with the results that follow them."""
    return _join(messages, lambda message: message.role == ASSISTANT and not message.calls)


def nine_character_ids(messages: Messages) -> Messages:
    return tuple(_with_short_ids(message) for message in messages)


def _with_short_ids(message: Message) -> Message:
    if not message.calls and message.call_id is None:
        return message
    calls = tuple(replace(call, id=_short(call.id)) for call in message.calls)
    call_id = None if message.call_id is None else _short(message.call_id)
    return replace(message, calls=calls, call_id=call_id)


def _short(call_id: str) -> str:
    """Return an id of nine letters or digits as it is, otherwise a digest of it."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _calls_as_text(write: WriteCalls) -> _Step:
    def change(messages: Messages) -> Messages:
        return tuple(
            replace(m, text="\n".join(filter(None, (m.text, write(m.calls)))), calls=())
            if m.calls
            else m
            for m in messages
        )

    return _Step(lambda a: not a.calls, change, "calls are text")


def _as_user(message: Message) -> Message:
    return replace(message, role=USER, call_id=None, name=None)


def _joined(messages: Iterable[Message]) -> Message:
    first, *others = messages
    for other in others:
        first = other.after(first)
    return first


def _join(messages: Messages, joins: Callable[[Message], bool]) -> Messages:
    fitted: list[Message] = []
    for message in messages:
        if fitted and joins(fitted[-1]) and message.role == fitted[-1].role:
            fitted[-1] = message.after(fitted[-1])
        else:
            fitted.append(message)
    return tuple(fitted)


_STEPS: tuple[_Step, ...] = (
    _Step(lambda a: not a.late_results, results_after_calls, "results follow their calls"),
    _Step(
        lambda a: a.calls and a.results and not a.unanswered_calls,
        results_of_all_calls,
        f"calls without a result have the result {NOT_RUN}",
    ),
    _Step(
        lambda a: not a.several_systems, join_first_systems, "system messages at the start are one"
    ),
    _Step(
        lambda a: not a.late_system,
        late_systems_as_users,
        "later system messages are user messages or part of results",
    ),
    _Step(
        lambda a: not a.system,
        systems_into_first_user,
        "the system message is before the first user message",
    ),
    _Step(lambda a: not a.without_user, last_system_as_user, "a system message is the user's"),
    _Step(lambda a: not a.results, results_as_users, "results of tools are user messages"),
    _Step(
        lambda a: not a.orphan_results,
        orphans_as_users,
        "results without a call are user messages",
    ),
    _Step(
        lambda a: not a.result_images,
        images_after_results,
        "images of results are in a user message after them",
    ),
    _Step(
        lambda a: not a.text_and_reasoning and a.text_with_calls,
        texts_as_reasoning,
        "a text before a call is part of its reasoning",
    ),
    _Step(
        lambda a: a.calls and not a.text_with_calls and a.text_before_calls,
        texts_before_calls,
        "a text before a call is a message of its own",
    ),
    _Step(lambda a: not a.parallel_calls, split_calls, "each call is a message before its result"),
    _Step(lambda a: not a.empty_answers, drop_empty_answers, "empty answers are left out"),
    _Step(lambda a: not a.answer_first, begin_with_a_user, "a user message begins"),
    _Step(
        lambda a: not a.user_after_result,
        answer_results,
        "an answer is between a tool's result and a user message",
    ),
    _Step(lambda a: not a.repeated_users, join_users, "user messages in a row are one"),
    _Step(lambda a: not a.repeated_answers, join_answers, "answers in a row are one"),
    _Step(
        lambda a: a.calls and not a.text_with_calls and not a.text_before_calls,
        texts_after_calls,
        "a text before a call is at the beginning of its result",
    ),
    _Step(
        lambda a: a.call_ids is CallIds.NINE,
        nine_character_ids,
        "ids of calls have nine characters",
    ),
)
# Calls become text before results without a call are looked for.
_CALLS_AT = 6


_TYPES = ("array", "boolean", "integer", "number", "object", "string")


def single_typed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's definition with one type per value, for a template that shows no other."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": _single_typed(function["parameters"])}}


def _single_typed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    types = schema.get("type")
    kinds = {types} if types in _TYPES else kinds_of(schema) - {"null"}
    typed = {**schema, "type": "string" if "string" in kinds else min(kinds, default="string")}
    if isinstance(properties := schema.get("properties"), Mapping):
        typed["properties"] = {key: _single_typed(value) for key, value in properties.items()}
    nested = (key for key in ("items", "additionalProperties") if key in schema)
    return {**typed, **{key: _single_typed(schema[key]) for key in nested}}
