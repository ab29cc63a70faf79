"""A server of the official package: `python -m tests.mcp.package_server` speaks on stdin and stdout."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("greeter")


@server.tool()
def greet(name: str) -> str:
    """Greets somebody."""
    return f"Hello, {name}!"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("not today")


if __name__ == "__main__":
    server.run("stdio")
