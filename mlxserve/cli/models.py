"""`mlxserve models` and `mlxserve pull`: lists models and downloads one."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
import os
import sys
import threading
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxserve.cli.settings import Settings
from mlxserve.config import EngineConfig
from mlxserve.errors import MlxServeError

_REPORT_SECONDS = 0.5

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def models(settings: Settings, json: Json = False) -> None:
    """List models and whether each fits in memory.

    Lists the models on this machine and well-known ones. A model fits if its weights and the
    context that it was trained for (or --max-model-len) fit in the memory that a server with these
    options would use.
    """
    from mlxserve import machine
    from mlxserve.hub import catalog

    engine = settings.build(EngineConfig)
    memory = int(machine.memory().working_set * engine.gpu_memory_utilization)
    context, is_metal = engine.scheduler.max_model_len, machine.is_metal()
    rows = [
        (entry, catalog.judge(entry, context=context, memory=memory, is_metal=is_metal))
        for entry in catalog.entries()
    ]
    if json:
        cards = [_card(entry, verdict) for entry, verdict in rows]
        print(json_format.dumps({"memory": memory, "context": context, "models": cards}))
        return
    for entry, verdict in rows:
        fit = "fits" if verdict.fits else f"{verdict.num_tokens:,} of {verdict.context:,} tokens"
        if not verdict.num_tokens:
            fit = "too large"
        size = f"{entry.weight_size / 1e9:.2f} GB"
        print(f"{entry.name:46} {entry.source:10} {size:>9}  {fit}")


def _card(entry: Any, verdict: Any) -> dict[str, Any]:
    return {
        "name": entry.name,
        "source": str(entry.source),
        "weight_size": entry.weight_size,
        "needed": verdict.needed,
        "context": verdict.context,
        "fits": verdict.fits,
        "num_tokens": verdict.num_tokens,
    }


def pull(
    name: Annotated[
        str, typer.Argument(help="A repository id, such as mlx-community/Qwen3-4B-4bit.")
    ],
    json: Json = False,
) -> None:
    """Download a model. An interrupted download resumes where it stopped."""
    # Only plain HTTP can resume a partial download.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    if json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from mlxserve.hub.files import pull_model

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
        _say(path=str(files.path))
    else:
        print(f"{name} is in {files.path}")


def _report(name: str, done: threading.Event) -> None:
    """Print the bytes downloaded so far and the total, until the download is done."""
    total = _total_size(name)
    while not done.wait(_REPORT_SECONDS):
        _say(done=_present_size(name), total=total)


def _total_size(name: str) -> int | None:
    """Bytes to download; None if the hub does not answer, which the download itself reports."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    from mlxserve.hub.files import DATA_FILES

    try:
        files: Iterable[Any] = HfApi().model_info(name, files_metadata=True).siblings or ()
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError):
        return None
    wanted = (f for f in files if any(fnmatch(f.rfilename, pattern) for pattern in DATA_FILES))
    return sum(f.size or 0 for f in wanted)


def _present_size(name: str) -> int:
    from mlxserve.hub.catalog import hub_cache

    blobs = hub_cache() / f"models--{name.replace('/', '--')}" / "blobs"
    return sum(_size(file) for file in blobs.glob("*"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # a partial file that was just renamed
        return 0


def _say(**content: object) -> None:
    print(json_format.dumps(content), flush=True)
