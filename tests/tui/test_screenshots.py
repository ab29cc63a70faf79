import re
from pathlib import Path

import pytest

from tui import screenshots

ROOT = Path(screenshots.__file__).parent.parent
SHOWN = re.findall(r"!\[.*?\]\((\S+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))


def words(svg: str) -> str:
    """What is written in the picture."""
    return re.sub(r"&#160;|\s+", " ", re.sub(r"<[^>]+>", " ", svg))


def test_the_readme_shows_the_pictures_the_script_takes() -> None:
    assert [Path(name).name for name in SHOWN] == ["engine.svg", "models.svg"]


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_loads_nothing_from_elsewhere(name: str) -> None:
    svg = (ROOT / name).read_text(encoding="utf-8")
    urls = set(re.findall(r"https?://[^\"'\s)<]+", svg))
    assert all(url.startswith("http://www.w3.org/") or "textualize" in url for url in urls), urls
    assert "@font-face" not in svg


def test_the_engine_s_picture_shows_shared_pages_and_reuse() -> None:
    said = words((ROOT / SHOWN[0]).read_text(encoding="utf-8"))
    assert re.search(r"reused \d+ of \d+ tokens", said)
    assert re.search(r"◆ +shared [1-9]", said)
    assert "plum-42" in said


@pytest.mark.slow
def test_the_script_takes_them(tmp_path: Path) -> None:
    assert screenshots.main([str(tmp_path)]) == 0
    assert "shared" in words((tmp_path / "engine.svg").read_text(encoding="utf-8"))
    assert "fits" in words((tmp_path / "models.svg").read_text(encoding="utf-8"))
