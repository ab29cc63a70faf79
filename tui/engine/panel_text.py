"""The lines of the engine panel. Pure functions from data to styled text."""

from __future__ import annotations

from textual.content import Content

from tui.chat.messages import AnswerStats
from tui.chat.stats_text import seconds_words
from tui.engine.page_map import FoldedMap, PageMapReplica
from tui.talk.engine_state import EngineStats

# Distinct shapes, so that the map is readable without colour.
GLYPHS = {"f": "·", "d": "▣", "c": "□", "a": "■", "s": "◆", "p": "▲"}
STYLES = {
    "f": "$text-quiet",
    "d": "$secondary",
    "c": "$secondary",
    "a": "$success",
    "s": "$primary",
    "p": "$accent",
}
_NAMES = {
    "f": "free",
    "d": "also on disk",
    "c": "cached",
    "a": "active",
    "s": "shared",
    "p": "pinned",
}

_MISSES = {
    "new_text": "differs at token {at}: new text",
    "evicted": "differs at token {at}: its pages were evicted",
    "lost": "not reused from token {at} on: its pages on disk are unreadable",
    "other_salt": "nothing reused: cached under another cache salt",
    "below_one_page": "all full pages reused; the rest is under a page",
    "no_snapshot": "cached beyond token {at}, but no recurrent state was kept there",
    "off": "nothing reused: the prefix cache is off",
}


def answer_lines(answer_stats: AnswerStats | None, width: int) -> Content:
    """The last answer's reuse of the cache, and its speeds."""
    if answer_stats is None:
        return _quiet("No answer yet.")
    lines = [*_reuse_lines(answer_stats, width)]
    speeds = []
    if answer_stats.first_token_seconds is not None:
        speeds.append(f"first token {seconds_words(answer_stats.first_token_seconds)}")
        computed = (answer_stats.prompt_tokens or 0) - (answer_stats.cached_tokens or 0)
        if computed > 0 and answer_stats.first_token_seconds > 0:
            speeds.append(f"prefill {computed / answer_stats.first_token_seconds:,.0f} tok/s")
    if answer_stats.tokens_per_second is not None:
        speeds.append(f"decode {answer_stats.tokens_per_second:,.1f} tok/s")
    lines += [Content(part) for part in _wrapped(speeds, width)]
    return Content("\n").join(lines)


def _reuse_lines(answer_stats: AnswerStats, width: int) -> list[Content]:
    prompt, cached = answer_stats.prompt_tokens, answer_stats.cached_tokens
    if prompt is None:
        return []
    if cached is None:
        return [_quiet(f"{prompt:,} prompt tokens; the server does not report cached ones")]
    full = round(width * min(cached, prompt) / prompt) if prompt else 0
    bar = Content.assemble(("█" * full, "$success"), ("░" * (width - full), "$text-quiet"))
    lines = [Content(f"reused {cached:,} of {prompt:,} tokens"), bar]
    if answer_stats.miss:
        lines.append(_quiet(_miss_words(answer_stats)))
    return lines


def _miss_words(answer_stats: AnswerStats) -> str:
    if answer_stats.miss == "new_text" and not answer_stats.differs_at:
        return "new text from the first token on"
    if answer_stats.miss == "below_one_page" and not answer_stats.cached_tokens:
        return "too short: only full pages are cached"
    at = "?" if answer_stats.differs_at is None else f"{answer_stats.differs_at:,}"
    return _MISSES.get(answer_stats.miss, "not reused: {miss}").format(
        at=at, miss=answer_stats.miss
    )


def now_lines(stats: EngineStats) -> Content:
    """The engine right now."""
    rates = f"prefill {stats.prefill_rate:,.0f} tok/s · decode {stats.decode_rate:,.1f} tok/s"
    memory = f"memory {size_words(stats.active_size)}, peak {size_words(stats.peak_size)}"
    cache = f"KV cache {size_words(stats.kv_cache_size)}"
    if stats.disk_limit:
        cache += f" · on disk {size_words(stats.disk_size)} of {size_words(stats.disk_limit)}"
    if stats.num_state_slots:
        cache += f" · states kept {stats.num_snapshots:,} of {stats.num_state_slots:,}"
    preempted = f"preemptions {stats.num_preemptions:,} · cache hits {stats.hit_rate:.0%}"
    queue = f"running {stats.num_running} · waiting {stats.num_waiting}"
    return Content("\n").join(Content(line) for line in (queue, rates, preempted, memory, cache))


def legend(pages: PageMapReplica, num_own: int, folded: FoldedMap) -> Content:
    """The signs of the map, and the number of pages in each state."""
    signs = [_sign(state, pages.count(state)) for state in "asc"]
    on_disk = "d" if pages.count("d") else ""
    rest = [_sign(state, pages.count(state)) for state in "pf" + on_disk]
    own = Content.assemble(("■", "reverse"), f" this chat {num_own:,}")
    scale = f"{pages.num_pages:,} pages of {pages.page_size} tokens"
    if folded.pages_per_cell > 1:
        scale += f"; each sign is {folded.pages_per_cell:,} pages and shows the most used"
    gap = Content("  ")
    return Content("\n").join(
        [gap.join(signs), gap.join([*rest, own]), _quiet(scale)],
    )


def _sign(state: str, count: int) -> Content:
    return Content.assemble((GLYPHS[state], STYLES[state]), f" {_NAMES[state]} {count:,}")


def size_words(size: int) -> str:
    """`812 MiB`, `3.4 GiB`."""
    gib = size / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size / (1 << 20):.0f} MiB"


def _quiet(words: str) -> Content:
    return Content.styled(words, "$text-quiet")


def _wrapped(parts: list[str], width: int) -> list[str]:
    """The parts joined by dots, on as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines
