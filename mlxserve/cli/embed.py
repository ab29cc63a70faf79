"""`mlxserve embed`: texts as vectors, by a running server."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json
import sys
from typing import Annotated

import typer

from mlxserve.cli.completion import served_models
from mlxserve.cli.piped import piped_text
from mlxserve.cli.remote import Url, ask, url_of
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import InvalidRequest


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(help="The texts; without one, each line of stdin is one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model; by default the server's first.",
            autocompletion=served_models,
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Print the vector of each text as a JSON array on a line, computed by a running server."""
    if not texts:
        if sys.stdin.isatty():
            raise InvalidRequest("There is no text. Pass one as an argument, or pipe lines in.")
        texts = [line for line in piped_text().splitlines() if line.strip()]
    if not texts:
        raise InvalidRequest("There is no text: stdin is empty.")
    base = url_of(url, model)
    name = model or ask(base, "GET", "/v1/models")["data"][0]["id"]
    reply = ask(base, "POST", "/v1/embeddings", {"model": name, "input": texts})
    for item in sorted(reply["data"], key=lambda item: item["index"]):
        print_safe(json.dumps(item["embedding"]))
