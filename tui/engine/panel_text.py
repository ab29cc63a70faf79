"""The lines of the engine panel. Pure functions from data to styled text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from textual.content import Content

from mlxserve.history.messages import AnswerStats
from mlxserve.system.counted import counted
from mlxserve.system.terminal_text import one_line
from tui.chat.stats_text import format_seconds
from tui.engine.page_map import FoldedMap, PageMapReplica
from tui.talk.engine_state import EngineStats, Progress, RequestStage

# State of a page -> its sign, colour and name. Distinct shapes, so that the map is readable without
# colour.
PAGE_STATES = {
    "f": ("·", "$text-quiet", "free"),
    "d": ("▣", "$secondary", "also on disk"),
    "c": ("□", "$secondary", "cached"),
    "a": ("■", "$success", "active"),
    "s": ("◆", "$primary", "shared"),
    "p": ("▲", "$accent", "pinned"),
}
NUM_OWNERS = 4  # colours for requests
_REMEMBERED = 256  # requests whose colours are kept
_BARS = "▁▂▃▄▅▆▇█"
_SCALE_WIDTH = 7  # width of the speed beside the bars
_DOING = {
    RequestStage.QUEUED: "waiting",
    RequestStage.LOADING: "loading",
    RequestStage.PREFILLING: "reading",
    RequestStage.DECODING: "writing",
}

_DISK_STATES = {"stalled": "does not answer", "failed": "has failed"}

_MISSES = {
    "new_text": "differs at token {at}: new text",
    "evicted": "differs at token {at}: its pages were evicted",
    "lost": "not reused from token {at} on: its pages on disk are unreadable",
    "other_salt": "nothing reused: cached under another cache salt",
    "below_one_page": "all full pages reused; the rest is under a page",
    "no_snapshot": "cached beyond token {at}, but no recurrent state was kept there",
    "inside_image": "cached beyond token {at}, but only to the middle of an image",
    "window_evicted": "cached beyond token {at}, but the last window there was evicted",
    "off": "nothing reused: the prefix cache is off",
}


def answer_lines(answer_stats: AnswerStats | None, width: int) -> Content:
    """The last answer's reuse of the cache, and its speeds."""
    if answer_stats is None:
        return _quiet("No answer yet.")
    lines = [*_reuse_lines(answer_stats, width)]
    speeds = []
    if answer_stats.first_token_seconds is not None:
        speeds.append(f"first token {format_seconds(answer_stats.first_token_seconds)}")
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


def sparkline(values: Sequence[float]) -> str:
    """Draw the values as bars of up to a cell, the largest the highest; 0 is none."""
    top = max(values, default=0)
    return "".join(
        _BARS[round((len(_BARS) - 1) * value / top)] if value else " " for value in values
    )


def _rate_line(words: str, rates: Sequence[float], width: int) -> Content:
    """Format a speed, its bars, and the speed of the highest bar."""
    # Without the blanks before the first bar: what looks the same is the same, and not drawn again.
    bars = sparkline(rates).lstrip()
    scale = f" ≤{max(rates):,.0f}" if bars else ""
    return Content.assemble(
        words.ljust(width - len(bars) - len(scale)), (bars, "$primary"), (scale, "$text-quiet")
    )


def now_lines(stats: EngineStats, history: Sequence[EngineStats] = (), width: int = 0) -> Content:
    """Describe the engine now, and its speeds over the last seconds as far as there is room."""
    prefill = f"prefill {stats.prefill_rate:,.0f} tok/s"
    decode = f"decode {stats.decode_rate:,.1f} tok/s"
    room = max(0, width - max(len(prefill), len(decode)) - 1 - _SCALE_WIDTH)
    past = history[-room:] if room else ()
    rates = Content("\n").join(
        [
            _rate_line(prefill, [stats_then.prefill_rate for stats_then in past], width),
            _rate_line(decode, [stats_then.decode_rate for stats_then in past], width),
        ]
    )
    memory = f"memory {format_size(stats.active_size)}, peak {format_size(stats.peak_size)}"
    cache = f"KV cache {format_size(stats.kv_cache_size)} {one_line(stats.kv_cache_dtype, 20)}"
    if stats.disk_limit:
        cache += f" · on disk {format_size(stats.disk_size)} of {format_size(stats.disk_limit)}"
        if stats.disk_state in _DISK_STATES:
            cache += f" ({_DISK_STATES[stats.disk_state]})"
    if stats.num_state_slots:
        cache += f" · states kept {stats.num_snapshots:,} of {stats.num_state_slots:,}"
    preempted = f"preemptions {stats.num_preemptions:,} · cache hits {stats.hit_rate:.0%}"
    queue = f"running {stats.num_running} · waiting {stats.num_waiting}"
    lines = (Content(queue), rates, *(Content(line) for line in (preempted, memory, cache)))
    return Content("\n").join(lines)


