"""`mlxserve key`: makes, lists and revokes the API keys of this machine's server."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.api.access.keys import Key, KeyFile, Scope, usual_file

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="API keys: create, list and revoke them. A running server notices at once.",
)

File = Annotated[
    Path | None,
    typer.Option(help="The keys' file; by default keys.json in the configuration folder."),
]
Name = Annotated[str, typer.Argument(help="What the key is called in lists.")]


@app.command()
def create(
    name: Name,
    file: File = None,
    scope: Annotated[
        Scope, typer.Option(help="An admin also sees and changes what belongs to others.")
    ] = Scope.USER,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Its answers under way at the same time.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Its requests in a minute.")
    ] = None,
) -> None:
    """Make a key and show it, once: only its digest is kept."""
    secret = _keys(file).create(
        name, scope, max_requests=max_requests, requests_per_minute=requests_per_minute
    )
    print(secret)


@app.command(name="list")
def list_(
    file: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """Show the names, scopes, dates and limits of all keys."""
    keys = _keys(file).read()
    if as_json:
        print(json.dumps([_told(key) for key in keys], indent=2))
        return
    for key in keys:
        print(f"{key.name:<24}{key.scope:<8}{key.created:<12}{_limits(key)}".rstrip())


@app.command()
def revoke(name: Name, file: File = None) -> None:
    """Refuse a key from now on."""
    _keys(file).revoke(name)


def _keys(file: Path | None) -> KeyFile:
    return KeyFile(file or usual_file())


def _told(key: Key) -> dict[str, object]:
    return {name: value for name, value in asdict(key).items() if name != "sha256"}


def _limits(key: Key) -> str:
    told = []
    if key.max_requests is not None:
        told.append(f"{key.max_requests} at once")
    if key.requests_per_minute is not None:
        told.append(f"{key.requests_per_minute} a minute")
    return ", ".join(told)
