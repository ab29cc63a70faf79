from pathlib import Path

import pytest

from tui.actions.editor import EditorFailed, edit_in_editor


@pytest.fixture
def use_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that is the editor, with an argument of its own; it may be rewritten."""
    script = tmp_path / "my editor"
    monkeypatch.setenv("EDITOR", f"sh '{script}'")
    monkeypatch.delenv("VISUAL", raising=False)
    return script


def test_what_the_editor_leaves_is_the_text(use_editor: Path) -> None:
    use_editor.write_text('printf "%s and more é\\n\\n" "$(cat "$1")" > "$1.new"; mv "$1.new" "$1"')
    assert edit_in_editor("some") == "some and more é"


def test_nothing_is_left_behind(use_editor: Path, tmp_path: Path) -> None:
    use_editor.write_text(f'echo "$1" > "{tmp_path}/where"; stat -c %a "$(dirname "$1")" || true')
    edit_in_editor("secret")
    assert not Path((tmp_path / "where").read_text().strip()).parent.exists()


def test_an_editor_that_gives_up_changes_nothing(use_editor: Path) -> None:
    use_editor.write_text("exit 3")
    with pytest.raises(EditorFailed, match="exit code 3"):
        edit_in_editor("some")


@pytest.mark.parametrize("editor", ["/no/such/editor", "'unbalanced"])
def test_an_editor_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, editor: str) -> None:
    monkeypatch.setenv("VISUAL", editor)
    with pytest.raises(EditorFailed, match=r"\$EDITOR"):
        edit_in_editor("some")
