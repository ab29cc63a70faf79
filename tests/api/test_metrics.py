import asyncio

from prometheus_client.parser import text_string_to_metric_families

from mlxserve.api.metrics import Metrics
from mlxserve.request import FinishReason

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and the labels beside the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake", sample
            labels = [v for name, v in sample.labels.items() if name not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[(sample.name.removeprefix("mlxserve:"), *labels)] = sample.value
    return found


def test_the_engines_counters_are_shown_as_they_are(client):
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found = samples(reply.text)
    expected = {
        ("num_requests_running",): 0,
        ("num_requests_waiting",): 0,
        ("kv_cache_usage_perc",): 0.25,
        ("sched_budget_tokens",): 2_048,
        ("prefix_cache_queries_total",): 100,
        ("prefix_cache_hits_total",): 40,
        ("num_preemptions_total",): 1,
        ("prompt_tokens_total",): 100,
        ("generation_tokens_total",): 20,
        ("prefill_tokens_total",): 60,
        ("pages_pinned",): 1,
        ("swap_bytes",): 4096,
        ("swapped_tokens_total",): 64,
        ("restored_tokens_total",): 32,
        ("recomputed_tokens_total",): 3,
        ("align_deferrals_total",): 0,
        ("overtakes_total",): 0,
        ("prefix_follow_waits_total",): 5,
        ("immune_requests_total",): 7,
        ("rebound_pages_total",): 8,
        ("tail_copies_total",): 9,
        ("evicted_pages_total",): 10,
        ("pages_hot",): 2,
        ("pages_reserved",): 4,
        ("pages", "free"): 6,
        ("pages", "active"): 2,
        ("pages", "cached"): 1,
        ("request_success_total", "stop"): 3,
        ("request_success_total", "length"): 1,
        ("request_queue_time_seconds_count",): 4,
        ("request_queue_time_seconds_sum",): 4.5,
        ("iteration_tokens_count",): 8,
        ("iteration_tokens_sum",): 30,
    }
    assert {name: found[name] for name in expected} == expected


def test_the_engines_distributions_have_cumulative_buckets(client):
    lines = client.get("/metrics").text.splitlines()
    name = 'mlxserve:request_queue_time_seconds_bucket{le="%s",model_name="fake"} %s'
    for bound, count in (("0.5", "2.0"), ("1.0", "3.0"), ("+Inf", "4.0")):
        assert name % (bound, count) in lines
    assert not [line for line in lines if "request_prefill_time_seconds" in line]


def test_every_request_is_timed_streaming_or_not(client):
    client.post("/v1/chat/completions", json=HELLO)
    client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    found = samples(client.get("/metrics").text)
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "inter_token_latency_seconds",
        "request_decode_time_seconds",
    ):
        assert found[f"{name}_count",] == 3, name


def test_latencies_are_what_the_clock_says(chat):
    times = iter([100.0, 100.5, 100.9, 101.9])
    chat.script = [
        chat.Delta("a", (1,)),
        chat.Delta("bc", (2, 3)),
        chat.Delta("", (4,), (), FinishReason.STOP, chat.Usage(1, 4, 0)),
    ]
    metrics = Metrics(chat)

    async def read() -> None:
        timed = metrics.timed(clock=lambda: next(times))
        timed.start(await chat.submit([1], chat.default_params))
        assert [delta.text async for delta in timed] == ["a", "bc", ""]

    asyncio.run(read())
    found = samples(metrics.response().body.decode())
    assert found["time_to_first_token_seconds_sum",] == 0.5
    assert found["inter_token_latency_seconds_count",] == 3
    assert abs(found["inter_token_latency_seconds_sum",] - 1.4) < 1e-9
    assert abs(found["e2e_request_latency_seconds_sum",] - 1.9) < 1e-9
    assert abs(found["request_decode_time_seconds_sum",] - 1.4) < 1e-9


def test_two_apps_do_not_share_numbers(chat):
    one, two = Metrics(chat), Metrics(chat)
    one.e2e_latency.observe(1.0)
    assert samples(one.response().body.decode())["e2e_request_latency_seconds_count",] == 1
    assert samples(two.response().body.decode())["e2e_request_latency_seconds_count",] == 0
