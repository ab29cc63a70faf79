"""`mlxserve show` and `mlxserve rm`: one model on this machine."""

# Annotations are read by typer at run time, so this file does not postpone them.

import contextlib
import json as json_format
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.completion import downloaded_models, models_here
from mlxserve.cli.models import Json, fit_of, fit_text, memory_for
from mlxserve.cli.streams import print_safe
from mlxserve.cli.template_cards import kept_card
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from mlxserve.system.files import MAX_TEXT, read_json
from mlxserve.system.terminal_text import escaped

if TYPE_CHECKING:
    from mlxserve.hub.adapter_files import AdapterFiles
    from mlxserve.hub.catalog import Entry

_NAME_HELP = "As `mlxserve list` shows it, or a short name."
Name = Annotated[str, typer.Argument(help=_NAME_HELP, autocompletion=models_here)]
Downloaded = Annotated[str, typer.Argument(help=_NAME_HELP, autocompletion=downloaded_models)]

_IS_IN = {
    "Ollama": "is in Ollama's folder",
    "LM Studio": "is in LM Studio's folder",
    "package": "is in a Python package",
}

_PURPOSES = {
    "embedding": "vectors of texts (/v1/embeddings, /v1/rerank)",
    "rerank": "ranking documents for a query (/v1/rerank)",
    "draft": "drafting for its own model of Gemma 4 (--draft-model)",
}


def show(name: Name, json: Json = False) -> None:
    """Show what a model on this machine is: its kind, size, context and memory; or an adapter's folder."""
    from mlxserve.hub.adapter_files import is_adapter
    from mlxserve.hub.files import unserved_weights
    from mlxserve.hub.known_models import draft_of

    # A model's folder may have an adapter among its files, which `-m` leaves out as well.
    is_model = any((folder := Path(name).expanduser()).glob("model*.safetensors"))
    if is_adapter(folder) and not is_model:
        _show_adapter(folder, json=json)
        return
    entry, place = _found(name)
    text, quantised = _gguf_card(place) if place.is_file() else _folder_card(place)
    options = EngineConfig()
    fit = fit_of(entry, options)
    card: dict[str, Any] = {
        "name": entry.name,
        "source": str(entry.source),
        "format": str(entry.format),
        "folder": str(place),
        "architecture": text.get("model_type"),
        "weight_size": entry.weight_size,
        **quantised,
        "context": entry.context or None,
        "layers": text.get("num_hidden_layers"),
        "kv_bytes_per_token": entry.kv_size(2),
        "window": entry.kv.window or None,
        "window_kv_bytes": entry.window_size(2),
        "memory": memory_for(options).nbytes,
        "needed": fit.needed,
        "num_tokens": fit.num_tokens,
        "num_windows": fit.num_windows,
        "purpose": entry.purpose or "completion",
        "vision": entry.has_vision,
        "head": entry.has_head,
        "draft": draft_of(entry.name) or None,
        "chat_template": None if entry.purpose else kept_card(place, partial(_abilities, place)),
        "not_served": unserved_weights(place),
    }
    if json:
        print_safe(json_format.dumps(card))
        return
    print_safe(f"{entry.name} ({entry.source})")
    print_safe(f"  {'File  ' if place.is_file() else 'Folder'}        {place}")
    print_safe(f"  Architecture  {card['architecture']}, {card['layers']} layers")
    print_safe(
        f"  Weights       {entry.weight_size / 1e9:.2f} GB, {_quantisation_label(quantised)}"
    )
    if card["not_served"]:
        print_safe(f"  Not served    {', '.join(card['not_served'])}")
    print_safe(f"  Context       {card['context'] or 'not said'} tokens")
    if entry.purpose:
        print_safe(f"  Made for      {_PURPOSES[entry.purpose]}")
        return
    print_safe(f"  KV cache      {_kv_label(entry)}")
    print_safe(f"  Fits here     {fit_text(fit)}, with default options")
    print_safe(f"  Template      {_describe_template(card['chat_template'])}")
    if entry.has_vision:
        print_safe(
            "  Images        seen with the extra `vision`; the log says so if its vision fails"
        )
    if entry.has_head:
        print_safe(
            "  Drafts        it has a head that guesses the next tokens; --speculative-tokens 0 leaves it out"
        )
    if card["draft"] is not None:
        print_safe(f"  Drafts        {card['draft']} drafts for it (--draft-model)")


