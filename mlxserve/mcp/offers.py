"""Prompts and resources of an MCP server, for the user rather than for the model."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mlxserve.mcp.results import shortened
from mlxserve.mcp.servers_file import ToolsError
from mlxserve.system.terminal_text import one_line
from mlxserve.system.well_formed import well_formed

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")

MAX_OFFERS = 200  # prompts, and resources, of one server
_MAX_PAGES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrompt:
    """A prompt as its server describes it: untrusted text. `arguments`: (name, is required)."""

    server: str
    name: str
    description: str = ""
    arguments: tuple[tuple[str, bool], ...] = ()

    @property
    def command(self) -> str:
        """What the user types after the slash."""
        return f"{self.server}:{self.name}"

    @property
    def usage(self) -> str:
        names = (name if is_needed else f"[{name}]" for name, is_needed in self.arguments)
        return one_line(" ".join(names), 60)

    def values(self, typed: str) -> dict[str, str]:
        """Return the arguments in a line, in their order; the last one takes the rest.

        Raises ToolsError if a required one is missing.
        """
        try:
            words = shlex.split(typed)
        except ValueError:
            # A quote that is not closed.
            words = typed.split()
        names = [name for name, _ in self.arguments]
        if len(words) > len(names) > 0:
            words[len(names) - 1 :] = [" ".join(words[len(names) - 1 :])]
        values = dict(zip(names, words, strict=False))
        missing = [name for name, is_needed in self.arguments if is_needed and name not in values]
        if missing:
            raise ToolsError(f"/{self.command} needs {', '.join(missing)}: {self.usage}")
        return values


@dataclass(frozen=True, slots=True)
class ServerResource:
    """A resource as its server lists it. `address`: how the user attaches it."""

    server: str
    uri: str

    @property
    def address(self) -> str:
        return f"{self.server}:{self.uri}"


async def prompts_of(client: Client, server: str) -> tuple[ServerPrompt, ...]:
    """List a server's prompts; none if it has no such capability."""
    if client.server_capabilities.prompts is None:
        return ()
    listed = await _all(client.list_prompts, lambda page: page.prompts)
    return tuple(
        ServerPrompt(
            server=server,
            name=well_formed(prompt.name),
            description=well_formed(prompt.description or ""),
            arguments=tuple((each.name, bool(each.required)) for each in prompt.arguments or ()),
        )
        for prompt in listed
        if not any(sign.isspace() for sign in prompt.name)
    )


async def resources_of(client: Client, server: str) -> tuple[ServerResource, ...]:
    """List a server's resources; none if it has no such capability."""
    if client.server_capabilities.resources is None:
        return ()
    listed = await _all(client.list_resources, lambda page: page.resources)
    return tuple(ServerResource(server, well_formed(str(each.uri))) for each in listed)


async def prompt_text(client: Client, prompt: ServerPrompt, values: dict[str, str]) -> str:
    """Return the texts of a prompt's messages."""
    result = await client.get_prompt(prompt.name, values)
    texts = (getattr(message.content, "text", "") for message in result.messages)
    return shortened(well_formed("\n\n".join(text for text in texts if text)))


async def resource_text(client: Client, resource: ServerResource) -> str:
    """Return the text of a resource. Raises ToolsError for one without."""
    result = await client.read_resource(resource.uri)
    texts = [str(part.text) for part in result.contents if hasattr(part, "text")]
    if not texts:
        raise ToolsError(f"{one_line(resource.address, 100)} has no text.")
    return shortened(well_formed("\n".join(texts)))


async def _all(
    list_page: Callable[..., Awaitable[Any]], items: Callable[[Any], list[Any]]
) -> list[Any]:
    listed: list[Any] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await list_page(cursor=cursor)
        listed += items(page)
        cursor = page.next_cursor
        if cursor is None or len(listed) >= MAX_OFFERS:
            break
    return listed[:MAX_OFFERS]
