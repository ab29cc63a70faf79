"""`mlxserve search`: models of the Hugging Face hub by words in their names."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
from typing import Annotated, Any

import typer

from mlxserve.cli.models import Json
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import MlxServeError

_USUAL_LIMIT = 20
# What `pull` takes: conversions for MLX, and GGUF files with their quantisation added to the name.
_KINDS = ("mlx", "gguf")


def search(
    words: Annotated[list[str], typer.Argument(help="Words in the model's name: gemma 4b.")],
    limit: Annotated[
        int, typer.Option(min=1, max=200, help="Most models of each kind to list.")
    ] = _USUAL_LIMIT,
    json: Json = False,
) -> None:
    """Search the Hugging Face hub for models, those with most downloads first.

    `mlxserve pull NAME` downloads one, and says if it is of a kind that cannot be served.
    """
    cards = [card for kind in _KINDS for card in _found(" ".join(words), kind, limit)]
    if json:
        print_safe(json_format.dumps(cards))
        return
    if not cards:
        print_safe(
            f"No model for MLX or in GGUF is called {' '.join(words)!r}. Try fewer words; "
            "`mlxserve models` lists well-known ones."
        )
        return
    for card in cards:
        print_safe(f"{card['name']:64} {card['format']:5} {card['downloads']:>12,} downloads")
    print_safe("`mlxserve pull NAME` downloads one.")


def _found(words: str, kind: str, limit: int) -> list[dict[str, Any]]:
    """Search the hub. Raises MlxServeError without a network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        models = list(HfApi().list_models(search=words, filter=kind, sort="downloads", limit=limit))
    except (OfflineModeIsEnabled, HfHubHTTPError, HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise MlxServeError(
            f"The hub cannot be searched now: {reason}. Check the network connection; "
            "`mlxserve models` lists what is here and well-known models without one."
        ) from error
    return [
        {"name": model.id, "format": kind, "downloads": model.downloads or 0} for model in models
    ]
