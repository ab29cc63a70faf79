"""The plot and the table of runs: cached share and waiting by policy and number of servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rich.box import SIMPLE
from rich.table import Table

from tests.perf.simulation.fleet.fleet import FleetResult

_WIDTH, _HEIGHT = 900, 400
_TOP, _BOTTOM = 50, 350
_COLOURS = ("#6e7781", "#953800", "#bf8700", "#0969da", "#1a7f37", "#8250df", "#cf222e", "#1b7c83")


@dataclass(frozen=True, slots=True)
class _Panel:
    """One diagram: where it is, what it shows, and the ticks of its vertical axis, which ends with them."""

    left: float
    right: float
    title: str
    value: Callable[[FleetResult], float]
    ticks: tuple[float, ...]
    is_log: bool = False

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)


_PANELS = (
    _Panel(50, 330, "prompt tokens found", lambda r: r.share, (0.0, 0.25, 0.5, 0.75, 1.0)),
    _Panel(
        390,
        670,
        "seconds before a prompt is computed, 95 of 100",
        lambda r: r.wait(0.95),
        (1, 10, 100, 1000),
        True,
    ),
)


def figure(results: Sequence[FleetResult]) -> str:
    """Return an SVG with a line for each policy. All have runs with the same numbers of servers."""
    sizes = sorted({result.config.num_servers for result in results})
    labels = list(dict.fromkeys(result.config.label for result in results))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#1f2328">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
    ]
    for panel in _PANELS:
        parts += _axes(panel, sizes)
        for label, colour in zip(labels, _COLOURS, strict=False):
            own = [result for result in results if result.config.label == label]
            own.sort(key=lambda result: result.config.num_servers)
            parts.append(_line(panel, sizes, own, colour, is_dashed="+ store" in label))
    for row, (label, colour) in enumerate(zip(labels, _COLOURS, strict=False)):
        y = _TOP + 10 + 22 * row
        dash = ' stroke-dasharray="5 3"' if "+ store" in label else ""
        parts.append(
            f'<path d="M690 {y}h24" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="720" y="{y + 4}">{escape(label)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _x(panel: _Panel, sizes: Sequence[int], size: int) -> float:
    last = math.log10(sizes[-1]) or 1.0
    return panel.left + math.log10(size) / last * (panel.right - panel.left)


def _axes(panel: _Panel, sizes: Sequence[int]) -> list[str]:
    parts = [f'<text x="{panel.left}" y="{_TOP - 20}" font-weight="bold">{panel.title}</text>']
    for tick in panel.ticks:
        y = panel.y(tick)
        parts.append(
            f'<path d="M{panel.left} {y:.1f}H{panel.right}" stroke="#d1d9e0"/>'
            f'<text x="{panel.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for size in sizes:
        x = _x(panel, sizes, size)
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{size}</text>')
    middle = (panel.left + panel.right) / 2
    parts.append(f'<text x="{middle}" y="{_BOTTOM + 36}" text-anchor="middle">servers</text>')
    return parts


def _line(
    panel: _Panel,
    sizes: Sequence[int],
    results: Sequence[FleetResult],
    colour: str,
    *,
    is_dashed: bool,
) -> str:
    points = " ".join(
        f"{_x(panel, sizes, r.config.num_servers):.1f},{panel.y(panel.value(r)):.1f}"
        for r in results
    )
    dash = ' stroke-dasharray="5 3"' if is_dashed else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}>'
        f"<title>{escape(results[0].config.label)}</title></polyline>"
    )


def table(results: Sequence[FleetResult]) -> Table:
    """Return a row for each run."""
    shown = Table(box=SIMPLE, title_justify="left", padding=(0, 0, 0, 1))
    for column in (
        "policy",
        "servers",
        "found",
        "known",
        "from store",
        "wait p50",
        "wait p95",
        "busiest",
        "requests/s",
        "pages/s",
        "store MB/s",
        "refused",
        "sent again",
    ):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for result in results:
        config = result.config
        moved = (result.bytes_read + result.bytes_written) / config.seconds / 1e6
        wanted = result.bytes_written + result.bytes_refused
        shown.add_row(
            config.label,
            str(config.num_servers),
            f"{result.share:.3f}",
            f"{result.known_share:.3f}",
            f"{result.store_tokens / max(1, result.prompt_tokens):.3f}",
            f"{result.wait(0.5):.1f}",
            f"{result.wait(0.95):.1f}",
            f"{max(result.by_server) * config.num_servers / max(1, result.num_requests):.2f}",
            f"{result.requests_per_second:.1f}",
            f"{result.pages_per_second:.0f}",
            f"{moved:.0f}",
            f"{result.bytes_refused / max(1, wanted):.0%}",
            str(result.num_again),
        )
    return shown
