"""Which models suit a machine: the first of the catalogue's order that leaves room for other programs.

A model suits if its weights, a step and 16,384 tokens fit into the memory that models may take, and five eighths of the
machine's memory, at most 14 GB, stay for macOS and other programs. So the models follow that were measured as usable on
Macs of 8 to 48 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from mlxserve.core.config import SchedulerConfig
from mlxserve.hub.catalog import Entry, memory_fit, well_known
from mlxserve.hub.known_models import KnownModel, known_models
from mlxserve.system.device_memory import MemoryLimit

CONTEXT = 16_384  # tokens
_SHARE_OF_OTHERS = Fraction(5, 8)
_MAX_OF_OTHERS = 14_000_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Repositories for this machine; None where the catalogue has nothing that suits it.

    best: the first in the order of the catalogue
    faster: the first one after it that answers quickly
    others: more that fit, each of another family, best first
    """

    best: str | None = None
    faster: str | None = None
    others: tuple[str, ...] = ()

    def rank(self, repository: str) -> int:
        """Return the place of a model in a list that begins with what is recommended."""
        names = (self.best, self.faster, *self.others)
        return names.index(repository) if repository in names else len(names)


def recommend(
    memory: MemoryLimit,
    *,
    is_metal: bool,
    options: SchedulerConfig | None = None,
    in_8_bits: bool = False,
) -> Recommendation:
    """Return the models that a server with these options should run in this memory."""
    options = replace(options or SchedulerConfig(), max_model_len=CONTEXT)
    others = min(_MAX_OF_OTHERS, int(memory.total * _SHARE_OF_OTHERS))
    suitable: list[KnownModel] = []
    for model, entry in _writers():
        fit = memory_fit(
            entry, memory=memory, is_metal=is_metal, options=options, in_8_bits=in_8_bits
        )
        if fit.fits and fit.needed <= memory.total - others:
            suitable.append(model)
    if not suitable:
        return Recommendation()
    best, *rest = suitable
    faster = next((model for model in rest if model.is_fast), None)
    shown = {_family(best), _family(faster) if faster is not None else ""}
    more: list[str] = []
    for model in rest:
        if _family(model) not in shown:
            shown.add(_family(model))
            more.append(model.repository)
    return Recommendation(best.repository, faster.repository if faster else None, tuple(more))


def _writers() -> Iterator[tuple[KnownModel, Entry]]:
    """Yield this year's models that write, best first."""
    entries = {entry.name: entry for entry in well_known()}
    for model in known_models().values():
        if model.config is not None and not model.is_earlier:
            yield model, entries[model.repository]


def _family(model: KnownModel) -> str:
    return model.names[0].partition(":")[0]
