"""`mlxserve models`, also called `list`: the models on this machine and well-known ones."""

# Annotations are read by typer at run time, so this file does not postpone them.

import json as json_format
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.settings import Settings
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import MlxServeError

if TYPE_CHECKING:
    from mlxserve.hub.catalog import Entry, MemoryFit
    from mlxserve.hub.recommendation import Recommendation
    from mlxserve.system.device_memory import MemoryLimit

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def models(settings: Settings, json: Json = False) -> None:
    """List the models on this machine, also those of Ollama and LM Studio, and well-known ones.

    `mlxserve search` finds others. Adapters are listed where the options name some. A model fits if its weights and the
    context that it was trained for (or --max-model-len) fit in the memory that a server with these
    options would use, next to the weights and the cache of --draft-model.
    """
    from mlxserve.hub import catalog

    engine = settings.build(EngineConfig)
    memory = memory_for(engine)
    context = engine.scheduler.max_model_len
    known, suited = catalog.entries(), recommended_for(engine)
    drafter = _drafter_in(known, engine)
    here = [entry for entry in known if entry.source is not catalog.Origin.SUGGESTED]
    others = [entry for entry in known if entry.source is catalog.Origin.SUGGESTED]
    others.sort(key=lambda entry: suited.rank(entry.name))  # those that suit it come first
    rows = [(entry, fit_of(entry, engine, drafter)) for entry in (*here, *others)]
    adapters = _adapters(settings)
    if json:
        cards = [card_of(entry, fit) for entry, fit in rows]
        card = {
            "memory": memory.nbytes,
            "context": context,
            "disk_free": catalog.disk_free(),
            "recommended": {"best": suited.best, "faster": suited.faster},
        }
        print_safe(json_format.dumps({**card, "models": cards, "adapters": adapters}))
        return
    _print("On this machine", rows[: len(here)], suited)
    if adapters:
        print_safe("Adapters, as `serve` offers them:")
    for adapter in adapters:
        print_safe(f"  {adapter['name']:58} {adapter['refusal'] or adapter['folder']}")
    _print("To download with `mlxserve pull NAME`", rows[len(here) :], suited)
    if any(fit.num_windows for _, fit in rows):
        print_safe(
            "A window is what some layers keep of one running request, or of a conversation to be continued: the last "
            "tokens only. Windows and tokens of context share memory, which moves between them (docs/tuning.md)."
        )
    if suited.best is not None:
        print_safe(
            "★ suits this machine best, with 16,384 tokens of context beside other programs; ☆ answers faster."
        )


def _print(title: str, rows: "Sequence[tuple[Entry, MemoryFit]]", suited: "Recommendation") -> None:
    from mlxserve.hub.known_models import short_name

    print_safe(f"{title}:")
    print_safe(f"  {'Model':58} {'Short name':26} {'From':10} {'Kind':4} {'Size':>9}  Context")
    for entry, fit in rows:
        sign = "★" if entry.name == suited.best else "☆" if entry.name == suited.faster else " "
        size = f"{entry.weight_size / 1e9:.2f} GB"
        purpose = f" ({made_for})" if (made_for := _made_for(entry)) else ""
        short = short_name(entry.name) or ""
        print_safe(
            f"{sign} {entry.name:58} {short:26} {entry.source:10} {entry.format:4} {size:>9}  {fit_text(fit)}{purpose}"
        )


def _made_for(entry: "Entry") -> str:
    from mlxserve.hub.known_models import draft_of

    what = [
        entry.purpose,
        "vision" if entry.has_vision else "",
        "head" if entry.has_head else "",
        "draft repository" if draft_of(entry.name) else "",
    ]
    return ", ".join(filter(None, what))


def recommended_for(engine: EngineConfig) -> "Recommendation":
    """Return which models of the catalogue suit a server with these options."""
    from mlxserve.hub.recommendation import recommend
    from mlxserve.system import machine

    return recommend(
        memory_for(engine),
        is_metal=machine.is_metal(),
        options=engine.scheduler,
        in_8_bits=engine.kv_cache_dtype == "q8",
    )


def _adapters(settings: Settings) -> list[dict[str, str | None]]:
    """Configured adapters: each with its folder, and why it would be refused."""
    from mlxserve.hub.adapter_files import find_adapter
    from mlxserve.hub.embedded import MODEL_NAME

    cards: list[dict[str, str | None]] = []
    for served in settings.models():
        model = served.name or served.config.model or MODEL_NAME
        for name, folder in served.config.adapters.items():
            refusal = None
            try:
                find_adapter(name, folder)
            except MlxServeError as error:
                refusal = str(error)
            cards.append({"name": f"{model}:{name}", "folder": folder, "refusal": refusal})
    return cards


def memory_for(engine: EngineConfig) -> "MemoryLimit":
    """Return the memory that a server with these options would plan with."""
    from mlxserve.system import machine

    return machine.memory().limit(engine.gpu_memory_utilization)


def _drafter_in(known: "Sequence[Entry]", engine: EngineConfig) -> "Entry | None":
    """Return the draft model of these options, if it is one of the models in the list."""
    from mlxserve.hub.known_models import repository_of

    if engine.draft_model is None or not engine.max_draft:
        return None
    names = {engine.draft_model, repository_of(engine.draft_model)}
    return next((entry for entry in known if entry.name in names), None)


def fit_of(entry: "Entry", engine: EngineConfig, drafter: "Entry | None" = None) -> "MemoryFit":
    from mlxserve.hub.catalog import memory_fit
    from mlxserve.system import machine

    return memory_fit(
        entry,
        memory=memory_for(engine),
        is_metal=machine.is_metal(),
        options=engine.scheduler,
        in_8_bits=engine.kv_cache_dtype == "q8",
        drafter=drafter,
    )


def fit_text(fit: "MemoryFit") -> str:
    if not fit.num_tokens:
        return "too large"
    text = "fits" if fit.fits else f"{fit.num_tokens:,} of {fit.context:,} tokens"
    if fit.num_windows is None:
        return text
    return f"{text}, {'1 window' if fit.num_windows == 1 else f'up to {fit.num_windows} windows'}"


def card_of(entry: "Entry", fit: "MemoryFit") -> dict[str, Any]:
    from mlxserve.hub.known_models import draft_of, short_name

    return {
        "name": entry.name,
        "short_name": short_name(entry.name),
        "source": str(entry.source),
        "format": str(entry.format),
        "purpose": entry.purpose or "completion",
        "vision": entry.has_vision,
        "head": entry.has_head,
        "draft": draft_of(entry.name) or None,
        "weight_size": entry.weight_size,
        "needed": fit.needed,
        "context": fit.context,
        "fits": fit.fits,
        "num_tokens": fit.num_tokens,
        "num_windows": fit.num_windows,
    }
