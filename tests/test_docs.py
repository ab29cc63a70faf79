"""README and docs/ name only commands, flags and files that exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
from typer.main import get_command

from mlxserve.bench.cli import app as bench_app
from mlxserve.cli.commands import app
from tests.perf.cli import app as perf_app
from tests.reliability.__main__ import app as reliability_app
from tui.commands import COMMANDS, key_label

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_README_LINES = 150
MAX_WORDS = 35  # of a sentence


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def console_lines(text: str) -> Iterator[str]:
    """Each command of the text's console blocks, without comments."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield re.split(r"\s{2,}#", line[2:])[0].strip()


@cache
def commands() -> dict[str, frozenset[str]]:
    """Each command, as it is typed, and its flags."""
    found: dict[str, frozenset[str]] = {}

    def walk(command: click.Command, path: str) -> None:
        flags = [o for p in command.params for o in (*p.opts, *p.secondary_opts) if o[0] == "-"]
        found[path] = frozenset((*flags, "--help"))
        for name, sub in getattr(command, "commands", {}).items():
            walk(sub, f"{path} {name}")

    walk(get_command(app), "mlxserve")
    walk(get_command(bench_app), "mlxserve bench")
    walk(get_command(perf_app), "python -m tests.perf")
    walk(get_command(reliability_app), "python -m tests.reliability")
    return found


def flags_of(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def test_every_command_of_a_console_block_exists_with_its_flags() -> None:
    for page in PAGES:
        for line in console_lines(page.read_text(encoding="utf-8")):
            for part in re.split(r"\s(?:&&|\|)\s", line):
                typed = part.removeprefix("uv run ")
                known = [c for c in commands() if f"{typed} ".startswith(f"{c} ")]
                if known:
                    command = max(known, key=len)
                    given = flags_of(shlex.split(typed))
                    assert set(given) <= commands()[command], f"{page.name}: {line}"
                    assert not (command in ("mlxserve", "mlxserve bench") and not given), line


def test_every_flag_in_the_text_exists() -> None:
    for page in PAGES:
        known = frozenset().union(*commands().values())
        named = re.findall(r"`(--[a-z][a-z-]+)", page.read_text(encoding="utf-8"))
        assert set(named) <= known, page


def test_every_file_and_link_in_the_text_exists() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files = re.findall(
            r"`((?:mlxserve|metal_kernels|tui|tests|docs|\.ci|\.github)/[\w./-]*)`", text
        )
        assert [name for name in files if not (ROOT / name).exists()] == [], page
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def definitions(path: Path) -> set[str]:
    """Classes, functions and methods of a file: `Class`, `function`, `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_the_walks_name_functions_that_are_in_their_files() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", text, re.MULTILINE)
    assert len(steps) > 25
    assert [step for step in steps if step[1] not in definitions(ROOT / step[0])] == []


def test_the_terminal_page_has_the_table_of_commands() -> None:
    text = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8").replace("\\|", "¦")
    rows = re.findall(r"^\| `(/[^|]+)` \| ([^|]*) \| ([^|]+) \|$", text, re.MULTILINE)
    assert [(usage.replace("¦", "|"), keys, words) for usage, keys, words in rows] == [
        (command.usage, ", ".join(key_label(key) for key in command.keys), command.help)
        for command in COMMANDS
    ]


def test_the_readme_is_short_and_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= MAX_README_LINES
    assert [page.name for page in PAGES[2:] if f"docs/{page.name}" not in readme] == []


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, without its code, tables, headings and computed lists."""
    text = re.sub(r"<!-- computed.*?<!-- end.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$|^\s*[-*] |^\d+\. |^#.*$", "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?:])\**\s+(?=[A-Z0-9`\[*\"“(])", " ".join(paragraph.split()))


def test_a_sentence_has_at_most_35_words() -> None:
    long: dict[str, list[str]] = {}
    for page in PAGES:
        found = [
            each for each in sentences(page.read_text("utf-8")) if len(each.split()) > MAX_WORDS
        ]
        if found:
            long[name_of(page)] = found
    assert long == {}


def test_the_included_model_has_one_name() -> None:
    others = re.compile(r"\b(embedded|bundled|demonstration) model\b|\bthe demonstration\b", re.I)
    texts = [*PAGES, *(ROOT / "mlxserve" / "core").glob("*.py"), ROOT / "mlxserve" / "llm.py"]
    found = {name_of(path): others.findall(path.read_text("utf-8")) for path in texts}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_glossary_has_ten_terms() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| (?!Term|-)([\w ]+) \|", text, re.MULTILINE)
    assert len(terms) == len(set(terms)) == 10


def test_the_site_has_every_page() -> None:
    site = (ROOT / ".github" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    names = [page.name for page in PAGES[1:]]
    assert [name for name in names if not re.search(rf"^ +- (\w+: )?{name}$", site, re.M)] == []


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    [command] = [
        line.removeprefix("pip install uv && ")
        for line in console_lines((ROOT / "README.md").read_text(encoding="utf-8"))
        if line.endswith("&& uv run pytest")
    ]
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
