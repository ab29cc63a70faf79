"""RequestOptions: how a request runs beside others, apart from how its tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import check_whole
from mlxserve.request import BACKGROUND
from mlxserve.text.parsing.turn import AssistantTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of a request beside its sampling, validated on construction.

    cache_salt: only requests with the same salt share cached pages
    priority: lower runs first, and waiting raises a request step by step; "background" is a low one
    prefix_name: named prefix to prepend; its salt applies if none is given
    skip_prefix_cache: find no cached pages for the prompt, and publish none of it or of the answer
    client: owner of the request, such as a key or a user; clients share the engine fairly
    request_id: name in snapshots and logs, unique among live requests; the N-th of several answers
        is `request_id-N`; None numbers requests
    turn: tells reasoning and tool calls from text; None treats everything as text

    Raises InvalidParameter.
    """

    cache_salt: str | None = None
    priority: int = 0
    prefix_name: str | None = None
    skip_prefix_cache: bool = False
    client: str = ""
    request_id: str | None = None
    turn: AssistantTurn | None = None

    def __post_init__(self) -> None:
        for name in ("cache_salt", "prefix_name", "request_id"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InvalidParameter(name, f"must be a string or None, got {value!r:.80}")
        if not isinstance(self.skip_prefix_cache, bool):
            raise InvalidParameter(
                "skip_prefix_cache", f"must be True or False, got {self.skip_prefix_cache!r:.80}"
            )
        if self.skip_prefix_cache and self.prefix_name is not None:
            raise InvalidParameter(
                "skip_prefix_cache", "cannot be combined with prefix_name, which is in the cache"
            )
        if not isinstance(self.client, str):
            raise InvalidParameter("client", f"must be a string, got {self.client!r:.80}")
        object.__setattr__(self, "priority", _priority(self.priority))
        if not isinstance(self.turn, AssistantTurn | None):
            raise InvalidParameter("turn", f"must be an AssistantTurn, got {self.turn!r:.80}")


def _priority(value: object) -> int:
    if value == "background":
        return BACKGROUND
    check_whole(value, "priority")
    assert isinstance(value, int)
    return value