def _kv_label(entry: "Entry") -> str:
    """Describe the bytes per token in 16 bits."""
    words = f"{entry.kv_size(2) / 1024:.1f} KiB per token"
    if entry.kv.window:
        size = f"{entry.window_size(2) / 2**20:.1f} MiB"
        words += f", and {size} for layers that see the last {entry.kv.window:,} tokens"
    return words


def _show_adapter(folder: Path, *, json: bool) -> None:
    from mlxserve.hub.adapter_files import find_adapter

    adapter = find_adapter(folder.resolve().name, folder)
    card = adapter_card(adapter)
    if json:
        print_safe(json_format.dumps(card))
        return
    print_safe(f"{adapter.name} (an adapter of mlx_lm.lora)")
    print_safe(f"  Folder        {adapter.path}")
    print_safe(f"  Trained from  {adapter.base or 'not said'}")
    print_safe(
        f"  Matrices      of {len(adapter.layers)} layers, rank {adapter.rank}, scale {adapter.scale:g}"
    )
    print_safe(f"  Weights       {adapter.size / 1e6:.1f} MB")
    print_safe(f"  Serve it      mlxserve serve -m MODEL --adapter {adapter.name}={folder}")


def adapter_card(adapter: "AdapterFiles") -> dict[str, Any]:
    return {
        "name": adapter.name,
        "folder": str(adapter.path),
        "base": adapter.base or None,
        "layers": len(adapter.layers),
        "rank": adapter.rank,
        "scale": adapter.scale,
        "weight_size": adapter.size,
    }


