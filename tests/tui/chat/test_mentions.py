from pathlib import Path

import pytest

from mlxserve.history.attachment import AttachmentRefused
from tui.chat.mentions import MAX_COMPLETIONS, completions, missing_files, typed_path, with_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for name in ("a.py", "src/b.py", "src/bee.md", ".env", "Read me.md", "Readme.md"):
        (tmp_path / name).write_text(f"in {name}\n")
    return tmp_path


def test_a_path_follows_an_at_sign_at_the_start_of_a_word() -> None:
    for before, typed in [
        ("@", ""),
        ("see @sr", "sr"),
        ("a\n@src/b", "src/b"),
        ("me@home", None),
        ("@a.py ", None),
    ]:
        assert typed_path(before) == typed, before


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", ["src/", "a.py", "Readme.md"]),
        ("read", ["Readme.md"]),
        ("src/b", ["src/b.py", "src/bee.md"]),
        (".", [".env"]),
        ("a.py", []),
        ("nowhere/x", []),
        ("a.py/x", []),
    ],
)
def test_paths_are_completed(folder: Path, typed: str, found: list[str]) -> None:
    assert completions(typed, folder) == found


def test_a_large_folder_gives_a_limited_list(tmp_path: Path) -> None:
    for number in range(MAX_COMPLETIONS + 5):
        (tmp_path / f"{number}").touch()
    assert len(completions("", tmp_path)) == MAX_COMPLETIONS


def test_files_follow_the_text_once(folder: Path) -> None:
    sent = with_files("compare @a.py with @src/b.py and @a.py", folder).text
    assert sent == (
        "compare a.py with src/b.py and a.py\n\n"
        "a.py:\n```py\nin a.py\n```\n\n\nb.py:\n```py\nin src/b.py\n```"
    )
    assert with_files(sent, folder).text == sent, "resending attaches nothing twice"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see @missing.txt and @a.py", ["missing.txt"]),
        ("see @src/none.py", ["src/none.py"]),
        ("see @nowhere/x", ["nowhere/x"]),
        ("ask @someone", []),
        ("me@missing.txt", []),
        ('@app.get("/")\n@app.route', []),
        ("@src", []),
        ("@" + "x" * 5000, []),
    ],
)
def test_mentions_of_files_that_do_not_exist_are_found(
    folder: Path, text: str, missing: list[str]
) -> None:
    assert missing_files(text, folder) == missing


@pytest.mark.parametrize("text", ["hello @someone", "me@a.py", "@src", "@" + "x" * 5000, "no sign"])
def test_anything_but_a_file_stays_text(folder: Path, text: str) -> None:
    assert with_files(text, folder).text == text


def test_a_binary_file_is_refused(folder: Path) -> None:
    (folder / "image.bin").write_bytes(b"\x89PNG\xff")
    with pytest.raises(AttachmentRefused, match="not a UTF-8 text file"):
        with_files("see @image.bin", folder)
