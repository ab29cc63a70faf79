"""What chats that take turns compute, by the memory of the cache: windows and states beside dense layers.

    room     tokens that one request can have, and whether a prompt of 0.9 of the longest possible context is
             computed once the chats have filled the cache
    chats    conversations that take turns: tokens computed in a turn, relative to the new ones
    side     one long conversation, with a short request of the same client between its turns
    beside   steps that a short prompt of another client waits while a long answer is written

The scheduler is the real one, sizes are divided as the engine does; the model is not run. Counts are the same
on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from mlxserve.bench.report import Figure, Note, Report
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.cache.pool_memory import PoolMemory, max_page_counts, max_states
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import STATE_SLOTS, Request, RequestState, Sampled
from mlxserve.scheduler.disk_pages import Disk
from mlxserve.scheduler.scheduler import Scheduler

PAGE_SIZE = 32
LONGEST = 262_144  # tokens that the model was made for
WINDOW = Window(1024, PAGE_SIZE)
# Gemma 4 26B in 16 bits: 5 layers that see everything (2 heads of 512), 25 with a window (8 heads of 256).
TOKEN_BYTES, WINDOW_TOKEN_BYTES = 5 * 2 * 512 * 2 * 2, 25 * 8 * 256 * 2 * 2
# Qwen3.5 35B-A3B in 16 bits: 10 layers that see everything (2 heads of 256). The state of 30 has 32 matrices of
# 128 x 128 in 32 bits, and 3 columns of a convolution over 8,192 channels.
HYBRID_TOKEN_BYTES = 10 * 2 * 256 * 2 * 2
STATE_BYTES = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
KINDS = ("windows", "states", "dense")
NEW_TEXT, ANSWER, ROUNDS = 300, 60, 5
_NUM_OPEN = 64  # pages that have memory from the start
_SIDE = 600  # tokens of a short prompt
_LONG_ANSWER = 1000
_STEPS = 100_000  # more than any run has


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the cache, and what the layers keep: "dense", "windows" or "states"."""

    nbytes: int
    kind: str = "dense"

    def scheduler(self, disk: Disk | None = None) -> Scheduler:
        """As the engine is built for so many bytes."""
        options = SchedulerConfig(max_num_seqs=64)
        if self.kind == "states":
            return self._with_states(disk)
        if self.kind == "dense":
            pool = PagePool(self.nbytes // (PAGE_SIZE * TOKEN_BYTES), PAGE_SIZE)
            return Scheduler(_config(pool), pool, disk)
        page_bytes = {
            FullPages.name: PAGE_SIZE * TOKEN_BYTES,
            WindowPages.name: PAGE_SIZE * WINDOW_TOKEN_BYTES,
        }
        num_pages, num_window_pages = max_page_counts(
            self.nbytes,
            page_bytes[FullPages.name],
            page_bytes[WindowPages.name],
            WINDOW,
            num_seqs=options.max_num_seqs,
            step_tokens=options.step_budget,
        )
        pool = PagePool(num_pages, PAGE_SIZE, num_open=_NUM_OPEN)
        windows = PagePool(num_window_pages, PAGE_SIZE, num_open=_NUM_OPEN)
        ends, memory = [WindowPages(windows, WINDOW)], PoolMemory(self.nbytes, page_bytes)
        return Scheduler(_config(pool), pool, disk, ends=ends, memory=memory)

    def _with_states(self, disk: Disk | None) -> Scheduler:
        page_bytes = {FullPages.name: PAGE_SIZE * HYBRID_TOKEN_BYTES, StateSlots.name: STATE_BYTES}
        num_slots = max_states(self.nbytes, STATE_BYTES, page_bytes[FullPages.name])
        left = self.nbytes - STATE_SLOTS * STATE_BYTES
        pool = PagePool(left // page_bytes[FullPages.name], PAGE_SIZE, num_open=_NUM_OPEN)
        ends, memory = [StateSlots(num_slots, pool)], PoolMemory(self.nbytes, page_bytes)
        return Scheduler(_config(pool), pool, disk, ends=ends, memory=memory)

    @property
    def _token_bytes(self) -> int:
        return HYBRID_TOKEN_BYTES if self.kind == "states" else TOKEN_BYTES

    @property
    def _chat_bytes(self) -> int:
        """Bytes that a chat keeps beside its pages, to be continued."""
        window = WINDOW.num_held * PAGE_SIZE * WINDOW_TOKEN_BYTES
        return {"dense": 0, "windows": window, "states": STATE_BYTES}[self.kind]

    @property
    def _request_bytes(self) -> int:
        """Bytes that a running request has beside what a chat keeps."""
        return STATE_SLOTS * STATE_BYTES if self.kind == "states" else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest possible context: with one window, or the states of one request, and nothing else."""
        own = self._request_bytes or self._chat_bytes
        return min(LONGEST, (self.nbytes - own) // (PAGE_SIZE * self._token_bytes) * PAGE_SIZE)

    def holds(self, num_chats: int, num_tokens: int) -> bool:
        """Return True if the bytes of all chats fit: each with its tokens and its last window or state."""
        pages = -(-num_tokens // PAGE_SIZE) + 1
        chat = pages * PAGE_SIZE * self._token_bytes + self._chat_bytes
        return num_chats * chat + self._request_bytes <= self.nbytes


def _config(pool: PagePool) -> SchedulerConfig:
    longest = min(LONGEST, pool.num_pages * PAGE_SIZE)
    return SchedulerConfig(max_num_seqs=64, max_model_len=longest)


@dataclass(slots=True)
class Chat:
    """A conversation of one client, with a text of its own."""

    client: str
    token_ids: list[int] = field(default_factory=list)

    def say(self, num_tokens: int) -> None:
        first = len(self.token_ids)
        name = crc32(self.client.encode())
        self.token_ids += [(name * 7919 + first + i) % 200_003 for i in range(num_tokens)]


class Driver:
    """Runs requests on a scheduler, and counts the tokens that it computes."""

    def __init__(self, memory: Memory, disk: Disk | None = None) -> None:
        self.scheduler = memory.scheduler(disk)
        self.num_computed = 0
        self._num_requests = 0

    def request(self, chat: Chat, max_tokens: int) -> Request:
        self._num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        name = f"{chat.client}-{self._num_requests}"
        request = Request(name, list(chat.token_ids), params, client=chat.client)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        self.num_computed += sum(chunk.length for chunk in chunks)
        sampled = [Sampled(7) if chunk.samples else None for chunk in chunks]
        self.scheduler.update(chunks, sampled)

    def drain(self) -> None:
        for _ in range(_STEPS):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests do not end")

    def turn(self, chat: Chat, num_tokens: int = NEW_TEXT, answer: int = ANSWER) -> int:
        """Say so many tokens and get an answer; tokens that were computed."""
        before = self.num_computed
        chat.say(num_tokens)
        self.request(chat, answer)
        self.drain()
        chat.token_ids += [7] * answer
        return self.num_computed - before

    def num_waited(self, chat: Chat) -> int:
        """Steps until a short prompt is begun."""
        asked = self.request(chat, 8)
        for num_steps in range(_STEPS):
            self.step()
            live = self.scheduler.roster.find(asked.id)
            if live is None or live.state is RequestState.RUNNING:
                return num_steps
        raise AssertionError("a short prompt is never begun")


def in_turns(memory: Memory, num_chats: int, num_tokens: int) -> float:
    """Tokens computed, relative to the new ones, once every chat has had its first turn."""
    driver = Driver(memory)
    chats = [Chat(f"chat-{index:03}") for index in range(num_chats)]
    for chat in chats:
        driver.turn(chat, num_tokens)
    computed = sum(driver.turn(chat) for _ in range(ROUNDS) for chat in chats)
    driver.scheduler.check()
    return computed / (ROUNDS * num_chats * (NEW_TEXT + ANSWER))


def with_side_requests(memory: Memory, num_tokens: int) -> float:
    """Tokens computed in a turn of a chat, relative to the new ones, with a short request between turns."""
    driver = Driver(memory)
    chat = Chat("chat-000")
    driver.turn(chat, num_tokens)
    computed = 0
    for index in range(ROUNDS):
        driver.turn(Chat(f"side-{index:03}"), _SIDE)
        computed += driver.turn(chat)
    driver.scheduler.check()
    return computed / (ROUNDS * (NEW_TEXT + ANSWER))


def waited_beside(memory: Memory, num_tokens: int) -> int:
    """Steps that a short prompt waits beside the answer of another client, after other chats have used the cache."""
    driver = Driver(memory)
    for index in range(8):
        driver.turn(Chat(f"chat-{index:03}"), 4000)
    chat = Chat("long-000")
    chat.say(num_tokens)
    driver.request(chat, _LONG_ANSWER)
    while not any(r.num_outputs for r in driver.scheduler.roster.running.values()):
        driver.step()
    other = Chat("side-000")
    other.say(_SIDE)
    num_steps = driver.num_waited(other)
    driver.drain()
    driver.scheduler.check()
    return num_steps


def reached(memory: Memory) -> float:
    """Part of the longest possible context that a request has after others have used the cache; 0 if it is cut."""
    driver = Driver(memory)
    for index in range(8):
        driver.turn(Chat(f"chat-{index:03}"), 4000)
    room = driver.scheduler.max_model_len
    chat = Chat("long-000")
    chat.say(room - 40)
    before = driver.num_computed
    driver.request(chat, 32)
    driver.drain()
    computed = driver.num_computed - before
    is_whole = computed == len(chat.token_ids) + 31  # nothing was computed twice, or cut
    driver.scheduler.check()
    return room / memory.longest if is_whole else 0.0


def bench_memory_turns(sizes: Sequence[float]) -> Report:
    """`sizes` in GiB."""
    figures: list[Figure] = []
    notes: list[Note] = []
    for size in sizes:
        for who in KINDS:
            memory = Memory(int(size * (1 << 30)), who)
            room = memory.scheduler().max_model_len
            figures += [
                Figure(f"{size:g} GiB: room", "tokens", (float(room),), who),
                Figure(f"{size:g} GiB: longest request", "of possible", (reached(memory),), who),
            ]
            for num_chats, num_tokens in ((2, 10_000), (8, 4_000)):
                name = f"{size:g} GiB: {num_chats} chats of {num_tokens:,}"
                ratio = in_turns(memory, num_chats, num_tokens)
                figures.append(Figure(name, "x new", (ratio,), who))
                whole = num_tokens + (ROUNDS + 1) * (NEW_TEXT + ANSWER)
                fits = "all fit" if memory.holds(num_chats, whole) else "do not fit"
                notes.append(Note(f"{name}, their bytes", who, fits))
            figures += [
                Figure(
                    f"{size:g} GiB: 20,000 with side requests",
                    "x new",
                    (with_side_requests(memory, 20_000),),
                    who,
                ),
                Figure(
                    f"{size:g} GiB: short prompt waits",
                    "steps",
                    (float(waited_beside(memory, 10_000)),),
                    who,
                ),
            ]
    settings = {
        "page_size": PAGE_SIZE,
        "window": WINDOW.size,
        "bytes of a token": TOKEN_BYTES,
        "in a window": WINDOW_TOKEN_BYTES,
        "beside states": HYBRID_TOKEN_BYTES,
        "of a state": STATE_BYTES,
        "new tokens of a turn": NEW_TEXT + ANSWER,
    }
    return Report("memory-turns", settings, tuple(figures), notes=tuple(notes))
