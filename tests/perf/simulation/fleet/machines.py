"""A server's memory and its time, and the store that all servers share."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tests.perf.simulation.costs import CostModel
from tests.perf.simulation.fleet.sessions import TEMPLATE, Chain, Turn

PAGE = 32  # tokens
TOKEN_BYTES = 131_072  # keys and values of an 8B model
_CHUNK = 2048  # prompt tokens of a step


def whole_pages(num_tokens: int) -> int:
    """Return the tokens of the full pages."""
    return num_tokens // PAGE * PAGE


class Memory:
    """Chains by last use, of at most `capacity` tokens; a template counts once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lengths: OrderedDict[int, tuple[int, int]] = OrderedDict()  # (tokens, own tokens)
        self.templates: set[int] = set()
        self._used = 0

    def length(self, chain: Chain) -> int:
        """Return the tokens at the beginning of a chain that are here."""
        own = self._lengths.get(chain.number, (0, 0))[0]
        if own:
            return own
        if chain.parent is not None:
            return min(self._lengths.get(chain.parent.number, (0, 0))[0], chain.shared)
        return TEMPLATE if chain.template in self.templates else 0

    def keep(self, chain: Chain, num_tokens: int) -> list[int]:
        """Keep the first tokens of a chain; return the numbers of the chains that were evicted."""
        if chain.template not in self.templates:
            self.templates.add(chain.template)
            self._used += TEMPLATE
        own = max(0, num_tokens - chain.shared)
        self._used += own - self._lengths.get(chain.number, (0, 0))[1]
        self._lengths[chain.number] = num_tokens, own
        self._lengths.move_to_end(chain.number)
        evicted = []
        while self._used > self._capacity and len(self._lengths) > 1:
            number, (_, lost) = self._lengths.popitem(last=False)
            self._used -= lost
            evicted.append(number)
        return evicted

    def clear(self) -> None:
        self._lengths.clear()
        self.templates.clear()
        self._used = 0


@dataclass(eq=False, slots=True)
class Run:
    """A turn on a server."""

    turn: Turn
    server: int
    epoch: int  # of the server: it has failed since if it has another one now
    computed: int  # tokens of its prompt


class Server:
    """One Mac: prompts one after another, answers side by side."""

    def __init__(self, number: int, cost: CostModel, capacity: int) -> None:
        self.number = number
        self.memory = Memory(capacity)
        self.runs: set[Run] = set()
        self.epoch = 0
        self.free_at = 0.0
        self._cost = cost
        self._num_decodes = self._context = 0

    def prefill_seconds(self, num_tokens: int, start: int) -> float:
        """Seconds to compute `num_tokens` after the first `start` ones."""
        cost = self._cost
        attended = num_tokens * (start + num_tokens / 2)
        steps = -(-num_tokens // _CHUNK) * cost.step
        return steps + num_tokens * cost.prefill + attended * cost.prefill_context

    def begin_answer(self, turn: Turn) -> float:
        """Return the seconds of an answer, beside those that run now."""
        self._num_decodes += 1
        self._context += turn.prompt
        cost = self._cost
        step = cost.step + self._num_decodes * cost.decode + self._context * cost.decode_context
        return turn.answer * step

    def end_answer(self, turn: Turn) -> None:
        self._num_decodes -= 1
        self._context -= turn.prompt

    def fail(self, now: float) -> list[Turn]:
        """Lose everything; return the turns that ran."""
        turns = [run.turn for run in sorted(self.runs, key=lambda run: run.turn.session.number)]
        self.runs.clear()
        self.memory.clear()
        self.epoch += 1
        self.free_at = now
        self._num_decodes = self._context = 0
        return turns


@dataclass(slots=True)
class Store:
    """A page store: its memory, and one link that all servers share.

    capacity: tokens
    bytes_per_second: of the link, to and fro together
    """

    capacity: int
    bytes_per_second: float
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_refused: int = 0  # of writes that the link had no time for
    busy_until: float = 0.0
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.capacity)

    def ready_at(self, num_tokens: int, now: float) -> float:
        """Return when a read of `num_tokens` would end if it began now."""
        return max(now, self.busy_until) + num_tokens * TOKEN_BYTES / self.bytes_per_second

    def read(self, num_tokens: int, now: float) -> None:
        self.busy_until = self.ready_at(num_tokens, now)
        self.bytes_read += num_tokens * TOKEN_BYTES

    def write(self, chain: Chain, num_tokens: int, now: float) -> None:
        """Write what the store lacks of a chain, unless the link is a second behind."""
        missing = max(0, num_tokens - self.memory.length(chain))
        if self.busy_until - now > 1.0:
            self.bytes_refused += missing * TOKEN_BYTES
            return
        self.busy_until = self.ready_at(missing, now)
        self.bytes_written += missing * TOKEN_BYTES
        self.memory.keep(chain, num_tokens)
