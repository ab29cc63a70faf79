"""Memory moves between full pages, windows and recurrent states by what it costs to compute them again."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.request import STATE_SLOTS
from tests.scheduler.conftest import GhostEngine

MakeEngine = Callable[..., GhostEngine]
PAGE, WINDOW, COST = 4, 12, 3  # COST: bytes of a window's page, where one of the other layers has 1
STATE = 10  # bytes of a state
HELD = Window(WINDOW, PAGE).num_held


def windows_of(engine: GhostEngine) -> PagePool:
    windows = find(engine.scheduler.page_tables.ends, WindowPages)
    assert windows is not None
    return windows.pool


def numbered(first: int, count: int) -> list[int]:
    return list(range(1000 * first, 1000 * first + count))


def turn(engine: GhostEngine, prompt: list[int]) -> int:
    """Tokens computed for the prompt and a short answer."""
    before = engine.num_computed
    engine.add(prompt, 1)
    engine.drain()
    return engine.num_computed - before


def shared(make_engine: MakeEngine, num_pages: int, **options: object) -> GhostEngine:
    return make_engine(
        num_pages=num_pages, window=WINDOW, shared=COST, max_model_len=4096, **options
    )


def test_a_request_can_have_all_but_its_own_window(make_engine: MakeEngine) -> None:
    engine = shared(make_engine, 60)
    for number in range(8):
        turn(engine, numbered(number, 40))
    assert windows_of(engine).blank.limit > 2 * HELD, "the windows of these took memory"
    longest = engine.scheduler.max_model_len
    assert longest == 60 * PAGE
    assert turn(engine, numbered(9, longest - 2)) == longest - 2, "at once, and as a whole"
    assert engine.scheduler.pool.blank.limit == 60


def test_conversations_that_fit_keep_their_windows(make_engine: MakeEngine) -> None:
    count, length = 6, 60
    engine = shared(make_engine, count * (ceil((length + 40) / PAGE) + HELD * COST) + 40)
    prompts = [numbered(number, length) for number in range(count)]
    for prompt in prompts:
        turn(engine, prompt)
    for _ in range(4):
        for number, prompt in enumerate(prompts):
            prompts[number] = [*prompt, *numbered(50 + number, 8)]
            assert turn(engine, prompts[number]) <= 2 * 8 + PAGE
    assert engine.num_resized > 0


def test_a_long_conversations_window_outlives_short_requests(make_engine: MakeEngine) -> None:
    engine = shared(make_engine, 200)
    chat = numbered(1, 300)
    turn(engine, chat)
    for number in range(8):
        turn(engine, numbered(10 + number, 30))
    chat += numbered(2, 8)
    # The end 12 tokens later may be worth less than a short request's.
    assert turn(engine, chat) <= 2 * 8 + 2 * PAGE


def test_pages_that_lead_to_a_lost_place_are_evicted_first(make_engine: MakeEngine) -> None:
    engine = shared(make_engine, 100)
    turn(engine, numbered(2, 120))
    windows = find(engine.scheduler.page_tables.ends, WindowPages)
    assert windows is not None
    windows.ends.make_room(windows.pool.num_free)
    turn(engine, numbered(3, 4))
    first = [
        engine.scheduler.pool.index.hash_of(page) for page in engine.scheduler.pool.order.useless
    ]
    hashes = engine.scheduler.page_tables.cache.hashes_of(numbered(2, 120), b"")
    assert all(map(engine.scheduler.pool.index.is_known, hashes))
    assert set(hashes) <= set(first)


def test_nothing_moves_for_a_request_that_could_not_begin(make_engine: MakeEngine) -> None:
    engine = shared(make_engine, 60, max_num_seqs=4)
    engine.add(numbered(1, 60), 100)
    while not engine.requests["r0"].num_outputs:
        engine.step()
    engine.add(numbered(2, 220), 1)  # beside the first it has no room
    engine.step()
    limits = engine.scheduler.pool.blank.limit, windows_of(engine).blank.limit
    for _ in range(4):
        engine.step()
        assert (engine.scheduler.pool.blank.limit, windows_of(engine).blank.limit) == limits
    engine.drain()


def test_answers_that_need_no_memory_are_not_read_early(make_engine: MakeEngine) -> None:
    engine = shared(make_engine, 100)
    engine.add(numbered(1, 20), 60)
    while engine.scheduler.has_work:
        engine.step()
        balance = engine.scheduler.planner.balance
        assert balance is not None
        if engine.scheduler.roster.running and not engine.scheduler.roster.waiting.num_queued:
            assert not balance.is_wanted(engine.scheduler.num_steps + 1)


# ---- recurrent states


def with_states(make_engine: MakeEngine, num_pages: int, **options: object) -> GhostEngine:
    return make_engine(num_pages=num_pages, state_bytes=STATE, max_model_len=4096, **options)


def test_a_request_can_have_all_but_its_own_states(make_engine: MakeEngine) -> None:
    engine = with_states(make_engine, 60)
    for number in range(8):
        turn(engine, numbered(number, 30))
    states = find(engine.scheduler.page_tables.ends, StateSlots)
    assert states is not None
    assert states.stats.num_slots > STATE_SLOTS, "the states of these took memory"
    longest = engine.scheduler.max_model_len
    assert longest == 60 * PAGE
    assert turn(engine, numbered(9, longest - 2)) == longest - 2, "at once, and as a whole"
    assert engine.scheduler.pool.blank.limit == 60
    assert states.stats.num_slots == STATE_SLOTS


def test_conversations_that_fit_keep_their_states(make_engine: MakeEngine) -> None:
    count, length = 6, 60
    num_pages = count * (ceil((length + 40) / PAGE) + STATE) + 3 * STATE
    engine = with_states(make_engine, num_pages)
    prompts = [numbered(number, length) for number in range(count)]
    for prompt in prompts:
        turn(engine, prompt)
    for _ in range(4):
        for number, prompt in enumerate(prompts):
            prompts[number] = [*prompt, *numbered(50 + number, 8)]
            assert turn(engine, prompts[number]) <= 3 * 8 + PAGE
    assert engine.states.num_restored > 3 * count


def test_requests_wait_where_their_states_have_no_memory(make_engine: MakeEngine) -> None:
    engine = with_states(make_engine, 2 * STATE + 20)
    for number in range(5):
        engine.add(numbered(number, 9), 8)
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.roster.running))
    assert most == 2, "two states each, beside the pages of all"
