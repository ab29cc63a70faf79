"""What `mlxserve chat` does with its flags: check them, and run the terminal.

Without typer, because most people give none or one: then there is nothing to wait for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from mlxserve.api.config import NO_FILE, ServerConfig
from mlxserve.cli.settings import Settings, flags_of
from mlxserve.config import EngineConfig
from mlxserve.errors import InvalidConfig

if TYPE_CHECKING:
    from tui.opening import FirstFrame

# The server is for this terminal alone, so the keys that were made for others do not lock it.
_SERVER_ARGS = ("--keys-file", NO_FILE)
_PLAIN = {"--url": "url", "--model": "model", "-m": "model"}


def plain_flags(arguments: Sequence[str]) -> dict[str, str] | None:
    """Of `chat` with nothing but these, each written `--flag value`; else None: typer's to read."""
    names, values = arguments[1::2], arguments[2::2]
    if (
        arguments[:1] != ["chat"]
        or len(names) != len(values)
        or any(name not in _PLAIN for name in names)
        or any(value.startswith("-") for value in values)
    ):
        return None
    return {_PLAIN[name]: value for name, value in zip(names, values, strict=True)}


def talk(flags: Mapping[str, str], frame: FirstFrame | None) -> NoReturn:
    """Run the terminal with these flags alone. Raises InvalidConfig."""
    engine = {name: value for name, value in flags.items() if name != "url"}
    settings = Settings.read((EngineConfig, ServerConfig), engine, os.environ)
    run_terminal(settings, flags.get("url"), frame)


def run_terminal(settings: Settings, url: str | None, frame: FirstFrame | None) -> NoReturn:
    """Run the terminal. Raises InvalidConfig, also for what the server would refuse."""
    given = {name: value for name, value in settings.flags.items() if name != "model"}
    if url is not None and given:
        raise InvalidConfig(
            f"{flags_of(given)[0]} sets up a server that is started here; with --url it has no "
            "effect. Leave one of the two out."
        )
    config = settings.build(EngineConfig)
    settings.build(ServerConfig)
    model = settings.flags.get("model") if url is not None else None
    engine_args = [] if url is not None else _engine_flags(settings, config)
    with _import_errors_explained():
        from tui.launch import main

        sys.exit(
            main(
                url=url, model=model, engine_args=engine_args, server_args=_SERVER_ARGS, frame=frame
            )
        )


def _engine_flags(settings: Settings, config: EngineConfig) -> list[str]:
    """What was given here, for the server; the rest it reads where this process did."""
    flags = ["--model", config.model] if "model" in settings.flags and config.model else []
    given = {name: value for name, value in settings.flags.items() if name != "model"}
    if settings.file is not None:
        flags += ["--config", str(settings.file)]
    return [*flags, *flags_of(given)]


@contextmanager
def _import_errors_explained() -> Iterator[None]:
    """Raises InvalidConfig when another package is in our terminal's way, or one is missing."""
    try:
        yield
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "tui":
            raise InvalidConfig(
                f"`mlxserve chat` needs the package {error.name.split('.')[0]!r}, which is not "
                "installed. Install mlxserve again to get it."
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
        return "`mlxserve chat` cannot find its package `tui`. Install mlxserve again."
    where = spec.origin or next(iter(spec.submodule_search_locations or ()), "in memory")
    owner = f"the package {owners[0]!r}" if owners else "something"
    return (
        f"`mlxserve chat` is hidden by {owner}, which also has a module named `tui` ({where}). "
        "Uninstall it, or install mlxserve in an environment of its own."
    )
