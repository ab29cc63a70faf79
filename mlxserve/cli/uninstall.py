"""`mlxserve uninstall`: lists what mlxserve stored on this machine and removes it.

Only what mlxserve made is deleted: files of its own names, and folders that carry its mark. A folder
that MLXSERVE_HOME names may hold others, of the same names.
"""

# Annotations are read by typer at run time, so this file does not postpone them.

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli.agents import AGENTS
from mlxserve.cli.options import SCHEMAS
from mlxserve.cli.running_servers import running_servers
from mlxserve.cli.settings import Settings
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import EngineConfig, config_home, data_home
from mlxserve.core.errors import InvalidConfig, InvalidRequest, MlxServeError
from mlxserve.disk.files import model_folders
from mlxserve.disk.folder import disk_folder
from mlxserve.service.choice import service_manager
from mlxserve.service.unit import log_file
from mlxserve.system.files import is_marked, remove_if_empty

_HOME = {
    "chats": ("chat.sqlite", "chat.sqlite-wal", "chat.sqlite-shm", "chat.sqlite-reserve"),
    "chats of API keys": ("chats",),
    "exported chats": ("exports",),
    "presets": ("presets.toml",),
    "logs": ("logs",),
    "notes about servers and models": (
        "servers",
        "trials.json",
        "templates.json",
        "chunk-times.json",
        "synthetic",
    ),
}
_CONFIG = {
    "settings": ("config.toml",),
    "API keys": ("keys.json", "own-key.json"),
    "servers of tools": ("mcp.json",),
}


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A file, folder or service that is left over."""

    what: str
    path: Path
    size: int  # bytes


def uninstall(
    show: Annotated[
        bool, typer.Option("--list", help="Only list what is there, as without an option.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Delete all of it but models.")] = False,
    models: Annotated[
        bool,
        typer.Option(
            "--models", help="With --all: also models, which other programs may use, too."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """List what mlxserve has left on this machine, or delete it before the package is removed."""
    if show and every:
        raise InvalidRequest("--list deletes nothing and --all does. Choose one of them.")
    if models and not every:
        raise InvalidRequest("--models goes with --all.")
    left_overs = [*_left_overs(), *(_models() if models or not every else ())]
    for left in left_overs:
        print_safe(f"{left.what:<32}{_words(left.size):>10}  {left.path}")
    for folder in _foreign_folders():
        print_safe(f"{folder} was not made by mlxserve: look into it yourself.")
    if not left_overs:
        print_safe("Nothing of mlxserve is left but the package.")
    _say_what_stays()
    if every and left_overs:
        _delete(left_overs, yes=yes)
    elif left_overs and not every:
        print_safe("`mlxserve uninstall --all` deletes all of it but models; --models these, too.")
    print_safe("The package: `uv tool uninstall mlxserve` or `pip uninstall mlxserve`.")


def _delete(left_overs: list[LeftOver], *, yes: bool) -> None:
    if servers := running_servers():
        urls = ", ".join(server.url for server in servers)
        raise InvalidRequest(f"Servers run: {urls}. Stop them first: `mlxserve stop --all`.")
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(
                "uninstall asks before it deletes. Without a terminal, pass --yes."
            )
        typer.confirm("Delete all of this?", abort=True)
    failed = []
    for left in left_overs:
        try:
            if (unit := _unit_file()) is not None and left.path == unit:
                service_manager().uninstall()
            elif left.path.is_dir() and not left.path.is_symlink():
                shutil.rmtree(left.path)
            else:
                left.path.unlink(missing_ok=True)
        except (OSError, MlxServeError) as error:
            failed.append(f"{left.path}: {error}")
    parents = {left.path.parent for left in left_overs}
    for folder in (*parents, data_home(), config_home(), _gguf_home().parent, log_file().parent):
        # Another program's files are in it.
        with suppress(OSError):
            remove_if_empty(folder)
    if failed:
        raise MlxServeError(f"Not deleted: {'; '.join(failed)}")
    print_safe(f"Deleted {_words(sum(left.size for left in left_overs))}.")


def _left_overs() -> Iterator[LeftOver]:
    for home, names in ((data_home(), _HOME), (config_home(), _CONFIG)):
        for what, files in names.items():
            yield from _made(what, *(home / file for file in files))
    pages = disk_folder(_disk_cache_dir())
    yield from _present("cached pages of prompts", *model_folders(pages), pages / "writes.json")
    yield from _made("files made of GGUF models", _gguf_home())
    if (unit := _unit_file()) is not None:
        yield from _present("service", unit)
    yield from _present("log of the service", log_file())


def _models() -> Iterator[LeftOver]:
    from mlxserve.hub.catalog import Origin, entry_of, places
    from mlxserve.hub.hub_cache import repository_folder

    home, seen = data_home() / "models", set[Path]()
    for name, source, folder in places():
        if source is Origin.FOLDER and home in folder.parents and folder not in seen:
            seen.add(folder)
            if entry_of(name, source, folder) is not None:
                yield from _present("model (your own)", folder)
        is_ours = source is Origin.DOWNLOADED and folder.is_dir()
        path = repository_folder(name) if is_ours else None
        if path is not None and path not in seen and entry_of(name, source, folder) is not None:
            seen.add(path)
            yield from _present("model (Hugging Face's cache)", path)


def _say_what_stays() -> None:
    for name, agent in AGENTS.items():
        file = agent.file()
        if file.with_name(f"{file.name}.before-mlxserve").exists():
            print_safe(f"{file} is set to use this server: `mlxserve launch {name} --undo` first.")


def _disk_cache_dir() -> str | None:
    try:
        return Settings.read(SCHEMAS, {}, os.environ).build(EngineConfig).disk_cache_dir
    except InvalidConfig:
        # A broken configuration is to be deleted as well.
        return None


def _gguf_home() -> Path:
    from mlxserve.hub.gguf.folder import gguf_home  # imports numpy

    return gguf_home()


def _unit_file() -> Path | None:
    try:
        return service_manager().unit_file
    except MlxServeError:
        # No service manager that is known.
        return None


def _foreign_folders() -> Iterator[Path]:
    """Yield folders of our names that we did not make."""
    for names in _HOME.values():
        for folder in (data_home() / name for name in names):
            if _is_folder(folder) and not is_marked(folder):
                yield folder


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _present(what: str, *paths: Path) -> Iterator[LeftOver]:
    for path in paths:
        if path.exists() or path.is_symlink():
            yield LeftOver(what, path, _size(path))


def _made(what: str, *paths: Path) -> Iterator[LeftOver]:
    """Files and links of our names, and folders that we made."""
    yield from _present(what, *(p for p in paths if not _is_folder(p) or is_marked(p)))


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
    total = 0
    for file in files:
        with suppress(OSError):
            total += 0 if file.is_symlink() or file.is_dir() else file.stat().st_size
    return total


def _words(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
