"""What a release is made from: `python .github/release.py COMMAND`, with Python alone.

check TAG             the tag names the version of this commit, and CHANGELOG.md has its section
notes TAG             that section, as the release's text
formula FILE URL      a Homebrew formula for a source distribution that will be at the URL
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMULA = ROOT / ".github/homebrew/mlxserve.rb.in"


def version_of(tag: str, root: Path = ROOT) -> str:
    """The version that the tag `v1.2.3` names. Raises ValueError if this commit has another one."""
    text = (root / "mlxserve/core/version.py").read_text("utf-8")
    [version] = re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and mlxserve/core/version.py says {version}")
    return str(version)


def notes(version: str, root: Path = ROOT) -> str:
    """The section of a version in CHANGELOG.md. Raises ValueError without one, and for an empty one."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, body = section.partition("\n")
        if re.match(rf"\[?{re.escape(version)}\]?(\s|$)", title):
            if not body.strip():
                raise ValueError(f"the section of {version} in CHANGELOG.md is empty")
            return body.strip() + "\n"
    raise ValueError(
        f"CHANGELOG.md has no section {version}; rename `Unreleased` and begin another one"
    )


def formula(sdist: Path, url: str) -> str:
    """The formula of a source distribution. Raises ValueError for another kind of file."""
    found = re.fullmatch(r"mlxserve-(\d[^-]*)\.tar\.gz", sdist.name)
    if found is None or not url.startswith("https://") or '"' in url:
        raise ValueError(f"{sdist.name} at {url} is no source distribution of mlxserve")
    values = {
        "HOMEPAGE": url.partition("/releases/")[0],  # the repository that the release is of
        "URL": url,
        "SHA256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
    }
    return re.sub("@([A-Z0-9]+)@", lambda name: values[name[1]], FORMULA.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "notes"):
        commands.add_parser(name).add_argument("tag")
    of_formula = commands.add_parser("formula")
    of_formula.add_argument("file", type=Path)
    of_formula.add_argument("url")
    given = parser.parse_args()
    try:
        if given.command == "formula":
            sys.stdout.write(formula(given.file, given.url))
        else:
            text = notes(version_of(given.tag))
            if given.command == "notes":
                sys.stdout.write(text)
    except (ValueError, OSError) as error:
        sys.exit(f"release: {error}.")


if __name__ == "__main__":
    main()
