"""`mlxserve use`: sets the default model, `model` in the configuration file."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli.completion import models_here
from mlxserve.cli.settings import configuration_file
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidConfig, ModelNotFound
from mlxserve.system.files import make_own_folder, replace_file

_VARIABLE = "MLXSERVE_MODEL"
_LINE = re.compile(r"^[ \t]*model[ \t]*=.*$", re.MULTILINE)
_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)  # start of a table


def use(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A short name (qwen3.5:4b), a repository, a folder, a GGUF file, or mlxserve-mini.",
            autocompletion=models_here,
        ),
    ] = None,
) -> None:
    """Choose the model that chat, run and serve take when none is named.

    Without a name, show which one that is. It is kept as `model` in config.toml.
    """
    file = configuration_file(os.environ)
    if name is None:
        _show(file)
        return
    model = _checked(name)
    remember(model, file)
    print_safe(f"chat, run, serve and launch use {model} from now on ({file}).")
    if not _is_here(model):
        print_safe(f"It is not on this machine yet: `mlxserve pull {name}` downloads it.")
    if variable := os.environ.get(_VARIABLE):
        print_safe(f"{_VARIABLE} is set here and goes before it: {variable}")
    from mlxserve.cli.running_servers import running_servers, serves

    for server in running_servers():
        if not serves(server, model):
            print_safe(
                f"The server at {server.url} keeps {server.model} until it is started again "
                "(`mlxserve stop`)."
            )


def remember(model: str, file: Path) -> None:
    """Write the model into the configuration file, keeping all other lines.

    Raises InvalidConfig.
    """
    # A link, such as one into a folder of settings, stays one.
    file = file.resolve()
    try:
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        wanted = {**tomllib.loads(old), "model": model}
        new = _with_line(old, f"model = {json.dumps(model, ensure_ascii=False)}")
        if tomllib.loads(new) != wanted:
            raise ValueError("its `model` is not on a line of its own")
        make_own_folder(file.parent)
        replace_file(file, new.encode())
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"The model cannot be written into {file}: {error}. Write `model = {json.dumps(model)}` "
            "at its top, or pass --model."
        ) from error


def _with_line(text: str, line: str) -> str:
    """Replace the line of the model, or insert it before all others."""
    table = _TABLE.search(text)
    end = table.start() if table is not None else len(text)
    top, rest = text[:end], text[end:]
    changed, count = _LINE.subn(lambda _: line, top, count=1)
    return (changed if count else f"{line}\n{top}") + rest


def _checked(name: str) -> str:
    """Return the name as the file stores it: absolute paths, and repositories for short names.

    Raises ModelNotFound for a name that cannot be one, and UnsupportedModel for a folder.
    """
    from mlxserve.hub.embedded import MODEL_NAME
    from mlxserve.hub.files import existing_path, find_model, repository_named
    from mlxserve.hub.gguf_places import find_gguf, hub_reference

    if name == MODEL_NAME:
        return name
    if (path := existing_path(name)) is not None:
        find_model(name)
        return str(path.resolve())
    if hub_reference(name) is not None or find_gguf(name) is not None:
        return name
    return repository_named(name)


def _is_here(model: str) -> bool:
    from mlxserve.hub.embedded import MODEL_NAME
    from mlxserve.hub.files import existing_path
    from mlxserve.hub.gguf_places import find_gguf
    from mlxserve.hub.hub_cache import snapshots

    if model == MODEL_NAME or existing_path(model) is not None:
        return True
    try:
        return find_gguf(model) is not None or bool(snapshots(model))
    except ModelNotFound:
        # Another quantisation of a repository that is here.
        return False


def _show(file: Path) -> None:
    from mlxserve.hub.embedded import MODEL_NAME

    variable = os.environ.get(_VARIABLE)
    if variable:
        print_safe(f"{variable} ({_VARIABLE} in the environment)")
        _propose()
        return
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"The configuration {file} cannot be read: {error}") from error
    if (model := content.get("model")) is not None:
        print_safe(f"{model} ({file})")
    else:
        print_safe(f"{MODEL_NAME}, the included model. `mlxserve use NAME` chooses another.")
    _propose()


def _propose() -> None:
    """Print which models of the catalogue suit this machine."""
    from mlxserve.cli.models import recommended_for
    from mlxserve.core.config import EngineConfig
    from mlxserve.hub.known_models import known_models

    suited = recommended_for(EngineConfig())
    if suited.best is None:
        return
    named = {"best": suited.best, "faster": suited.faster}
    rows = {title: known_models()[name] for title, name in named.items() if name is not None}
    words = [f"{m.names[0]} ({m.weight_size / 1e9:.1f} GB)" for m in rows.values()]
    faster = f"; {words[1]} answers faster" if len(words) > 1 else ""
    print_safe(f"{words[0]} suits this machine{faster}. `mlxserve models` lists others.")
