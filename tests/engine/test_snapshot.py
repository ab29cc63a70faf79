"""What is told of a request in each phase of its life."""

from __future__ import annotations

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.snapshot import Phase, view
from mlxserve.request import LiveRequest, PageRun, Request, RequestState


def request() -> Request:
    return LiveRequest(Request("a", list(range(100)), SamplingParams(), client="me", priority=2))


def test_a_waiting_request_is_queued_at_its_place() -> None:
    seen = view(request(), age=1.5, position=3)
    assert (seen.phase, seen.position, seen.age) == (Phase.QUEUED, 3, 1.5)
    assert (seen.num_computed, seen.num_to_compute, seen.num_prompt) == (0, 100, 100)
    assert (seen.id, seen.client, seen.priority) == ("a", "me", 2)


def test_a_running_request_prefills_then_decodes() -> None:
    running = request()
    running.state, running.prefill_end, running.num_computed = RequestState.RUNNING, 100, 64
    assert view(running, age=0, position=None).phase is Phase.PREFILLING
    assert view(running, age=0, position=None).num_computed == 64
    running.num_computed = 100
    running.token_ids.extend([1, 2])
    seen = view(running, age=0, position=None)
    assert (seen.phase, seen.num_outputs) == (Phase.DECODING, 2)
    running.num_computed = 103  # a step ahead of what was read
    assert view(running, age=0, position=None).num_computed == seen.num_to_compute == 100


def test_a_preempted_request_computes_its_answer_again_too() -> None:
    waiting = request()
    waiting.prefill_end, waiting.num_preemptions = 100, 1
    waiting.token_ids.extend([1] * 20)
    waiting.state, waiting.prefill_end = RequestState.RUNNING, 120
    seen = view(waiting, age=0, position=None)
    assert (seen.num_to_compute, seen.num_prompt, seen.num_preemptions) == (120, 100, 1)


def test_pages_that_are_read_from_disk_are_loading() -> None:
    running = request()
    running.state, running.prefill_end = RequestState.RUNNING, 100
    running.loading = PageRun(0, (b"hash",))
    assert view(running, age=0, position=None).phase is Phase.LOADING
