"""Pictures of questions: read, made smaller, kept and sent."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from mlxserve.history.attachment import AttachmentRefused
from mlxserve.history.messages import Role, StoredMessage, wire_messages, with_text_of_documents
from mlxserve.history.picture import MAX_SIDE, MAX_SIZE, KeptImage, as_text, from_text, read_picture
from mlxserve.history.store import Store
from tests.images.files import file_of, picture
from tui.chat.mentions import mention, pasted_picture, with_files

RED = KeptImage("red.png", "data:image/png;base64,AAAA")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "with space.png", "it's.jpg"):
        (tmp_path / name).write_bytes(file_of(picture(), "JPEG" if name[-3:] == "jpg" else "PNG"))
    return tmp_path


def test_a_picture_is_kept_as_it_is(folder: Path) -> None:
    found = read_picture(folder / "a.png")
    assert found.name == "a.png"
    assert found.url.startswith("data:image/png;base64,")
    assert found.content == (folder / "a.png").read_bytes()
    assert from_text(as_text([found, RED])) == (found, RED)
    assert from_text(as_text([])) == ()


def test_a_large_picture_is_made_smaller_and_upright(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "large.png").write_bytes(file_of(picture(2_400, 600), exif=exif))
    found = read_picture(folder / "large.png")
    assert found.url.startswith("data:image/jpeg;base64,")
    assert len(found.content) <= MAX_SIZE
    assert Image.open(io.BytesIO(found.content)).size == (512, MAX_SIDE)


def test_a_large_file_that_is_no_picture_is_refused(folder: Path) -> None:
    (folder / "b.png").write_bytes(bytes(MAX_SIZE + 1))
    with pytest.raises(AttachmentRefused, match=r"b\.png is damaged or no image"):
        read_picture(folder / "b.png", "b.png")
    with pytest.raises(AttachmentRefused, match="is not a file"):
        read_picture(folder / "missing.png")


def test_without_pillow_a_large_picture_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert read_picture(folder / "a.png").content
    (folder / "b.png").write_bytes(bytes(MAX_SIZE + 1))
    with pytest.raises(AttachmentRefused, match=r"Pillow: .* install .*\[.*vision.*\]"):
        read_picture(folder / "b.png")


def test_mentioned_pictures_are_attached_once_and_named(folder: Path) -> None:
    asked = with_files('compare @a.png with @"with space.png" and @a.png', folder)
    assert asked.text == "compare a.png with with space.png and a.png"
    assert [one.name for one in asked.images] == ["a.png", "with space.png"]
    assert with_files(asked.text, folder).images == ()


def test_the_pasted_path_of_a_picture_is_recognised(folder: Path) -> None:
    path = str(folder / "a.png")
    spaced = str(folder / "with space.png")
    for pasted in (path, f" {path}\n", f"'{path}'", f"file://{path}"):
        assert pasted_picture(pasted) == path
    quoted = spaced.replace(" ", "\\ ")
    for pasted in (spaced, quoted, f"'{spaced}'", f"file://{spaced}".replace(" ", "%20")):
        assert pasted_picture(pasted) == spaced
    assert with_files(mention(spaced), folder).images[0].name == "with space.png"
    apostrophe = str(folder / "it's.jpg")
    assert pasted_picture(apostrophe.replace("'", "\\'")) == apostrophe


def test_other_pasted_text_stays_text() -> None:
    for text in ["", "a.png", "see /a.png", "/missing.png", "/etc/hosts", "'", "\0/a.png"]:
        assert pasted_picture(text) is None, text


def message(number: int, role: Role, text: str, *images: KeptImage) -> StoredMessage:
    return StoredMessage(
        id=number, chat_id=1, parent_id=None, role=role, text=text, images=tuple(images)
    )


def test_pictures_come_before_the_text_of_their_question() -> None:
    shown = {"type": "image_url", "image_url": {"url": RED.url}}
    path = [
        message(1, Role.USER, "What?", RED),
        message(2, Role.USER, "And why?"),
        message(3, Role.ASSISTANT, "Because."),
        message(4, Role.USER, "", RED),
    ]
    assert wire_messages(path) == [
        {
            "role": "user",
            "content": [
                shown,
                {"type": "text", "text": "What?"},
                {"type": "text", "text": "And why?"},
            ],
        },
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": [shown]},
    ]


def test_a_document_is_a_file_before_the_text_or_its_text_for_servers_that_read_none() -> None:
    kept = KeptImage("a.pdf", "data:text/plain;base64,SXQgZW5kcy4=")
    asked = message(1, Role.USER, "When?", RED, kept)
    [sent] = wire_messages([asked])
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": kept.url}}
    assert sent["content"][1:] == [file, {"type": "text", "text": "When?"}]
    plain = with_text_of_documents(asked)
    assert (plain.text, plain.images) == ("a.pdf:\nIt ends.\n\nWhen?", (RED,))
    assert with_text_of_documents(plain) == plain


def test_the_store_keeps_pictures_with_their_question(store: Store) -> None:
    chat = store.create_chat("What?")
    asked = store.add(chat.id, None, Role.USER, "What?", images=[RED])
    store.add(chat.id, asked.id, Role.ASSISTANT, "A dot.")
    assert [one.images for one in store.messages(chat.id)] == [(RED,), ()]
    assert [hit.message_id for hit in store.search("What")] == [asked.id]
    assert store.search("AAAA") == []
