"""What a release is made from: its version, notes, files and formula, and the workflow that joins them."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from mlxserve.core.version import __version__
from tests.test_ci import ROOT

SCRIPT = ROOT / ".github/release.py"
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
CHANGELOG = """# Changelog

## Unreleased

### Added
- Something

## [{version}] - 2026-12-01

### Added
- A server
- `[links]` and ### within a line

## 0.0.9
"""


def release(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = root / SCRIPT.relative_to(ROOT)
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With what the script reads, and a section of this version."""
    for name in (
        ".github/release.py",
        ".github/homebrew/mlxserve.rb.in",
        "mlxserve/core/version.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.format(version=__version__), "utf-8")
    return tmp_path


def test_the_notes_are_the_section_of_the_version(checkout: Path) -> None:
    found = release("notes", f"v{__version__}", root=checkout)
    assert found.stdout == "### Added\n- A server\n- `[links]` and ### within a line\n"
    assert release("check", f"v{__version__}", root=checkout).stdout == ""


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v9.9.9", None, f"the tag is v9.9.9, and mlxserve/core/version.py says {__version__}"),
        (__version__, None, f"the tag is {__version__}"),
        (f"v{__version__}", "## Unreleased\n- More\n", f"has no section {__version__}; rename"),
        (f"v{__version__}", f"## {__version__}0\n- More\n", "has no section"),
        (f"v{__version__}", f"## {__version__}\n\n## 0.0.1\n", "is empty"),
    ],
)
def test_a_release_that_does_not_fit_its_commit_is_refused(
    checkout: Path, tag: str, changelog: str | None, message: str
) -> None:
    if changelog is not None:
        (checkout / "CHANGELOG.md").write_text(changelog, "utf-8")
    found = release("check", tag, root=checkout)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_the_formula_names_the_file_by_its_sum(tmp_path: Path) -> None:
    file = tmp_path / "mlxserve-1.2.3.tar.gz"
    file.write_bytes(b"source")
    url = "https://example.com/us/mlxserve/releases/download/v1.2.3/mlxserve-1.2.3.tar.gz"
    text = release("formula", str(file), url).stdout
    assert 'homepage "https://example.com/us/mlxserve"\n' in text
    assert f'url "{url}"' in text
    assert f'sha256 "{hashlib.sha256(b"source").hexdigest()}"' in text
    assert "@" not in text.replace("python@", "")
    blocks = re.findall(r"^\s*(?:class|def|service do|test do)\b", text, re.MULTILINE)
    assert len(blocks) == len(re.findall(r"^\s*end$", text, re.MULTILINE)) == 4


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("mlxserve-1.2.3-py3-none-any.whl", "https://example.com/x"),
        ("mlxserve-1.2.3.tar.gz", "http://example.com/x"),
        ("mlxserve-1.2.3.tar.gz", 'https://example.com/"; system "x'),
    ],
)
def test_no_formula_is_made_of_other_files_or_places(tmp_path: Path, name: str, url: str) -> None:
    (tmp_path / name).write_bytes(b"source")
    found = release("formula", str(tmp_path / name), url)
    assert found.returncode == 1
    assert "no source distribution" in found.stderr


@pytest.mark.slow
def test_the_source_distribution_has_what_the_formula_installs_with(tmp_path: Path) -> None:
    uv = shutil.which("uv")
    assert uv, "the README's commands need uv"
    subprocess.run([uv, "build", "-q", "--sdist", "--out-dir", tmp_path, ROOT], check=True)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert f"mlxserve-{__version__}/.github/constraints.txt" in names
    assert release("formula", str(sdist), f"https://example.com/{sdist.name}").returncode == 0


def test_nothing_is_published_but_by_a_tag_that_ci_has_passed() -> None:
    jobs = WORKFLOW["jobs"]
    assert jobs["ci"] == {"uses": "./.github/workflows/ci.yml"}
    assert jobs["pypi"]["needs"] == ["ci", "build"]
    assert jobs["github"]["needs"] == ["pypi"]
    for name in ("pypi", "github"):
        assert jobs[name]["if"] == "github.ref_type == 'tag'"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [name for name, job in jobs.items() if "permissions" in job] == ["pypi", "github"]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text("utf-8")
