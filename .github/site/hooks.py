"""Adds to the site what the pages link to outside docs/: SECURITY.md and the screenshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
MOVED = {"../SECURITY.md": "SECURITY.md", "../.github/screenshots/": "screenshots/"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "SECURITY.md", abs_src_path=str(ROOT / "SECURITY.md")))
    for path in sorted((ROOT / ".github/screenshots").iterdir()):
        files.append(File.generated(config, f"screenshots/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for link, target in MOVED.items():
        markdown = markdown.replace(f"]({link}", f"]({target}")
    return markdown.replace("](docs/", "](")
