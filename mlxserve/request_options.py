"""AnswerTerms: on what terms a prompt is answered, beside what is sampled. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.text.parsing.turn import AssistantTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTerms:
    """
    cache_salt: what is cached is shared only by requests with the same
    priority: lower goes first; waiting lifts a request by and by
    prefix_name: a named prefix that the prompt is put behind; its salt goes where none is given
    client: whose it is: a key, a user, an agent with its helpers; they share the engine fairly
    request_ids: what each answer is called in snapshots and logs; no two live ones are the same
    turn: tells thinking and calls of tools apart from text; without it all is text
    """

    cache_salt: str | None = None
    priority: int = 0
    prefix_name: str | None = None
    client: str = ""
    request_ids: Sequence[str | None] = ()
    turn: AssistantTurn | None = None
