"""The table of families in docs/agents.md, computed from public chat templates by the product's own probes.

uv run python -m tests.templates.families      writes it; needs the archive of `public_templates`
"""

from __future__ import annotations

from mlxserve.text.controls import Controls
from mlxserve.text.parsing.formats import FORMATS, THINKING
from tests.templates.public_templates import MISSING, ROOT, caps_of, chosen, templates

PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- computed: python -m tests.templates.families -->", "<!-- end -->"
_HEAD = "| Template | Tools | Thinking | Efforts | Images |\n|---|---|---|---|---|"
_NONE = "–"


def table() -> str:
    rows = (
        f"| {' | '.join((name, *_columns(name)))} |" for name in sorted(templates(), key=str.lower)
    )
    return "\n".join([_HEAD, *rows])


def _columns(name: str) -> tuple[str, str, str, str]:
    caps = caps_of(name)
    return (
        _tools(name),
        _thinking(templates()[name], caps.controls),
        _efforts(caps.controls),
        "yes" if caps.images else _NONE,
    )


def _tools(name: str) -> str:
    row, reads_back = chosen(name)
    shows = "" if "tools" in templates()[name] else ", tools shown by mlxserve"
    if row is None:
        return _NONE if shows else "not read"
    return f"{f'`{row.name}`' if row in FORMATS else 'learnt'}{'' if reads_back else ' by name'}{shows}"


def _thinking(template: str, controls: Controls) -> str:
    if controls.off:
        return "on or off"
    if controls.off_word:
        return f"on, off by `{controls.off_word}`"
    writes = any(end in template for _, end in THINKING) or "<|channel|>" in template
    return "always" if writes or controls.efforts or controls.always_thinks else _NONE


def _efforts(controls: Controls) -> str:
    summary = controls.summary()
    levels = [
        f"**{level}**" if level == summary["default_effort"] else level
        for level in summary.get("efforts", ())
    ]
    budget = ["a budget"] if controls.budget else []
    return ", ".join([*levels, *budget]) or _NONE


def page() -> str:
    """docs/agents.md with the table as it should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    if not templates():
        raise SystemExit(MISSING)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
