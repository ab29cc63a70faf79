"""The output of a response: items of text, reasoning and tool calls, and the events that build them.

    output_item.added
      message          content_part.added, output_text.delta ..., output_text.done, content_part.done
      reasoning        reasoning_text.delta ..., reasoning_text.done
      function_call    function_call_arguments.delta ..., function_call_arguments.done
      custom_tool_call custom_tool_call_input.delta, custom_tool_call_input.done
    output_item.done

Items are built one after another. An event here is its type without `response.`, with its data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from mlxserve.text.conversation import arguments_object
from mlxserve.text.parsing.turn import ToolCallDelta
from mlxserve.text.signature import sign

if TYPE_CHECKING:
    from mlxserve.text.deltas import Delta

Event: TypeAlias = tuple[str, dict[str, Any]]


class ToolAddress(NamedTuple):
    """A tool as the client names it. The model sees one name that contains the namespace."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def full_name(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"

    def fields(self) -> dict[str, str]:
        if self.namespace is None:
            return {"name": self.name}
        return {"name": self.name, "namespace": self.namespace}


class OutputItem(ABC):
    """An item that is being built. `text` is its text so far."""

    PREFIX: ClassVar[str]

    def __init__(self, response_id: str, index: int) -> None:
        self.text = ""
        number = f"_{index}" if index else ""
        self._id = f"{self.PREFIX}_{response_id}{number}"
        self._index = index

    def start(self) -> Iterator[Event]:
        yield "output_item.added", {"output_index": self._index, "item": self.empty()}

    def more(self, text: str) -> Iterator[Event]:
        self.text += text
        yield from self._more(text)

    def end(self, status: str) -> Iterator[Event]:
        yield from self._end()
        yield "output_item.done", {"output_index": self._index, "item": self.whole(status)}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}

    @abstractmethod
    def empty(self) -> dict[str, Any]: ...

    @abstractmethod
    def whole(self, status: str) -> dict[str, Any]: ...

    @abstractmethod
    def _more(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def _end(self) -> Iterator[Event]: ...


class MessageItem(OutputItem):
    PREFIX = "msg"

    def start(self) -> Iterator[Event]:
        yield from super().start()
        yield "content_part.added", {**self._part_place, "part": self._part()}

    def empty(self) -> dict[str, Any]:
        return {**self.whole("in_progress"), "content": []}

    def whole(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()],
        }

    def _more(self, text: str) -> Iterator[Event]:
        yield "output_text.delta", {**self._part_place, "delta": text, "logprobs": []}

    def _end(self) -> Iterator[Event]:
        yield "output_text.done", {**self._part_place, "text": self.text, "logprobs": []}
        yield "content_part.done", {**self._part_place, "part": self._part()}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ReasoningItem(OutputItem):
    """Reasoning, with the model's own text and no summary."""

    PREFIX = "rs"
    is_signed = False  # the client stores it unread and sends it back

    def empty(self) -> dict[str, Any]:
        return {**self.whole("in_progress"), "content": []}

    def whole(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": self.text}],
            "encrypted_content": sign(self.text) if self.is_signed and self.text else None,
            "status": status,
        }

    def _more(self, text: str) -> Iterator[Event]:
        yield "reasoning_text.delta", {**self._place, "content_index": 0, "delta": text}

    def _end(self) -> Iterator[Event]:
        yield "reasoning_text.done", {**self._place, "content_index": 0, "text": self.text}


class CallItem(OutputItem):
    PREFIX = "fc"
    TYPE: ClassVar = "function_call"
    CONTENT: ClassVar = "arguments"  # the field of the call's text

    def __init__(self, response_id: str, index: int, call_id: str, tool: ToolAddress) -> None:
        super().__init__(response_id, index)
        self._call_id = call_id
        self._tool = tool

    def empty(self) -> dict[str, Any]:
        return {**self.whole("in_progress"), self.CONTENT: ""}

    def whole(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": self.TYPE,
            "call_id": self._call_id,
            **self._tool.fields(),
            self.CONTENT: self._content(),
            "status": status,
        }

    def _content(self) -> str:
        return self.text

    def _more(self, text: str) -> Iterator[Event]:
        yield "function_call_arguments.delta", {**self._place, "delta": text}

    def _end(self) -> Iterator[Event]:
        done = {"name": self._tool.name, "arguments": self.text}
        yield "function_call_arguments.done", {**self._place, **done}


class CustomCallItem(CallItem):
    """A call of a custom tool. The model saw a function with one argument, `input`."""

    PREFIX = "ctc"
    TYPE = "custom_tool_call"
    CONTENT = "input"

    def _content(self) -> str:
        text = (arguments_object(self.text) or {}).get("input")
        return text if isinstance(text, str) else self.text

    def _more(self, text: str) -> Iterator[Event]:  # noqa: ARG002
        # The input is inside the JSON, which must be complete first.
        yield from ()

    def _end(self) -> Iterator[Event]:
        text = self._content()
        yield "custom_tool_call_input.delta", {**self._place, "delta": text}
        yield "custom_tool_call_input.done", {**self._place, "input": text}


class ResponseOutput:
    """All items of a response. `tools` maps the model's names of tools to their addresses."""

    def __init__(
        self, response_id: str, tools: Mapping[str, ToolAddress], *, signs: bool = False
    ) -> None:
        """signs: send reasoning as a signature too, for clients that store it unread."""
        self._response_id = response_id
        self._signs = signs
        self._tools = tools
        self._items: list[OutputItem] = []

    def push(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._more(ReasoningItem, delta.reasoning)
        if delta.text:
            yield from self._more(MessageItem, delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """End the last item with the response's status. Without any item, add an empty message."""
        if not self._items:
            yield from self._open(MessageItem(self._response_id, 0))
        yield from self._items[-1].end(status)

    def whole(self, status: str) -> list[dict[str, Any]]:
        *earlier, last = self._items
        return [*(item.whole("completed") for item in earlier), last.whole(status)]

    def _more(self, kind: type[MessageItem | ReasoningItem], text: str) -> Iterator[Event]:
        if not self._items or type(self._items[-1]) is not kind:
            yield from self._open(kind(self._response_id, len(self._items)))
        yield from self._items[-1].more(text)

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id is not None:
            name = call.name or ""
            tool = self._tools.get(name, ToolAddress(name))
            kind = CustomCallItem if tool.is_custom else CallItem
            yield from self._open(kind(self._response_id, len(self._items), call.id, tool))
        if call.arguments:
            yield from self._items[-1].more(call.arguments)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].end("completed")
        if isinstance(item, ReasoningItem):
            item.is_signed = self._signs
        self._items.append(item)
        yield from item.start()
