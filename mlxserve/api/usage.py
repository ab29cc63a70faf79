"""The `cache` object that every dialect's usage contains: what the prefix cache did for a prompt."""

from __future__ import annotations

from typing import Any

from mlxserve.request import CacheReport


def cache_report(cache: CacheReport | None) -> dict[str, Any] | None:
    """Why no more of the prompt was cached.

    None for a request with several prompts, and for one that ended before it was started.
    """
    if cache is None:
        return None
    return {
        "num_pages": cache.num_pages,
        "num_tokens": cache.num_tokens,
        "differs_at": cache.differs_at,
        "reason": str(cache.reason),
    }
