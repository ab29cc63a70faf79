"""`mlxserve chat`: the terminal, over a server of its own or one that runs already."""

# Annotations are read by typer at run time, so this file does not postpone them.

import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from typing import Annotated

import typer

from mlxserve.api.config import NO_FILE, ServerConfig
from mlxserve.cli.options import flags_of
from mlxserve.config import EngineConfig
from mlxserve.errors import InvalidConfig
from mlxserve.settings import Settings


def chat(
    settings: Settings,
    url: Annotated[
        str | None,
        typer.Option(help="A running OpenAI-compatible server to attach to; else one is started."),
    ] = None,
) -> None:
    """Chat in the terminal."""
    given = {name: value for name, value in settings.flags.items() if name != "model"}
    if url is not None and given:
        raise InvalidConfig(
            f"{flags_of(given)[0]} sets up a server that is started here; with --url it has no "
            "effect. Leave one of the two out."
        )
    # Refuse what the server would refuse, before the screen is taken.
    config = settings.build(EngineConfig)
    settings.build(ServerConfig)
    tui_main = _import_tui()
    if url is not None:
        sys.exit(tui_main(url=url, model=settings.flags.get("model"), server_args=[]))
    sys.exit(tui_main(url=None, model=None, server_args=_server_flags(settings, config)))


def _server_flags(settings: Settings, config: EngineConfig) -> list[str]:
    """What was given here, for the server; the rest it reads where this process did.

    It is for this terminal alone, so the keys that were made for others do not lock it.
    """
    flags = ["--model", config.model] if "model" in settings.flags and config.model else []
    given = {name: value for name, value in settings.flags.items() if name != "model"}
    if settings.file is not None:
        flags += ["--config", str(settings.file)]
    return [*flags, *flags_of(given), "--keys-file", NO_FILE]


def _import_tui() -> Callable[..., int]:
    """Our terminal's `main`. Raises InvalidConfig when another package is in its way."""
    try:
        from tui.app import main as tui_main
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "tui":
            raise InvalidConfig(
                f"`mlxserve chat` needs the package {error.name.split('.')[0]!r}, which is not "
                "installed. Install mlxserve again to get it."
            ) from error
        raise InvalidConfig(_what_hides_our_tui()) from error
    return tui_main


def _what_hides_our_tui() -> str:
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
