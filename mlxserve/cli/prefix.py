"""`mlxserve prefix`: named prefixes of a running server."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mlxserve.cli.remote import Url, ask
from mlxserve.errors import InvalidRequest

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Named prefixes of a running server: computed once, kept until they are removed.",
)

Name = Annotated[str, typer.Argument(help="What requests call it, in `prefix_name`.")]


@app.command()
def add(
    name: Name,
    file: Annotated[Path | None, typer.Argument(help="Its text; - or nothing is stdin.")] = None,
    system: Annotated[
        bool,
        typer.Option(
            "--system", help="The text is a system prompt, for conversations; else it is as it is."
        ),
    ] = False,
    url: Url = None,
) -> None:
    """Compute a prefix and keep it; one that had the name is replaced."""
    text = _text(file)
    body: dict[str, Any] = {"prompt": text}
    if system:
        body = {"messages": [{"role": "system", "content": text}]}
    added = ask(url, "PUT", _path(name), body)
    print(f"{added['id']}: {added['num_tokens']} tokens")


@app.command(name="list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    url: Url = None,
) -> None:
    """Show the prefixes of this API key and how many tokens each has."""
    found = ask(url, "GET", "/v1/prefixes")["data"]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for prefix in found:
        print(f"{prefix['id']:<32}{prefix['num_tokens']:>10} tokens")


@app.command()
def remove(name: Name, url: Url = None) -> None:
    """Forget a prefix."""
    ask(url, "DELETE", _path(name))


def _path(name: str) -> str:
    return f"/v1/prefixes/{quote(name, safe='')}"


def _text(file: Path | None) -> str:
    """Raises InvalidRequest."""
    try:
        text = sys.stdin.read() if file in (None, Path("-")) else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"The text of the prefix cannot be read: {error}") from error
    if not text:
        raise InvalidRequest("The prefix has no text: name a file or pipe it in.")
    return text
