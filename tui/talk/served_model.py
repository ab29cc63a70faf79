"""The models that a server offers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as a server lists it."""

    name: str
    context: int | None = None  # tokens of a prompt and its answer; None: the server does not say
    is_ours: bool = False  # served by mlxserve, which knows the fields that only mlxserve has
    sees: bool | None = None  # images; None: the server does not say
