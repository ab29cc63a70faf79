"""Plot a report: one panel per figure, one bar per contender, with its spread as an error bar."""

from __future__ import annotations

from pathlib import Path

from mlxserve.bench.report import Figure, Report
from mlxserve.core.errors import InvalidConfig
from mlxserve.system.extras import extra_command

_COLUMNS = 3


def draw(report: Report, file: Path) -> None:
    """Write a PNG. Raises InvalidConfig without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise InvalidConfig(
            f"--plot needs matplotlib: `{extra_command('bench')}`, or use --json instead"
        ) from error
    panels = panels_of(report)
    rows = -(-len(panels) // _COLUMNS)
    canvas = matplotlib.figure.Figure(figsize=(4 * _COLUMNS, 2.4 * rows), layout="constrained")
    canvas.suptitle(f"mlxserve bench {report.workload}")
    for place, (title, figures) in enumerate(panels.items(), start=1):
        axes = canvas.add_subplot(rows, _COLUMNS, place)
        medians = [figure.median for figure in figures]
        spread = (
            [figure.median - min(figure.values) for figure in figures],
            [max(figure.values) - figure.median for figure in figures],
        )
        axes.barh([figure.who or " " for figure in figures], medians, xerr=spread, capsize=3)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    canvas.savefig(file, dpi=110)


def panels_of(report: Report) -> dict[str, list[Figure]]:
    """Group figures by name. Ratios are shown in the table only."""
    panels: dict[str, list[Figure]] = {}
    for figure in report.figures:
        if not figure.who.startswith("÷"):
            panels.setdefault(figure.name, []).append(figure)
    return panels
