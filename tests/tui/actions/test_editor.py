from pathlib import Path

import pytest

from tui.actions.editor import EditorFailed, edit_in_editor


@pytest.fixture
def use_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a script that is the editor; the test writes it."""
    script = tmp_path / "my editor"
    monkeypatch.setenv("EDITOR", f"sh '{script}'")
    monkeypatch.delenv("VISUAL", raising=False)
    return script


def test_the_text_is_what_the_editor_saved(use_editor: Path) -> None:
    use_editor.write_text('printf "%s and more é\\n\\n" "$(cat "$1")" > "$1.new"; mv "$1.new" "$1"')
    assert edit_in_editor("some") == "some and more é"


def test_the_temporary_folder_is_removed(use_editor: Path, tmp_path: Path) -> None:
    use_editor.write_text(f'echo "$1" > "{tmp_path}/where"; stat -c %a "$(dirname "$1")" || true')
    edit_in_editor("secret")
    assert not Path((tmp_path / "where").read_text().strip()).parent.exists()


def test_an_exit_code_other_than_zero_is_an_error(use_editor: Path) -> None:
    use_editor.write_text("exit 3")
    with pytest.raises(EditorFailed, match="exited with code 3"):
        edit_in_editor("some")


@pytest.mark.parametrize("editor", ["/no/such/editor", "'unbalanced"])
def test_an_editor_that_cannot_run_is_an_error_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, editor: str
) -> None:
    monkeypatch.setenv("VISUAL", editor)
    with pytest.raises(EditorFailed, match=r"\$EDITOR"):
        edit_in_editor("some")
