"""The chat of the page in headless Chromium, over a model that answers from a script."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from mlxserve.engine.snapshot import Phase, RequestView
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.page.visits import Open
from tests.api.serving import StartServer
from tests.images.files import file_of, picture
from tests.text.documents.files import pdf
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Route

pytestmark = pytest.mark.slow

# Into the composer: a file, as browsers do for a copied picture.
PASTE = """(content) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
  data.items.add(new File([bytes], "pasted.jpg", { type: "image/jpeg" }));
  const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.getElementById("text").dispatchEvent(event);
}"""
# On the messages: an image and a text.
DROP = """(content) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
  data.items.add(new File([bytes], "dropped.jpg", { type: "image/jpeg" }));
  data.items.add(new File(["words\\n"], "dropped.txt", { type: "text/plain" }));
  for (const kind of ["dragover", "drop"]) {
    const event = new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
    document.getElementById("log").dispatchEvent(event);
    if (!event.defaultPrevented) throw new Error("the browser takes what is dropped");
  }
}"""
SLOW = [Delta("Begun ", (66,)), HOLD, Delta("ended", (69,), (), FinishReason.STOP, Usage(5, 2, 0))]


def sent(chat: FakeChat) -> list[list[tuple[str, str]]]:
    """The conversations that the model was asked to go on with."""
    return [[(one["role"], one["content"]) for one in each.messages] for each in chat.rendered]


def test_an_answer_that_is_left_goes_on_in_its_chat(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = SLOW
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("old")
        seen.until_text(".assistant .body", "Begun")
        seen.page.click("#new")
        assert seen.texts == []
        chat.script = None
        seen.ask("new")
        seen.until_text(".assistant .body", "Hello")
        assert seen.texts == ["new", "Hello"]
        assert sent(chat) == [[("user", "old")], [("user", "new")]]
        chat.release()
        seen.page.locator("#chat-list .open", has_text="old").click()
        seen.until_text(".assistant .body", "Begun ended")
        assert seen.texts == ["old", "Begun ended"]
        assert seen.errors == []


def test_escape_stops_and_the_text_so_far_is_kept(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = SLOW
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.until_text(".assistant .body", "Begun")
        seen.ask("queued")
        seen.page.keyboard.press("Escape")
        seen.until_text(".assistant .note", "stopped")
        chat.wait_until_closed()
        assert seen.page.input_value("#text") == "queued", "what waited is not sent unasked"
        chat.script = None
        seen.page.press("#text", "Enter")
        seen.wait_for_answers(2)
        assert [text.strip() for text in seen.texts] == ["one", "Begun", "queued", "Hello"]
        assert sent(chat)[1] == [("user", "one"), ("assistant", "Begun "), ("user", "queued")]


def test_what_is_sent_while_it_answers_waits_its_turn(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = SLOW
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.until_text(".assistant .body", "Begun")
        for text in ("two", "three", "four"):
            seen.ask(text)
        seen.page.locator("#queue button").nth(1).click()
        assert len(chat.rendered) == 1
        chat.release()
        seen.wait_for_answers(3)
        assert seen.texts[::2] == ["one", "two", "four"]
        assert [each[-1][1] for each in sent(chat)] == ["one", "two", "four"]
        assert seen.page.locator("#queue").is_hidden()


def test_versions_of_questions_and_answers_are_kept(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        seen.ask("two")
        seen.wait_for_answers(2)
        seen.page.locator(".user >> text=Edit").first.click()
        assert seen.page.input_value("#text") == "one"
        seen.ask("uno")
        seen.until_text(".user .actions", "2/2")
        seen.until_text(".assistant .body", "Hello")
        assert seen.texts == ["uno", "Hello"]
        chat.script = [Delta("Again", (65,), (), FinishReason.STOP, Usage(5, 1, 0))]
        seen.page.click("text=Regenerate")
        seen.until_text(".assistant .body", "Again")
        assert sent(chat)[2:] == [[("user", "uno")]] * 2
        seen.page.locator(".assistant").get_by_label("Earlier version").click()
        assert seen.texts == ["uno", "Hello"]
        seen.page.locator(".user").get_by_label("Earlier version").click()
        assert seen.texts == ["one", "Hello", "two", "Hello"]
        assert seen.errors == []


def test_a_refused_question_goes_back_to_the_composer(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.is_alone = True  # Chromium logs the 400
        seen.ask("x" * chat.max_model_len)
        seen.until_text(".failed .note", "context")
        assert len(seen.page.input_value("#text")) == chat.max_model_len
        seen.ask("short")
        seen.until_text(".assistant .body", "Hello")
        assert sent(chat)[-1] == [("user", "short")]


def test_an_empty_page_says_what_it_is_and_asks(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.model_name = "mlxserve-mini"
    with visit(start_server().url) as seen:
        seen.until_text("#welcome", "included model")
        seen.until_text("#welcome .offer", "mlxserve serve qwen3.5:4b")
        seen.page.click("text=What can you do?")
        seen.wait_for_answers(1)
        assert seen.texts == ["What can you do?", "Hello"]


def test_thinking_is_folded(chat: FakeChat, start_server: StartServer, visit: Open) -> None:
    chat.script = [
        Delta("", (66,), reasoning="Let me see."),
        Delta("Yes", (69,), (), FinishReason.STOP, Usage(5, 2, 0)),
    ]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        thinking = seen.page.locator(".assistant .thinking div")
        assert thinking.is_hidden()
        seen.page.click(".assistant summary")
        assert thinking.inner_text() == "Let me see."
        assert seen.texts == ["one", "Yes"]


def view(name: str, page: int) -> RequestView:
    return RequestView(
        id=name,
        client="",
        phase=Phase.DECODING,
        position=None,
        num_prompt=10,
        num_cached=0,
        num_computed=10,
        num_to_compute=10,
        num_outputs=3,
        num_preemptions=0,
        priority=0,
        age=1.0,
        page_table=(page,),
    )


def test_requests_have_colours_of_their_own_and_a_chat_is_visible_in_a_large_cache(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.views = [view(f"request-{number}", number) for number in range(8)]
    chat.pages = bytes([1] * 8 + [0] * 8184)
    with visit(start_server().url) as seen:
        seen.until_text("#requests", "request-")
        swatches = seen.page.locator("#requests .swatch")
        colours = swatches.evaluate_all("all => all.map((one) => one.style.background)")
        assert len(set(colours)) == 8
        seen.until_text("#pages", "8 of 8,192 in use")
        seen.until_text("#map-scale", "8,064 more")
        seen.until_text("#prefill-scale", "0 to 13 tokens/s")
        painted = seen.page.evaluate(
            """() => {
                const map = document.getElementById("map");
                const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
                const found = new Map();
                for (let at = 0; at < data.length; at += 4) {
                    const name = data.slice(at, at + 3).join();
                    found.set(name, (found.get(name) || 0) + 1);
                }
                return [...found.values()].filter((size) => size > 100).length;
            }"""
        )
        assert painted >= 9, "eight requests and what is free"


ANSWER = r"""A [link](https://example.org) <img src=x onerror=alert(1)> and $x^2$.

```python
def f(): ...
```

| a | b |
|---|--:|
| 1 | 2 |
"""


def test_an_answer_is_shown_with_its_marks_and_no_markup(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    pieces = [Delta(ANSWER[at : at + 30], (65,)) for at in range(0, len(ANSWER), 30)]
    chat.script = [
        *pieces[:3],
        HOLD,
        *pieces[3:],
        Delta("", (), (), FinishReason.STOP, Usage(5, 9, 0)),
    ]
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("Show me")
        seen.page.wait_for_selector(".assistant[aria-busy=true] a")
        chat.release()
        seen.page.wait_for_selector(".assistant[aria-busy=false] table")
        link = seen.page.locator(".assistant .body a")
        assert link.get_attribute("href") == "https://example.org"
        assert "noopener" in (link.get_attribute("rel") or "")
        assert seen.page.locator(".assistant img").count() == 0
        assert "<img src=x onerror=alert(1)>" in seen.page.inner_text(".assistant .body")
        assert (
            seen.page.locator(".assistant msup")
            .evaluate("one => one.namespaceURI")
            .endswith("MathML")
        )
        assert seen.page.inner_text(".assistant .keyword") == "def"
        seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        seen.page.click("text=Copy >> nth=-2")
        seen.until_text(".code .head button", "Copied")
        assert seen.page.evaluate("navigator.clipboard.readText()") == "def f(): ..."
        assert seen.errors == []


def test_a_reload_loses_nothing_and_chats_are_found_renamed_and_deleted(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        seen.ask("About walruses")
        seen.wait_for_answers(1)
        page.wait_for_function("() => location.hash")
        seen.until_text("#chat-list .open", "About walruses")
        page.fill("#text", "a draft")
        seen.reload()
        page.wait_for_selector(".assistant")
        assert seen.texts == ["About walruses", "Hello"]
        assert page.input_value("#text") == "a draft"
        seen.ask("more")
        seen.wait_for_answers(2)
        assert sent(chat)[1][:2] == [("user", "About walruses"), ("assistant", "Hello")]
        page.click("#new")
        page.fill("#search", "WALRUS")
        seen.until_text("#chat-list .open", "· About walruses")  # the day before the words
        page.locator("#chat-list .open").click()
        page.wait_for_selector(".assistant")
        assert len(seen.texts) == 4
        page.on("dialog", lambda dialog: dialog.accept("Renamed"))
        seen.choose("Rename")
        seen.until_text("#chat-list .title", "Renamed")
        seen.choose("Delete")
        seen.until_text("#chat-list", "No chat has these words.")
        assert seen.texts == []
        assert seen.errors == []


def test_the_browser_asks_before_it_loses_a_question_on_its_way(
    start_server: StartServer, visit: Open
) -> None:
    asked: list[str] = []
    held: list[Route] = []
    with visit(start_server().url) as seen:
        page = seen.page

        def stay(dialog: Dialog) -> None:
            asked.append(dialog.type)
            dialog.dismiss()

        page.on("dialog", stay)
        page.route(
            "**/api/v1/chats/*/answers",
            lambda route: route.continue_() if asked else held.append(route),
        )
        seen.until("Ready")
        seen.ask("About walruses")
        wait_until(lambda: page.title() and held)  # each look lets Playwright hear the browser
        page.evaluate("setTimeout(() => location.reload())")
        wait_until(lambda: page.title() and asked)
        assert asked == ["beforeunload"]
        held[0].continue_()
        seen.wait_for_answers(1)
        page.wait_for_function("() => document.getElementById('send').textContent === 'Send'")
        seen.reload()
        page.wait_for_selector(".assistant")
        assert asked == ["beforeunload"], "what the server has is left without a question"
        assert seen.texts == ["About walruses", "Hello"]


@pytest.mark.long  # two of four runs beside each other waited for ever
def test_images_are_chosen_pasted_shown_sent_and_kept(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.supports_images = True
    url = start_server().url
    with visit(url) as seen:
        page = seen.page
        seen.until("Ready")
        large = file_of(picture(3_000, 500))
        page.set_input_files(
            "#files",
            [
                {"name": "a.png", "mimeType": "image/png", "buffer": file_of(picture())},
                {"name": "b.png", "mimeType": "image/png", "buffer": b"no image"},
                {"name": "large.png", "mimeType": "image/png", "buffer": large},
            ],
        )
        seen.until_text("#attached .problem", "b.png is damaged or no image.")
        page.evaluate(PASTE, base64.b64encode(file_of(picture(seed=1), "JPEG")).decode())
        page.wait_for_function("() => document.querySelectorAll('#attached img').length === 3")
        page.get_by_label("Remove pasted.jpg").click()
        seen.ask("Look")
        seen.wait_for_answers(1)
        [message] = chat.rendered[0].messages
        first, second, text = message["content"]
        assert (first["image"].width, second["image"].width) == (24, 2_048)
        assert text == {"type": "text", "text": "Look"}
        assert page.locator(".user .images img").count() == 2
        page.wait_for_function("() => location.hash")  # the server has the question's images
        seen.reload()
        seen.wait_for_answers(1)
        page.wait_for_function(
            "() => [...document.querySelectorAll('.user img')].map((one) => one.naturalWidth).join() === '24,2048'"
        )
        page.get_by_role("button", name="Edit").click()
        assert page.locator("#attached img").count() == 2
        seen.ask("Look again")
        page.wait_for_function(
            "() => document.querySelector('.user .body').innerText === 'Look again'"
        )
        wait_until(lambda: len(chat.rendered) == 2)  # the answer before it may still be shown
        seen.wait_for_answers(1)
        assert len(chat.rendered[1].messages[0]["content"]) == 3
        assert seen.errors == []


def test_files_that_are_dropped_are_attached(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.supports_images = True
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.page.evaluate(DROP, base64.b64encode(file_of(picture(), "JPEG")).decode())
        seen.page.wait_for_selector("#attached img")
        seen.until_text("#attached", "dropped.txt")
        seen.ask("Look")
        seen.wait_for_answers(1)
        image, text = chat.rendered[0].messages[0]["content"]
        assert (image["type"], image["image"].width) == ("image", 24)
        assert text["text"] == "Look\n\ndropped.txt:\n```txt\nwords\n```"
        assert seen.page.url.startswith("http"), "the browser does not open the file"
        assert seen.errors == []


def test_documents_are_read_by_the_server_shown_sent_and_kept(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        page.set_input_files(
            "#files",
            [
                {"name": "a.pdf", "mimeType": "application/pdf", "buffer": pdf(["One.", "Two."])},
                {"name": "b.bin", "mimeType": "", "buffer": b"\0\1"},
                {"name": "old.txt", "mimeType": "text/plain", "buffer": b"caf\xe9"},
            ],
        )
        seen.until_text("#attached .problem", "b.bin is not text.")
        page.wait_for_function(
            "() => document.querySelectorAll('#attached .document').length === 2"
        )
        seen.ask("When?")
        seen.wait_for_answers(1)
        first, question = chat.rendered[0].messages
        assert "[page 1]\nOne.\n[page 2]\nTwo.\n</document" in first["content"]
        assert "café" in first["content"]
        assert question["content"] == "When?"
        page.wait_for_function("() => location.hash")  # the server has the question's documents
        seen.reload()
        seen.wait_for_answers(1)
        assert page.locator(".user .document").all_inner_texts() == ["a.pdf", "old.txt"]
        seen.ask("And then?")
        seen.wait_for_answers(2)
        assert chat.rendered[-1].messages[0] == first
        [refused] = seen.errors  # by the browser's console: b.bin
        assert "400" in refused


def test_the_page_says_which_part_of_a_document_was_read(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        pages = pdf([f"{number} " + "word " * 60 for number in range(9)])
        file = {"name": "a.pdf", "mimeType": "application/pdf", "buffer": pages}
        seen.page.set_input_files("#files", [file])
        seen.page.wait_for_selector("#attached .document")
        seen.ask("When?")
        seen.until_text(".assistant .note", "2 of 9 pages of a.pdf were read")
        assert seen.errors == []


def test_no_image_is_attached_for_a_model_that_reads_text_only(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        image = {"name": "a.png", "mimeType": "image/png", "buffer": file_of(picture())}
        seen.page.set_input_files("#files", [image])
        seen.until_text("#attached .problem", "a.png is an image, and fake reads text only.")
        assert chat.rendered == []


def test_files_the_system_prompt_and_sampling_are_sent(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        page.click("#settings-open")
        page.fill("#system", "Be kind.")
        page.fill("#temperature", "0.5")
        page.click("dialog .main")
        page.set_input_files(
            "#files",
            [
                {"name": "a.py", "mimeType": "text/plain", "buffer": b"print('```')\n"},
                {"name": "b.bin", "mimeType": "text/plain", "buffer": b"\xff\x00"},
            ],
        )
        seen.until_text("#attached .problem", "b.bin is not text.")
        seen.ask("Look")
        seen.wait_for_answers(1)
        assert sent(chat) == [
            [("system", "Be kind."), ("user", "Look\n\na.py:\n````py\nprint('```')\n````")]
        ]
        assert chat.submitted[0].params.temperature == 0.5
        [refused] = seen.errors  # the console's line about the file that is no document
        assert "400 (Bad Request)" in refused