def _folder_card(folder: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the text model's configuration, and its quantisation."""
    from mlxserve.hub.files import text_config

    config = read_json(folder / "config.json", MAX_TEXT)
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    return text_config(config), {"bits": quantization.get("bits")}


def _gguf_card(file: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    from mlxserve.hub.gguf.config import model_config
    from mlxserve.hub.gguf.reader import read_header
    from mlxserve.hub.gguf.sizes import kinds

    header = read_header(file)
    tensors = {
        kind: {"tensors": count, "file_size": size} for kind, (count, size) in kinds(header).items()
    }
    return model_config(header), {"bits": None, "quantisation": tensors}


def _quantisation_label(quantised: Mapping[str, Any]) -> str:
    if "quantisation" in quantised:
        return ", ".join(
            f"{kind} ({part['tensors']} tensor{'s' if part['tensors'] > 1 else ''}, "
            f"{part['file_size'] / 1e9:.2f} GB in the file)"
            for kind, part in quantised["quantisation"].items()
        )
    return "not quantised" if quantised["bits"] is None else f"{quantised['bits']} bits"


def _abilities(place: Path) -> dict[str, Any] | None:
    """Capabilities of the model's chat template; None without a template or readable tokenizer."""
    from mlxserve.hub.gguf.folder import model_folder
    from mlxserve.hub.gguf.reader import read_header
    from mlxserve.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(model_folder(read_header(place)) if place.is_file() else place)
    except UnsupportedModel:
        return None
    return tokenizer.template.card() if tokenizer.template.exists else None


def _describe_template(abilities: dict[str, Any] | None) -> str:
    if abilities is None:
        return "none: prompts are plain text"
    lacks = [name.replace("_", " ") for name, value in abilities.items() if value is False]
    ids, reasoning = abilities["call_ids"], abilities["reasoning"] or "none"
    reads = ", ".join(abilities["variables"]) or "nothing else"
    takes = f"does not take {', '.join(lacks)}" if lacks else "takes every conversation"
    controls = abilities["controls"]
    thinking = _describe_switch(controls) + "".join(map(_describe_efforts, controls["efforts"]))
    return f"{takes}; ids of calls: {ids}; earlier reasoning: {reasoning}; reads {reads}{thinking}"


def _describe_switch(controls: Mapping[str, Any]) -> str:
    """What turns thinking off, and the variable of a budget."""
    off = ", ".join(f"{name}={json_format.dumps(value)}" for name, value in controls["off"].items())
    off = off or (f"{controls['off_word']} in the system message" if controls["off_word"] else "")
    budget = f"; budget of thinking: {controls['budget']}" if controls["budget"] else ""
    return (f"; thinking is turned off by {off}" if off else "") + budget


def _describe_efforts(efforts: Mapping[str, Any]) -> str:
    words = [f"{v} (default)" if v == efforts["default"] else v for v in efforts["values"]]
    return f"; {efforts['variable']}: {', '.join(words) or 'none is taken'}"


def rm(
    name: Downloaded,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a downloaded model."""
    from mlxserve.cli.running_servers import running_servers
    from mlxserve.hub.gguf_places import files_of_one, hub_reference
    from mlxserve.hub.hub_cache import hub_cache, repository_folder
    from mlxserve.hub.known_models import repository_of

    reference = hub_reference(name)
    repository = reference[0] if reference else name if "/" in name else repository_of(name) or name
    folder = repository_folder(repository)
    if "/" not in repository or not folder.is_dir() or folder.parent != hub_cache():
        raise InvalidRequest(
            f"{name} {_why_not_deleted(name, repository)}. `mlxserve list` shows what is downloaded."
        )
    for server in running_servers():
        if repository in map(_repository_of_served, (server.model, *server.others)):
            raise InvalidRequest(f"{repository} is served at {server.url}. Stop that server first.")
    links = files_of_one(repository, reference[1]) if reference and reference[1] else []
    files = _stored(folder, links)
    size = sum(file.stat().st_size for file in files)
    what = name if links else repository
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("rm asks before it deletes. Without a terminal, pass --yes.")
        typer.confirm(f"Delete {escaped(what)} ({size / 1e9:.2f} GB)?", abort=True)
    if links:
        for file in (*links, *files):
            file.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder)
    print_safe(f"Deleted {what}, {size / 1e9:.2f} GB")


def _stored(folder: Path, links: Sequence[Path]) -> set[Path]:
    """Files of a repository that these links of its snapshots point to; all files without links."""
    if not links:
        return {file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()}
    blobs = {link.resolve() for link in links}
    return {file for file in blobs if folder.resolve() in file.parents and file.is_file()}


def _repository_of_served(name: str) -> str:
    from mlxserve.hub.gguf_places import hub_reference

    reference = hub_reference(name)
    return reference[0] if reference else name


def _why_not_deleted(name: str, repository: str) -> str:
    others = [entry for entry in _local() if entry.name in (name, repository)]
    if others:
        return (
            f"{_IS_IN.get(others[0].source, f'is {others[0].source}')}, not downloaded by mlxserve"
        )
    if Path(name).expanduser().exists():
        return "is a path of your own, not downloaded by mlxserve"
    return "is not here"


def _local() -> "list[Entry]":
    from mlxserve.hub import catalog

    return [entry for entry in catalog.entries() if entry.source is not catalog.Origin.SUGGESTED]


def _found(name: str) -> "tuple[Entry, Path]":
    """Find a model. Raises ModelNotFound if it is not here, UnsupportedModel for other paths."""
    from mlxserve.hub import catalog
    from mlxserve.hub.files import did_you_mean, find_model
    from mlxserve.hub.gguf_places import find_gguf, hub_reference, served_from
    from mlxserve.hub.known_models import repository_of

    wanted = {name, repository_of(name), str(Path(name).expanduser().resolve())}
    with contextlib.suppress(ModelNotFound):  # another quantisation is handled below
        if (file := find_gguf(name)) is not None:
            wanted.add(str(file))
    for candidate, source, folder in catalog.places():
        is_it = candidate in wanted or str(folder) in wanted
        entry = catalog.entry_of(candidate, source, folder) if is_it else None
        if entry is not None:
            return entry, folder
    path = Path(name).expanduser()
    if path.is_dir() and len(files := served_from(path)) == 1:
        path = files[0]
    if path.exists():
        called = path.stem if path.is_file() else path.resolve().name
        if entry := catalog.entry_of(called, catalog.Origin.FOLDER, path):
            return entry, path
        # This raises what is wrong with the model.
        find_model(name)
    known = name if hub_reference(name) is not None else repository_of(name)
    advice = f" `mlxserve pull {name}` downloads it." if known is not None else did_you_mean(name)
    raise ModelNotFound(f"{name} is not on this machine; `mlxserve list` shows what is.{advice}")
