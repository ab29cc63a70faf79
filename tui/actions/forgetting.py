"""Makes the server forget the cached pages of a deleted chat, and reports what stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.history.traces import Traces
from tui.talk.connection import ServerConnection
from tui.talk.errors import ChatError

_UNTIL = "stay on disk until they are the oldest there, or until `mlxserve cache clear`"


async def forget_pages(
    connection: ServerConnection | None,
    left: Traces,
    tools: Sequence[Mapping[str, Any]],
    fields: Mapping[str, float | int | str],
) -> str:
    """Return the message to show; empty if the server is not ours, or keeps nothing.

    tools, fields: of the next request, which the deleted ones probably had, too
    """
    if not left.conversations or (connection is not None and not connection.is_ours):
        return ""
    if connection is None:
        return f"The chat is deleted. No server is connected, so its cached pages {_UNTIL}."
    deleted: dict[str, Any] = {"conversations": left.conversations, "kept": left.kept}
    if tools:
        deleted["tools"] = list(tools)
    if "reasoning_effort" in fields:
        deleted["reasoning_effort"] = fields["reasoning_effort"]
    try:
        forgotten = await connection.client.engine.forget(deleted)
    except ChatError as error:
        return f"The chat is deleted, but its cached pages {_UNTIL}: {error}"
    words = (
        f"The chat is deleted, with {forgotten.num_in_memory} cached pages in memory and "
        f"{forgotten.num_on_disk} on disk."
    )
    if others := [model for model in left.models if model not in forgotten.models]:
        words += f" Pages of {', '.join(others)}, which is not loaded here, {_UNTIL}."
    return words