def request_lines(
    requests: Sequence[Progress],
    own: str | None,
    width: int,
    max_requests: int,
    colour_of: Callable[[str], int],
) -> Content:
    """Describe each of the first requests: owner, prompt progress, answer."""
    lines = []
    for request in requests[:max_requests]:
        name = "this chat" if request.request_id == own else request.request_id[:9]
        words = f" {name:9} {_DOING[request.stage]}"
        if request.stage is RequestStage.QUEUED and request.position is not None:
            words += f" {request.position}"
        if request.stage is RequestStage.DECODING:
            words += (
                f" {counted(request.num_outputs, 'token')}, {counted(request.num_pages, 'page')}"
            )
        colour = f"$owner-{colour_of(request.request_id)}"
        parts: list[Content | tuple[str, str]] = [("■", colour), (words, "")]
        if (fraction := request.fraction) is not None:
            room = max(4, min(16, width - len(words) - 7))
            full = round(room * fraction)
            parts += [(" " + "━" * full, "$primary"), ("┄" * (room - full), "$text-quiet")]
            parts.append((f" {fraction:.0%}", ""))
        lines.append(Content.assemble(*parts))
    if len(requests) > max_requests > 0:
        lines[-1:] = [_quiet(f"and {len(requests) - max_requests + 1} more")]
    return Content("\n").join(lines)


class OwnerColours:
    """Colour numbers of requests and their pages.

    Each request keeps its own, and consecutive ones differ, as many as there are colours.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, request_id: str) -> int:
        if request_id not in self._numbers:
            if len(self._numbers) >= _REMEMBERED:
                del self._numbers[next(iter(self._numbers))]
            number = crc32(request_id.encode()) % NUM_OWNERS  # whichever is seen first
            taken = list(self._numbers.values())[1 - NUM_OWNERS :]
            while number in taken:
                number = (number + 1) % NUM_OWNERS
            self._numbers[request_id] = number
        return self._numbers[request_id]


def legend(pages: PageMapReplica, num_own: int, folded: FoldedMap) -> Content:
    """Return the map's signs, and the number of pages in each state."""
    signs = [_sign(state, pages.count(state)) for state in "asc"]
    on_disk = "d" if pages.count("d") else ""
    rest = [_sign(state, pages.count(state)) for state in "pf" + on_disk]
    own = Content.assemble(("■", "reverse"), f" this chat {num_own:,}")
    scale = f"{pages.num_pages:,} pages of {pages.page_size} tokens"
    if folded.pages_per_cell > 1:
        scale += f"; each cell is {folded.pages_per_cell:,} pages and shows the most used"
    if folded.num_left_out:
        scale += f"; the last {folded.num_left_out:,} are unused"
    gap = Content("  ")
    return Content("\n").join([gap.join(signs), gap.join([*rest, own]), _quiet(scale)])


def window_legend(pages: PageMapReplica) -> Content:
    """Return the number of pages in each state, for sliding-window layers."""
    counts = {
        name: pages.count_windows(state)
        for state, (_, _, name) in PAGE_STATES.items()
        if state not in "fd"
    }
    numbers = [f"{name} {count:,}" for name, count in counts.items() if count]
    return _quiet(" · ".join([counted(pages.num_window_pages, "page"), *numbers]))


def _sign(state: str, count: int) -> Content:
    sign, colour, name = PAGE_STATES[state]
    return Content.assemble((sign, colour), f" {name} {count:,}")


def format_size(size: int) -> str:
    """Format bytes: `812 MiB`, `3.4 GiB`."""
    gib = size / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size / (1 << 20):.0f} MiB"


def _quiet(words: str) -> Content:
    return Content.styled(words, "$text-quiet")


def _wrapped(parts: list[str], width: int) -> list[str]:
    """Join the parts by dots, on as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines
