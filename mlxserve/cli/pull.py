"""`mlxserve pull`: downloads a model, with progress as JSON for programs."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
import os
import sys
import threading
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.completion import well_known_models
from mlxserve.cli.models import Json, card_of, fit_of, memory_for
from mlxserve.cli.streams import print_safe
from mlxserve.core.errors import MlxServeError

if TYPE_CHECKING:
    from mlxserve.hub.files import ModelFiles

_REPORT_SECONDS = 0.5


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="A short name (qwen3.5:4b), a repository (mlx-community/Qwen3.5-4B-MLX-4bit) or one of its GGUF "
            "files (hf.co/org/repository:Q4_K_M).",
            autocompletion=well_known_models,
        ),
    ],
    json: Json = False,
) -> None:
    """Download a model. An interrupted download resumes where it stopped."""
    # Only plain HTTP can resume a partial download.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    if json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from mlxserve.hub.files import pull_model
    from mlxserve.hub.known_models import draft_of, repository_of

    if not Path(name).expanduser().exists():
        name = repository_of(name) or name
    done = threading.Event()
    reporting = threading.Thread(target=_report, args=(name, done), name="pull-report", daemon=True)
    if json:
        reporting.start()
    try:
        files = pull_model(name)
    except MlxServeError as error:
        if not json:
            raise
        _say(error=str(error))
        sys.exit(1)
    finally:
        done.set()
        if json:
            reporting.join()
    if json:
        _say(path=str(files.place), **_card(files))
    else:
        print_safe(f"{files.name} is in {files.place}")
        if draft := draft_of(files.name):
            print_safe(
                f"{draft} drafts for it: the same answers, and faster where that pays. `mlxserve pull {draft}` downloads "
                f"it, --draft-model {draft} uses it."
            )


def _card(files: "ModelFiles") -> dict[str, Any]:
    """Return the model as `mlxserve models --json` does, plus memory; empty if unknown."""
    from mlxserve.core.config import EngineConfig
    from mlxserve.hub import catalog

    entry = catalog.entry_of(files.name, catalog.Origin.DOWNLOADED, files.place)
    if entry is None:
        return {"name": files.name}
    engine = EngineConfig()
    return {**card_of(entry, fit_of(entry, engine)), "memory": memory_for(engine).nbytes}


def _report(name: str, done: threading.Event) -> None:
    """Print the bytes downloaded so far and the total, until the download is done."""
    total = _total_size(name)
    while not done.wait(_REPORT_SECONDS):
        _say(done=_present_size(name), total=total)


def _total_size(name: str) -> int | None:
    """Bytes to download; None if the hub does not answer: the download itself reports that."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    from mlxserve.hub.files import DATA_FILES
    from mlxserve.hub.gguf_places import hub_reference

    if hub_reference(name) is not None:
        # One of the repository's files, which the download chooses.
        return None
    try:
        files: Iterable[Any] = HfApi().model_info(name, files_metadata=True).siblings or ()
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError):
        return None
    wanted = (f for f in files if any(fnmatch(f.rfilename, pattern) for pattern in DATA_FILES))
    return sum(f.size or 0 for f in wanted)


def _present_size(name: str) -> int:
    from mlxserve.hub.gguf_places import hub_reference
    from mlxserve.hub.hub_cache import repository_folder

    reference = hub_reference(name)
    folder = repository_folder(reference[0] if reference else name)
    return sum(_size(file) for file in (folder / "blobs").glob("*"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        # A partial file that was just renamed.
        return 0


def _say(**content: object) -> None:
    print_safe(json_format.dumps(content))
