"""A follower of a chat over HTTP, as the page is one."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx

from tests.waiting import wait_until

PATIENCE = 60.0  # seconds


class Follower:
    """Reads the events of a chat in a thread of its own."""

    def __init__(
        self,
        url: str,
        chat: int | None,
        *,
        after: Follower | None = None,
        form: str = "blocks",
        key: str = "",
    ) -> None:
        """Follow a chat; in the place of a follower that lost its connection, after its last event.

        chat: None for the list of chats
        """
        self.events: list[tuple[str, Any]] = []
        self.last_id: str = "" if after is None else after.last_id
        self.num_bytes = 0
        # Of the answer, by its patches.
        self.blocks: list[Any] = [] if after is None else after.blocks
        # Of the answer, where that is the form.
        self.text: str = "" if after is None else after.text
        self._form = form
        # The last event that grew a text.
        self._grown: tuple[str, Any] = ("", None) if after is None else after._grown
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, timeout=PATIENCE, headers=headers)
        self._path = "/api/v1/chats/" + ("events" if chat is None else f"{chat}/events")
        self._socket: Any = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        try:
            with self._client.stream(
                "GET", self._path, params={"form": self._form}, headers=headers
            ) as reply:
                self._socket = reply.extensions["network_stream"].get_extra_info("socket")
                assert reply.status_code == 200, reply.read()
                rest = b""
                for piece in reply.iter_bytes():
                    self.num_bytes = reply.num_bytes_downloaded
                    *parts, rest = (rest + piece).split(b"\n\n")
                    for part in parts:
                        self._take(part.decode())
        except httpx.HTTPError:
            return  # the connection is lost

    def _take(self, part: str) -> None:
        if part.startswith(":"):
            return
        fields = {
            name: value.removeprefix(" ")
            for name, _, value in (line.partition(":") for line in part.split("\n"))
        }
        self.last_id = fields.get("id", self.last_id)
        name, data = fields["event"], json.loads(fields["data"])
        if name == "more":
            name, data = self._grown[0], longer(self._grown[1], data)
        self._grown = name, data
        if name == "state":
            answer = data.get("answer") or {}
            self.blocks = copy.deepcopy(answer.get("blocks", []))
            self.text = answer.get("text", "")
        if name == "round":
            self.blocks, self.text = [], ""
        if name == "text":
            self.text += data["text"]
        if name == "blocks":
            apply(self.blocks, copy.deepcopy(data["patches"]))
        self.events.append((name, data))

    def of(self, name: str) -> list[Any]:
        return [data for each, data in self.events if each == name]

    def wait_for(self, name: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
        wait_until(lambda: any(map(fits, self.of(name))), PATIENCE, f"no {name}: {self.events}")
        return next(filter(fits, self.of(name)))

    def close(self) -> None:
        """Leave as a page that is closed."""
        wait_until(lambda: self._socket is not None, PATIENCE)
        with contextlib.suppress(OSError):  # the server may have ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._client.close()
        self._socket.close()  # also where the server's end came first


def longer(grown: Any, text: str) -> Any:
    """The event that grew a text, for what that text grows by next."""
    if "patches" not in grown:
        return {**grown, "text": text}
    [patch] = grown["patches"]
    return {**grown, "patches": [{**patch, "grow": text}]}


def apply(blocks: list[Any], patches: list[Any]) -> None:
    """Apply patches as the page does."""
    for patch in patches:
        _apply_one(blocks, patch)


def _apply_one(blocks: list[Any], patch: Any) -> None:
    parent, first = blocks, 0
    for at in patch["path"]:
        parent, first = parent[first + at], 2
    del parent[first + patch["keep"] :]
    if "grow" in patch:
        parent[-1] += patch["grow"]
    parent += patch.get("add", [])


def text_of(blocks: list[Any]) -> str:
    """The text of blocks, without their marks."""
    return "".join(each if isinstance(each, str) else text_of(each[2:]) for each in blocks)
