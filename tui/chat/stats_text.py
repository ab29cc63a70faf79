"""Formats statistics of answers, for the status line and the end of an answer."""

from __future__ import annotations

from mlxserve.history.messages import AnswerStats, State, StoredMessage, Version
from mlxserve.system.counted import counted

_ENDINGS = {
    State.STOPPED: "stopped",
    State.CUT: "cut off at the length limit",
    State.REPEATED: "stopped: it repeated itself",
}


def stats_lines(stats: AnswerStats, *, is_live: bool = False) -> tuple[str, ...]:
    """Format the statistics, longest form first, for decreasing room.

    Such as `42.1 tok/s · 2.4 tokens a step · first token 0.21 s · cached 1,024 of 1,060 prompt
    tokens`, as far as known. For mlxserve the prompt is counted in pages of its cache: `312 pages of
    313 from the cache`.
    """
    speed = drafts = first = prompt = short_prompt = ""
    if stats.tokens_per_second is not None:
        # Until the answer ends, the tokens are estimated from the number of pieces.
        speed = f"{'about ' if is_live else ''}{stats.tokens_per_second:.1f} tok/s"
    if stats.tokens_per_step is not None:
        drafts = f"{stats.tokens_per_step:.1f} tokens a step"
    if stats.first_token_seconds is not None:
        first = f"first token {format_seconds(stats.first_token_seconds)}"
    if stats.prompt_tokens is not None:
        prompt = short_prompt = f"{stats.prompt_tokens:,} prompt tokens"
        if (pages := stats.pages) is not None:
            short_prompt = f"cached {pages[0]:,} of {pages[1]:,} pages"
            prompt = f"{counted(pages[0], 'page')} of {pages[1]:,} from the cache"
        elif stats.cached_tokens is not None:
            short_prompt = f"cached {stats.cached_tokens:,} of {stats.prompt_tokens:,}"
            prompt = f"{short_prompt} prompt tokens"
    choices = (
        (speed, drafts, first, prompt),
        (speed, drafts, first, short_prompt),
        (speed, short_prompt),
        (speed,),
    )
    return tuple(" · ".join(part for part in parts if part) for parts in choices)


def ending_line(message: StoredMessage, version: Version) -> str:
    """Describe how a message ended, and its version if there are several."""
    parts = []
    if (ending := _ENDINGS.get(message.state)) is not None:
        parts.append(ending)
    if len(version.sibling_ids) > 1:
        parts.append(f"‹ version {version.index + 1} of {len(version.sibling_ids)} ›")
    return " · ".join(parts)


def bar(fraction: float, width: int) -> str:
    """Draw a line of this width whose first part is thicker."""
    full = round(width * min(1.0, max(0.0, fraction)))
    return "━" * full + "┄" * (width - full)


def format_seconds(seconds: float) -> str:
    """Format seconds: `0.21 s`, `4.2 s`, `2 min 05 s`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
