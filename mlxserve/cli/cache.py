"""`mlxserve cache`: looks into the disk cache, which every server of this user shares."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.chat.prefix_store import prefix_files
from mlxserve.cli.completion import models_here
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidRequest
from mlxserve.core.store_url import check_store_url, shown_store
from mlxserve.disk.files import model_folders, model_of, scan
from mlxserve.disk.folder import disk_folder
from mlxserve.disk.index import DiskIndex
from mlxserve.disk.record import FoundFile
from mlxserve.system.command_help import PlainTyper
from mlxserve.system.counted import counted
from mlxserve.system.extras import extra_command

app = PlainTyper(
    help="Look into the disk cache, make it smaller, or delete it. Servers may run meanwhile.",
)

Folder = Annotated[
    str | None,
    typer.Option(
        "--disk-cache-dir",
        envvar="MLXSERVE_DISK_CACHE_DIR",
        help="Folder of the disk cache; by default mlxserve/pages in the user's cache folder.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Only the pages of this model.", autocompletion=models_here),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--page-store",
        envvar="MLXSERVE_PAGE_STORE",
        help="Also show what the page store at this address has, as redis://HOST:PORT.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def show(folder: Folder = None, page_store: Store = None, as_json: Json = False) -> None:
    """Show which models have pages on disk, how large they are and when they were last used.

    With a page store, the same of it: all but the time, which the store does not tell.
    """
    base = disk_folder(folder)
    by_model = _by_model(base)
    total = sum(file.size for files in by_model.values() for file in files)
    if as_json:
        models = [
            {
                "model": name,
                "num_pages": len(files),
                "num_bytes": sum(file.size for file in files),
                "last_used": int(max(file.used for file in files)),
            }
            for name, files in by_model.items()
        ]
        found: dict[str, object] = {"folder": str(base), "num_bytes": total, "models": models}
        if page_store is not None:
            stored = [
                {"model": name, "num_pages": count, "num_bytes": size}
                for name, count, size in _in_store(page_store)
            ]
            found["page_store"] = {"address": shown_store(page_store), "models": stored}
        print_safe(json.dumps(found))
        return
    print_safe(f"{base}: {_words(total)}")
    for name, files in by_model.items():
        size = sum(file.size for file in files)
        age = _age(time.time() - max(file.used for file in files))
        print_safe(f"{name:<40}{len(files):>8} pages{_words(size):>12}   last used {age}")
    if page_store is not None:
        stored_models = _in_store(page_store)
        print_safe(f"{shown_store(page_store)}: {_words(sum(size for *_, size in stored_models))}")
        for name, count, size in stored_models:
            print_safe(f"{name:<40}{count:>8} pages{_words(size):>12}")


def _in_store(url: str) -> list[tuple[str, int, int]]:
    """(model, number of pages, bytes) of each model in a page store, the largest first."""
    check_store_url(url)
    try:
        from mlxserve.disk.store_report import models_in
    except ImportError as error:
        raise InvalidRequest(f"--page-store needs redis-py: {extra_command('fleet')}.") from error
    return models_in(url)


@app.command()
def clear(
    folder: Folder = None,
    model: Model = None,
    named_prefixes: Annotated[
        bool,
        typer.Option(
            "--named-prefixes",
            help="Delete named prefixes as well; a running server keeps its own.",
        ),
    ] = False,
) -> None:
    """Delete the pages of one model, or all of them. They are computed again when needed."""
    base = disk_folder(folder)
    by_model = _by_model(base)
    if named_prefixes:
        _delete_prefixes([each for each in model_folders(base) if model in (None, model_of(each))])
    if model is not None and model not in by_model:
        known = ", ".join(by_model) or "none"
        raise InvalidRequest(f"No pages of {model} are on disk. Models that have some: {known}.")
    files = [file for name in by_model if model in (None, name) for file in by_model[name]]
    _delete(files)


@app.command()
def resize(
    size: Annotated[float, typer.Argument(help="GiB that may stay.", min=0)], folder: Folder = None
) -> None:
    """Delete the pages that were used least recently, until the others fit into this size.

    A server that runs keeps to its own --disk-cache-size, and may write more again.
    """
    index, victims = DiskIndex(scan(disk_folder(folder))), []
    while index.total > size * (1 << 30) and (file := index.coldest()) is not None:
        victims.append(file)
        index.remove(file.path)
    _delete(victims)


def _by_model(base: Path) -> dict[str, list[FoundFile]]:
    """Group the files by model, most recently used first."""
    by_folder: dict[Path, list[FoundFile]] = defaultdict(list)
    for file in scan(base):
        by_folder[file.path.parent.parent].append(file)
    by_model: dict[str, list[FoundFile]] = defaultdict(list)
    for files in sorted(by_folder.values(), key=lambda each: -max(file.used for file in each)):
        by_model[model_of(files[0].path.parent.parent)] += files
    return by_model


def _delete(files: list[FoundFile]) -> None:
    for file in files:
        file.path.unlink(missing_ok=True)
    size = sum(file.size for file in files)
    print_safe(f"{counted(len(files), 'page')} deleted, {_words(size)}")


def _delete_prefixes(folders: list[Path]) -> None:
    files = [file for folder in folders for file in prefix_files(folder)]
    for file in files:
        file.unlink(missing_ok=True)
    print_safe(f"{counted(len(files), 'file')} of named prefixes deleted")


def _words(size: int) -> str:
    gib = size / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
