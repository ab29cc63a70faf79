"""State of the engine: one request's progress, and statistics. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RequestStage(StrEnum):
    """A request's state in the engine."""

    QUEUED = "queued"
    LOADING = "loading"  # its cached pages are being read from disk
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class Progress:
    """One request's progress. `position` in the queue counts from 1; None if it is not queued."""

    request_id: str
    stage: RequestStage
    position: int | None
    num_computed: int
    num_to_compute: int
    num_outputs: int = 0  # tokens of the answer so far
    num_pages: int = 0

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Progress:
        """Parse a request's progress. Raises KeyError, TypeError or ValueError if malformed."""
        position = card["position"]
        return cls(
            str(card["id"]),
            RequestStage(card["state"]),
            None if position is None else int(position),
            int(card["num_computed"]),
            int(card["num_to_compute"]),
            int(card.get("output_tokens", 0)),
            int(card.get("num_pages", 0)),
        )

    @property
    def fraction(self) -> float | None:
        """Computed share of the prompt, 0 to 1; None outside of prefill."""
        if self.stage is not RequestStage.PREFILLING or not self.num_to_compute:
            return None
        return self.num_computed / self.num_to_compute


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine right now. Sizes in bytes; rates in tokens per second, over the last seconds."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    prefill_rate: float
    decode_rate: float
    hit_rate: float  # share of prompt tokens, since the server started
    kv_cache_size: int
    kv_cache_dtype: str
    active_size: int
    peak_size: int
    disk_size: int
    disk_limit: int  # 0 if nothing is kept on disk
    disk_state: str  # works, reads_only, stalled, failed
    num_state_slots: int  # 0 if the model has no recurrent states
    num_snapshots: int

    @property
    def has_requests(self) -> bool:
        return self.num_running > 0 or self.num_waiting > 0

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> EngineStats:
        """Parse the statistics. Raises KeyError, TypeError or ValueError if malformed."""
        rates, sizes = content["tokens_per_second"], content["bytes"]
        states, disk = content["recurrent_states"], content["disk_cache"]
        return cls(
            num_running=int(content["requests"]["running"]),
            num_waiting=int(content["requests"]["waiting"]),
            num_preemptions=int(content["num_preemptions"]),
            prefill_rate=float(rates["prefill"]),
            decode_rate=float(rates["generation"]),
            hit_rate=float(content["prefix_cache"]["hit_rate"]),
            kv_cache_size=int(sizes["kv_cache"]),
            kv_cache_dtype=str(content["kv_cache_dtype"]),
            active_size=int(sizes["active"]),
            peak_size=int(sizes["peak"]),
            disk_size=int(disk["bytes"]),
            disk_limit=int(disk["limit"]),
            disk_state=str(disk.get("state", "works")),
            num_state_slots=int(states["slots"]),
            num_snapshots=int(states["snapshots"]),
        )
