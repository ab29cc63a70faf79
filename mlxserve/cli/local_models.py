"""`mlxserve list`, `mlxserve show` and `mlxserve rm`: the models on this machine."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.models import Json
from mlxserve.cli.streams import print_safe
from mlxserve.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from mlxserve.files import MAX_TEXT, read_json
from mlxserve.terminal_text import escaped

if TYPE_CHECKING:
    from mlxserve.hub.catalog import Entry

Name = Annotated[str, typer.Argument(help="As `mlxserve list` shows it, or a short name.")]


def list_models(json: Json = False) -> None:
    """List the models on this machine."""
    entries = _local()
    if json:
        print_safe(
            json_format.dumps(
                [
                    {"name": one.name, "source": str(one.source), "weight_size": one.weight_size}
                    for one in entries
                ]
            )
        )
        return
    for entry in entries:
        print_safe(f"{entry.name:46} {entry.source:10} {entry.weight_size / 1e9:>6.2f} GB")


def show(name: Name, json: Json = False) -> None:
    """Show what a model on this machine is: its kind, size, context and memory."""
    from mlxserve.hub.files import text_config

    entry, folder = _found(name)
    config = read_json(folder / "config.json", MAX_TEXT)
    text = text_config(config)
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    card: dict[str, Any] = {
        "name": entry.name,
        "source": str(entry.source),
        "folder": str(folder),
        "architecture": text.get("model_type"),
        "weight_size": entry.weight_size,
        "bits": quantization.get("bits"),
        "context": entry.context or None,
        "layers": text.get("num_hidden_layers"),
        "kv_bytes_per_token": entry.kv_size(2),
        "chat_template": _abilities(folder),
    }
    if json:
        print_safe(json_format.dumps(card))
        return
    bits = "not quantised" if card["bits"] is None else f"{card['bits']} bits"
    print_safe(f"{entry.name} ({entry.source})")
    print_safe(f"  Folder        {folder}")
    print_safe(f"  Architecture  {card['architecture']}, {card['layers']} layers")
    print_safe(f"  Weights       {entry.weight_size / 1e9:.2f} GB, {bits}")
    print_safe(f"  Context       {card['context'] or 'not said'} tokens")
    print_safe(f"  KV cache      {entry.kv_size(2) / 1024:.1f} KiB per token")
    print_safe(f"  Template      {_template_in_words(card['chat_template'])}")


def _abilities(folder: Path) -> dict[str, Any] | None:
    """What the model's chat template takes; None without one, or without a readable tokenizer."""
    from mlxserve.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(folder)
    except UnsupportedModel:
        return None
    return tokenizer.abilities.card() if tokenizer.has_chat_template else None


def _template_in_words(abilities: dict[str, Any] | None) -> str:
    if abilities is None:
        return "none: prompts are plain text"
    lacks = [name.replace("_", " ") for name, value in abilities.items() if value is False]
    ids, reasoning = abilities["call_ids"], abilities["reasoning"] or "none"
    reads = ", ".join(abilities["variables"]) or "nothing else"
    takes = f"does not take {', '.join(lacks)}" if lacks else "takes every conversation"
    return f"{takes}; ids of calls: {ids}; earlier reasoning: {reasoning}; reads {reads}"


def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a downloaded model."""
    from mlxserve.cli.running_servers import running_servers
    from mlxserve.hub import catalog
    from mlxserve.hub.known_models import repository_of

    repository = name if "/" in name else repository_of(name) or name
    folder = catalog.repository_folder(repository)
    if "/" not in repository or not folder.is_dir() or folder.parent != catalog.hub_cache():
        others = [one for one in _local() if one.name in (name, repository)]
        reason = f"is {others[0].source}, not downloaded by mlxserve" if others else "is not here"
        raise InvalidRequest(f"{name} {reason}. `mlxserve list` shows what is downloaded.")
    for server in running_servers():
        if server.model == repository:
            raise InvalidRequest(f"{repository} is served at {server.url}. Stop that server first.")
    size = sum(file.stat().st_size for file in folder.rglob("*") if not file.is_symlink())
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("rm asks before it deletes. Without a terminal, pass --yes.")
        typer.confirm(f"Delete {escaped(repository)} ({size / 1e9:.2f} GB)?", abort=True)
    shutil.rmtree(folder)
    print_safe(f"Deleted {repository}, {size / 1e9:.2f} GB")


def _local() -> "list[Entry]":
    from mlxserve.hub import catalog

    return [one for one in catalog.entries() if one.source is not catalog.Origin.SUGGESTED]


def _found(name: str) -> "tuple[Entry, Path]":
    """Raises ModelNotFound for a model that is not on this machine."""
    from mlxserve.hub import catalog
    from mlxserve.hub.files import did_you_mean
    from mlxserve.hub.known_models import repository_of

    wanted = (name, repository_of(name), str(Path(name).expanduser().resolve()))
    for found, source, folder in catalog.places():
        entry = catalog.entry_of(found, source, folder) if found in wanted else None
        if entry is not None:
            return entry, folder
    raise ModelNotFound(
        f"{name} is not on this machine; `mlxserve list` shows what is.{did_you_mean(name)}"
    )
