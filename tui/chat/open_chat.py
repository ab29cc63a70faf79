"""The open chat: one branch of its tree. Every change is written to the store before it is shown.

The store runs in a thread of its own, so that a locked file never holds up the screen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from mlxserve.history.context import num_left_out, sent_messages, used_tokens
from mlxserve.history.identity import identity_of
from mlxserve.history.messages import (
    ChatRecord,
    LeftOut,
    NewQuestion,
    Role,
    State,
    StoredMessage,
    Version,
    with_text_of_documents,
)
from mlxserve.history.picture import KeptImage
from mlxserve.history.store import SearchHit, Store
from mlxserve.history.traces import Traces, traces

P = ParamSpec("P")
T = TypeVar("T")


class OpenChat:
    """`path` is the branch on the screen, from the first question on; `versions` goes with it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-store")
        self.chat: ChatRecord | None = None
        self.path: list[StoredMessage] = []
        self.versions: list[Version] = []
        # The end of the branch that the store shows, as far as is known here.
        self.leaf_id: int | None = None
        self.has_written = False  # something of the chat that only other followers have to be told
        self._system = ""  # prompt of a chat that is not written yet

    async def close(self) -> None:
        """Wait for pending writes, then close the store."""
        await self._call(self._store.close)
        self._thread.shutdown()

    @property
    def system(self) -> str:
        """The system prompt."""
        return self._system if self.chat is None else self.chat.system

    @property
    def left_out(self) -> LeftOut | None:
        return None if self.chat is None else self.chat.left_out

    @property
    def num_left_out(self) -> int:
        """Number of messages of `path` that the model no longer gets."""
        return num_left_out(self.path, self.left_out)

    @property
    def used_tokens(self) -> int:
        """Context tokens that are in use before the next question."""
        return used_tokens(self.path, self.left_out)

    def wire(
        self, last: StoredMessage | None = None, *, reads_files: bool = True
    ) -> list[dict[str, Any]]:
        """Messages for the model, up to `last`.

        These are the system prompt, a summary of what was left out, and the messages after that.

        reads_files: the server reads documents; another one gets their texts
        """
        path = self.path if last is None else self.path[: self.path.index(last) + 1]
        if not reads_files:
            path = [with_text_of_documents(message) for message in path]
        return sent_messages(path, self.system, self.left_out)

    async def leave_out(self, last: StoredMessage, summary: str = "") -> None:
        """Leave this message and all before it out of the prompt from now on."""
        assert self.chat is not None, "there are messages"
        newest = max(message.id for message in self.path)
        left_out = LeftOut(last.id, newest, summary)
        await self._call(self._store.leave_out, self.chat.id, left_out)
        self.has_written = True
        self.chat = await self._call(self._store.chat, self.chat.id)

    async def remove(self, answer: StoredMessage) -> None:
        """Delete an answer at the end of the branch."""
        await self._call(self._store.remove, answer)
        self.has_written = True
        await self._show(answer.parent_id)

    async def set_system(self, system: str) -> None:
        if self.chat is None:
            self._system = system
        else:
            await self._call(self._store.set_system, self.chat.id, system)
            self.has_written = True
            self.chat = await self._call(self._store.chat, self.chat.id)

    def new(self) -> None:
        """Open an empty chat, which is written with its first question."""
        self._system = ""
        self.chat, self.path, self.versions, self.leaf_id = None, [], [], None

    async def open(self, chat_id: int, message_id: int | None = None) -> None:
        """Open a chat at its last shown branch, or at the branch through a message.

        Raises StoreError.
        """
        await self._call(self._store.recover)
        self.chat = await self._call(self._store.chat, chat_id)
        if message_id is None:
            await self._show(self.chat.leaf_id)
        else:
            await self.show_branch(message_id)

    async def show_branch(self, message_id: int) -> None:
        """Show the branch through a message, down to its newest descendant."""
        assert self.chat is not None, "every message on the screen is in a chat"
        leaf_id = await self._call(self._store.show_branch, self.chat.id, message_id)
        self.has_written |= leaf_id != self.chat.leaf_id
        await self._show(leaf_id)

    async def ask(
        self, new: NewQuestion, *, instead_of: StoredMessage | None = None
    ) -> StoredMessage:
        """Write a question at the end, or as a new version of an earlier one, whose images it keeps."""
        chat = await self.begin(new.text)
        parent_id = parent_of_next(self.path, instead_of)
        images = images_of(new, instead_of)
        question = await self._call(
            self._store.add, chat.id, parent_id, Role.USER, new.text, images=images
        )
        await self._show(question.id)
        return question

    async def begin(self, first_words: str) -> ChatRecord:
        """Write the chat, if that has not been done."""
        if self.chat is None:
            self.chat = await self._call(self._store.create_chat, first_words, self._system)
        return self.chat

    async def reload(self, message_id: int) -> StoredMessage:
        """Read a message of the branch again that another program has written. Raises StoreError."""
        await self._call(self._store.recover)
        message = await self._call(self._store.message, message_id)
        self.chat = await self._call(self._store.chat, message.chat_id)
        self.leaf_id = self.chat.leaf_id
        self.path = [message if m.id == message.id else m for m in self.path]
        return message

    async def identity(self) -> str:
        """Return what names the file of the chats."""
        return await self._call(identity_of, self._store)

    async def begin_answer(self, question: StoredMessage, model: str) -> StoredMessage:
        """Write an empty answer to the question, next to those it already has."""
        assert self.chat is not None, "the question is in a chat"
        add = partial(self._store.add, state=State.WRITING, model=model)
        answer = await self._call(add, self.chat.id, question.id, Role.ASSISTANT, "")
        await self._show(answer.id)
        return answer

    async def save(self, message: StoredMessage) -> None:
        self.path = [message if m.id == message.id else m for m in self.path]
        await self._call(self._store.save, message)

    def question_of(self, answer: StoredMessage) -> StoredMessage | None:
        return next((m for m in self.path if m.id == answer.parent_id), None)

    async def rename(self, title: str) -> None:
        if self.chat is not None:
            await self._call(self._store.rename, self.chat.id, title)
            self.has_written = True
            self.chat = await self._call(self._store.chat, self.chat.id)

    async def place(self, *, folder: str | None = None, is_pinned: bool | None = None) -> None:
        """Put the chat into a folder, or pin it. Raises BadFolderName and StoreError."""
        assert self.chat is not None, "it has messages"
        chat_id = self.chat.id
        await self._call(self._store.place, chat_id, folder=folder, is_pinned=is_pinned)
        placed = await self._call(self._store.chat, chat_id)
        if self.chat is not None and self.chat.id == chat_id:  # another may be open by now
            self.chat = placed

    async def delete(self, chat_id: int) -> Traces:
        """Delete a chat; return its traces that servers may have kept. Raises StoreError."""
        left = await self._call(traces, self._store, chat_id)
        await self._call(self._store.delete, chat_id)
        if self.chat is not None and self.chat.id == chat_id:
            self.new()
        return left

    async def chats(self) -> list[ChatRecord]:
        return await self._call(self._store.chats)

    async def search(self, words: str) -> list[SearchHit]:
        return await self._call(self._store.search, words)

    async def history(self) -> list[str]:
        return await self._call(self._store.questions)

    async def setting(self, name: str) -> str | None:
        return await self._call(self._store.setting, name)

    async def set_setting(self, name: str, value: str) -> None:
        await self._call(self._store.set_setting, name, value)

    async def _show(self, leaf_id: int | None) -> None:
        path = await self._call(self._store.path, leaf_id)
        self.versions = await self._call(lambda: [self._store.version(each) for each in path])
        self.path, self.leaf_id = path, leaf_id

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def images_of(new: NewQuestion, instead_of: StoredMessage | None) -> tuple[KeptImage, ...]:
    """Return the images of a question, with those of the one that it replaces."""
    kept = () if instead_of is None else instead_of.images
    return (*kept, *(image for image in new.images if image not in kept))


def parent_of_next(path: Sequence[StoredMessage], instead_of: StoredMessage | None) -> int | None:
    """Return the id of the message that a question follows, at the end or in place of another."""
    if instead_of is not None:
        return instead_of.parent_id
    return path[-1].id if path else None
