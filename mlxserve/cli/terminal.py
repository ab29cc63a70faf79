"""Runs the terminal for `mlxserve chat`, after checking its flags.

Bypasses typer, whose import takes time, for the usual call with at most a few simple flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mlxserve.api.config import NO_FILE, ServerConfig
from mlxserve.cli.settings import Settings, flags_of
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from tui.opening import FirstFrame

# The server is for this terminal alone, so keys created for other clients do not apply.
_SERVER_ARGS = ("--keys-file", NO_FILE)
# One person chats, with a few other clients at most. It bounds the cache of a small model, which would
# otherwise have room for 64 contexts and show a chat as one sign among hundreds.
_MAX_NUM_SEQS = 8
_PLAIN = {"--url": "url", "--model": "model", "-m": "model"}


def plain_flags(arguments: Sequence[str]) -> dict[str, str] | None:
    """Parse a `chat` command that has only `_PLAIN` flags, as `--flag value`; else None."""
    names, values = arguments[1::2], arguments[2::2]
    if (
        arguments[:1] != ["chat"]
        or len(names) != len(values)
        or any(name not in _PLAIN for name in names)
        or any(value.startswith("-") for value in values)
    ):
        return None
    return {_PLAIN[name]: value for name, value in zip(names, values, strict=True)}


def run_with_plain_flags(flags: Mapping[str, str], frame: FirstFrame | None) -> NoReturn:
    """Run the terminal with only these flags. Raises InvalidConfig."""
    engine = {name: value for name, value in flags.items() if name != "url"}
    settings = Settings.read((EngineConfig, ServerConfig), engine, os.environ)
    run_terminal(settings, flags.get("url"), frame)


def run_terminal(
    settings: Settings,
    url: str | None,
    frame: FirstFrame | None,
    *,
    own_server: bool = False,
    continues: bool = False,
) -> NoReturn:
    """Run the terminal, on the server at the URL, a running one, or its own.

    Raises InvalidConfig, also for options that the server would refuse.
    """
    flags = {name: value for name, value in settings.flags.items() if name != "model"}
    if url is not None and flags:
        raise InvalidConfig(
            f"{flags_of(flags)[0]} configures a server that is started here and has no effect with "
            "--url. Remove one of the two."
        )
    config = settings.build(EngineConfig)
    settings.build(ServerConfig)
    notice, address = "", url
    if url is None and not own_server and not settings.flags and settings.file is None:
        url, notice = _running_server(config)
    is_found = url is not None and url != address
    if url is not None:
        _prepare_key(url)
    model = settings.flags.get("model") if url is not None else None
    engine_args = [] if url is not None else _engine_flags(settings, config)
    with _import_errors_explained():
        from tui.launch import main

        sys.exit(
            main(
                url=url,
                model=model,
                engine_args=engine_args,
                server_args=_server_flags(settings),
                frame=frame,
                notice=notice,
                continues=continues,
                is_found=is_found,
                read_key=_key_for,
                read_document=_read_document,
            )
        )


def _server_flags(settings: Settings) -> list[str]:
    """Flags for the chat's own server, besides the engine's options."""
    max_num_seqs = () if settings.has("max_num_seqs") else ("--max-num-seqs", str(_MAX_NUM_SEQS))
    return [*_SERVER_ARGS, *max_num_seqs]


def _running_server(config: EngineConfig) -> tuple[str | None, str]:
    """Return (address, notice) of the newest server with the configured model.

    That is any model if none is configured; (None, "") if there is no such server.
    """
    from mlxserve.cli.own_key import has_key
    from mlxserve.cli.running_servers import newest_server

    server = newest_server(config.model, has_key=has_key)
    if server is None:
        return None, ""
    return server.url, (
        f"This chat uses the server at {server.url} ({server.model}). "
        "`mlxserve chat --own-server` starts one of its own."
    )


def _engine_flags(settings: Settings, config: EngineConfig) -> list[str]:
    """Return the explicit flags for the server, which reads the environment and the file itself."""
    flags = ["--model", config.model] if "model" in settings.flags and config.model else []
    options = {name: value for name, value in settings.flags.items() if name != "model"}
    if settings.file is not None:
        flags += ["--config", str(settings.file)]
    return [*flags, *flags_of(options)]


def _prepare_key(url: str) -> None:
    """Replace the key of an earlier version while a terminal can show it. Raises InvalidConfig."""
    from mlxserve.cli.own_key import key_for

    key_for(url)


def _key_for(url: str) -> str | None:
    """Return the current API key for a server; None if the key file cannot be read.

    The server then refuses every key of the file.
    """
    from mlxserve.cli.own_key import key_for

    try:
        return key_for(url, tell=lambda _words: None)
    except InvalidConfig:
        return None


def _read_document(path: Path, typed: str) -> tuple[str, str]:
    """Return a document's name and a data: URL of its text. Raises ValueError, which names `typed`."""
    from mlxserve.cli.documents import read_document
    from mlxserve.text.documents.sent import text_url

    try:
        document = read_document(path, typed)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error
    return document.name, text_url(document.text)


@contextmanager
def _import_errors_explained() -> Iterator[None]:
    """Raises InvalidConfig if a dependency is missing or another package named `tui` hides ours."""
    try:
        yield
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "tui":
            raise InvalidConfig(
                f"`mlxserve chat` needs the package {error.name.split('.')[0]!r}, which is not "
                "installed. Reinstall mlxserve to get it."
            ) from error
        raise InvalidConfig(_why_tui_is_hidden()) from error


def _why_tui_is_hidden() -> str:
    from importlib.metadata import packages_distributions
    from importlib.util import find_spec

    owners = [
        name for name in packages_distributions().get("tui", []) if name.lower() != "mlxserve"
    ]
    spec = find_spec("tui")
    if spec is None:
        return "`mlxserve chat` cannot find its package `tui`. Reinstall mlxserve."
    where = spec.origin or next(iter(spec.submodule_search_locations or ()), "in memory")
    owner = f"the package {owners[0]!r}" if owners else "something"
    return (
        f"`mlxserve chat` cannot start because {owner} also contains a module named `tui` "
        f"({where}). Uninstall it, or install mlxserve in a separate environment."
    )
