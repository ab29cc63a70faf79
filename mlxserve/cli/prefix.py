"""`mlxserve prefix`: manages named prefixes of a running server."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mlxserve.cli.piped import piped_text
from mlxserve.cli.remote import Url, ask
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidRequest
from mlxserve.system.command_help import PlainTyper
from mlxserve.system.counted import counted

app = PlainTyper(
    help="Keep named prompt prefixes computed on a running server.",
)

Name = Annotated[str, typer.Argument(help="The name that requests give as `prefix_name`.")]


@app.command()
def add(
    name: Name,
    file: Annotated[
        Path | None, typer.Argument(help="File with its text; by default, or with -, stdin.")
    ] = None,
    system: Annotated[
        bool,
        typer.Option(
            "--system", help="Render the text as a conversation's system prompt, not verbatim."
        ),
    ] = False,
    url: Url = None,
) -> None:
    """Compute a prefix and keep it in the cache; replaces one of the same name."""
    text = _text(file)
    body: dict[str, Any] = {"prompt": text}
    if system:
        body = {"messages": [{"role": "system", "content": text}]}
    added = ask(url, "PUT", _path(name), body)
    print_safe(f"{added['id']}: {counted(added['num_tokens'], 'token')}")


@app.command(name="list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
    url: Url = None,
) -> None:
    """List the prefixes of this API key and their number of tokens; all keys' for an admin key."""
    prefixes = ask(url, "GET", "/v1/prefixes")["data"]
    if as_json:
        print_safe(json.dumps(prefixes, indent=2))
        return
    if not prefixes:
        print_safe(
            "There are no prefixes. `mlxserve prefix add NAME FILE` keeps one.", to=sys.stderr
        )
    for prefix in prefixes:
        owner = prefix["key"]
        line = f"{prefix['id']:<32}{prefix['num_tokens']:>10} tokens"
        print_safe(f"{line}  {owner}" if owner else line)


@app.command()
def remove(
    name: Name,
    key: Annotated[
        str | None,
        typer.Option(help="Its owner, as in the list, for a prefix of another API key."),
    ] = None,
    url: Url = None,
) -> None:
    """Remove a prefix; one of another key needs an admin key."""
    owner = "" if key is None else f"?key={quote(key, safe='')}"
    ask(url, "DELETE", _path(name) + owner)


def _path(name: str) -> str:
    return f"/v1/prefixes/{quote(name, safe='')}"


def _text(file: Path | None) -> str:
    """Read the prefix's text. Raises InvalidRequest."""
    try:
        text = piped_text() if file in (None, Path("-")) else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"The prefix's text cannot be read: {error}") from error
    if not text:
        raise InvalidRequest("The prefix is empty. Name a file or pipe the text in.")
    return text
