import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.perf.cli import app

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / ".github" / "screenshots"
NAMES = ("engine.svg", "models.svg")


def text_of(picture: Path) -> str:
    svg = picture.read_text(encoding="utf-8")
    return re.sub(r"&#160;|\s+", " ", re.sub(r"<[^>]+>", " ", svg))


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_shows_the_picture(name: str) -> None:
    page = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8")
    assert f"(../.github/screenshots/{name})" in page


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_loads_nothing_from_elsewhere(name: str) -> None:
    svg = (PICTURES / name).read_text(encoding="utf-8")
    urls = set(re.findall(r"https?://[^\"'\s)<]+", svg))
    assert all(url.startswith("http://www.w3.org/") or "textualize" in url for url in urls), urls
    assert "@font-face" not in svg


def test_the_engine_s_picture_shows_shared_pages_and_reuse() -> None:
    text = text_of(PICTURES / "engine.svg")
    assert re.search(r"reused \d+ of \d+ tokens", text)
    assert re.search(r"◆ +shared [1-9]", text)
    assert "plum-42" in text


@pytest.mark.instruments
def test_the_script_takes_the_pictures(tmp_path: Path) -> None:
    taken = CliRunner().invoke(app, ["screenshots", str(tmp_path)])
    assert taken.exit_code == 0, taken.output
    assert "shared" in text_of(tmp_path / "engine.svg")
    # How much context fits depends on the machine's memory.
    good_for = "long documents|chats and files|short chats|a few messages"
    assert re.search(
        rf"Model +Size +Context .* ↓ +[0-9.]+ GB .* ({good_for})", text_of(tmp_path / "models.svg")
    )
