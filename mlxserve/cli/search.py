"""`mlxserve search`: models of the Hugging Face hub by words in their names."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.models import Json
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import MlxServeError

if TYPE_CHECKING:
    from mlxserve.hub.known_models import KnownModel

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
    """Search for models: the well-known ones, then the Hugging Face hub's, those with most downloads first.

    `mlxserve pull NAME` downloads one, and says if it is of a kind that cannot be served.
    """
    from mlxserve.hub.known_models import matching

    known = [] if json else matching(" ".join(words))
    for model in known:
        print_safe(_known_row(model))
    cards = [card for kind in _KINDS for card in _found(" ".join(words), kind, limit)]
    if json:
        print_safe(json_format.dumps(cards))
        return
    if not cards and not known:
        print_safe(
            f"No model for MLX or in GGUF is called {' '.join(words)!r}. Try fewer words; "
            "`mlxserve models` lists well-known ones."
        )
        return
    for card in cards:
        print_safe(f"{card['name']:64} {card['format']:5} {card['downloads']:>12,} downloads")
    print_safe("`mlxserve pull NAME` downloads one.")


def _known_row(model: "KnownModel") -> str:
    size = f"{model.weight_size / 1e9:.2f} GB" if model.weight_size else model.purpose
    return f"{model.repository:64} {model.names[0]:24} {size:>9}"


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
