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
from mlxserve.disk.files import model_folders, model_of, scan
from mlxserve.disk.folder import disk_folder
from mlxserve.disk.index import DiskIndex
from mlxserve.disk.record import FoundFile

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def show(folder: Folder = None, as_json: Json = False) -> None:
    """Show which models have pages on disk, how large they are and when they were last used."""
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
        print_safe(json.dumps({"folder": str(base), "num_bytes": total, "models": models}))
        return
    print_safe(f"{base}: {_words(total)}")
    for name, files in by_model.items():
        size = sum(file.size for file in files)
        age = _age(time.time() - max(file.used for file in files))
        print_safe(f"{name:<40}{len(files):>8} pages{_words(size):>12}   last used {age}")


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
    print_safe(f"{len(files)} pages deleted, {_words(size)}")


def _delete_prefixes(folders: list[Path]) -> None:
    files = [file for folder in folders for file in prefix_files(folder)]
    for file in files:
        file.unlink(missing_ok=True)
    print_safe(f"{len(files)} files of named prefixes deleted")


def _words(size: int) -> str:
    gib = size / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
