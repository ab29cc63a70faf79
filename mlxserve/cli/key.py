"""`mlxserve key`: creates, lists and revokes API keys for servers on this machine."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.api.access.keys import Key, KeyFile, Scope, usual_file
from mlxserve.cli.own_key import note, own_key_file, usual_keys
from mlxserve.cli.streams import print_safe
from mlxserve.system.command_help import PlainTyper

app = PlainTyper(
    help="Create, list and revoke API keys. Running servers reload them at once.",
)

File = Annotated[
    Path | None,
    typer.Option(help="The key file; by default keys.json in the configuration folder."),
]
Name = Annotated[str, typer.Argument(help="Name of the key in lists.")]


@app.command()
def create(
    name: Name,
    file: File = None,
    scope: Annotated[
        Scope,
        typer.Option(
            help="An admin can also see and change what belongs to other keys; metrics can only "
            "read /metrics and /ready."
        ),
    ] = Scope.USER,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of concurrent answers.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of requests per minute.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that it may use, by any of its names; may be repeated."),
    ] = None,
) -> None:
    """Create a key and print it. It is shown only once: the file stores its digest.

    From the first key on, servers that use the file need one in every request. A key of your own is made
    with it: our own commands and the page on this machine use that one, and share nothing with other keys.
    """
    keys = _keys(file)
    before = keys.read()
    secret = keys.create(
        name,
        scope,
        max_requests=max_requests,
        requests_per_minute=requests_per_minute,
        models=model or (),
    )
    print_safe(secret)
    note(f"It is shown only now: {keys.path} has its digest.")
    owner = _owner(keys.read())
    if not before:
        note(
            "Servers that use this file need a key in every request from now on, also running ones."
        )
    note("Clients send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
    if owner is not None and owner not in before:
        note(
            f"A key of your own, {owner.name!r}, was made too: our own commands on this machine use it "
            f"({own_key_file()}), and the page needs none here."
        )


@app.command(name="list")
def list_(
    file: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List all keys with scope, date of creation and limits."""
    keys = _keys(file).read()
    if as_json:
        print_safe(json.dumps([_public_fields(key) for key in keys], indent=2))
        return
    if not keys:
        note("There are no keys. `mlxserve key create NAME` makes the first.")
    for key in keys:
        remarks = "yours, for our own commands" if key.is_owner else _limits(key)
        print_safe(f"{key.name:<24}{key.scope:<8}{key.created:<12}{remarks}".rstrip())


@app.command()
def revoke(name: Name, file: File = None) -> None:
    """Revoke a key. Servers refuse it from now on, also running ones.

    Your own key is replaced by a new one, and goes with the last other key.
    """
    keys = _keys(file)
    before = keys.read()
    keys.revoke(name)
    after = keys.read()
    if not after:
        note(
            "No key is left. A server that only this machine reaches answers without one from now on; "
            "one that other machines reach refuses everybody until there is a key."
        )
    elif (owner := _owner(after)) is not None and owner not in before:
        note(f"Our own commands on this machine use a new key of yours, {owner.name!r}.")


def _keys(file: Path | None) -> KeyFile:
    return usual_keys() if file is None or file == usual_file() else KeyFile(file)


def _owner(keys: Sequence[Key]) -> Key | None:
    return next((key for key in keys if key.is_owner), None)


def _public_fields(key: Key) -> dict[str, object]:
    return {name: value for name, value in asdict(key).items() if name != "sha256"}


def _limits(key: Key) -> str:
    limits = []
    if key.max_requests is not None:
        limits.append(f"{key.max_requests} at once")
    if key.requests_per_minute is not None:
        limits.append(f"{key.requests_per_minute} a minute")
    if key.models:
        limits.append(f"only {', '.join(key.models)}")
    return ", ".join(limits)
