"""Token counts of a reply, and the `cache` and `speculation` objects that every dialect's usage contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mlxserve.request import CacheReport, SpeculationReport

if TYPE_CHECKING:
    from mlxserve.text.deltas import Usage


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token counts of a request, over all its answers."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0  # tokens of the completion that are reasoning
    cache: CacheReport | None = None  # the prompt's report, if there is only one prompt
    speculation: SpeculationReport | None = None  # sums over all answers; None if drafts are off
    images: int = 0  # tokens of the prompt that are images

    @classmethod
    def from_usages(cls, usages: Mapping[int, Usage], num_choices: int = 1) -> Tokens:
        """Sum the answers by index; every `num_choices` in a row share a prompt."""
        prompts = [usage for index, usage in usages.items() if index % num_choices == 0]
        return cls(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages.values()),
            sum(usage.cached_tokens for usage in prompts),
            sum(usage.reasoning_tokens for usage in usages.values()),
            prompts[0].cache if len(prompts) == 1 else None,
            _together([usage.speculation for usage in usages.values()]),
            sum(usage.image_tokens for usage in prompts),
        )

    @property
    def prompt_details(self) -> dict[str, int]:
        """OpenAI's `prompt_tokens_details`."""
        images = {"image_tokens": self.images} if self.images else {}
        return {"cached_tokens": self.cached, **images}


def _together(reports: Sequence[SpeculationReport | None]) -> SpeculationReport | None:
    known = [report for report in reports if report is not None]
    if not known:
        return None
    return SpeculationReport(
        sum(report.num_drafted for report in known),
        sum(report.num_accepted for report in known),
        tuple(map(sum, zip_longest(*(report.accepted_at for report in known), fillvalue=0))),
    )


def reports(tokens: Tokens) -> dict[str, Any]:
    """The members of every dialect's usage besides its own counts."""
    members: dict[str, Any] = {"cache": cache_report(tokens.cache)}
    if (speculation := tokens.speculation) is not None:
        members["speculation"] = {
            "drafted_tokens": speculation.num_drafted,
            "accepted_tokens": speculation.num_accepted,
            "accepted_by_position": list(speculation.accepted_at),
        }
    return members


def cache_report(cache: CacheReport | None) -> dict[str, Any] | None:
    """The reason why no more of the prompt was cached.

    None for a request with several prompts, and for one that ended before it was started.
    """
    if cache is None:
        return None
    return {
        "num_pages": cache.num_pages,
        "page_size": cache.page_size,
        "num_tokens": cache.num_tokens,
        "tokens_from_disk": cache.num_from_disk,
        "tokens_from_store": cache.num_from_store,
        "differs_at": cache.differs_at,
        "reason": str(cache.reason),
    }
