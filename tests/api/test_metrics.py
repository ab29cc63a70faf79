from prometheus_client.parser import text_string_to_metric_families

from mlxserve.api.metrics import Metrics, metrics_page
from mlxserve.core.stats import Histogram, PoolStats, SchedulerStats, Stats, StepStats
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without the model's label."""
    found = {}
    for family in text_string_to_metric_families(text):
        if "loop_blocked" in family.name:  # of no model
            continue
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake", sample
            labels = [v for name, v in sample.labels.items() if name not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[(sample.name.removeprefix("mlxserve:"), *labels)] = sample.value
    return found


def shown(chat, stats: Stats) -> str:
    """The metrics page for these numbers."""
    chat.stats = lambda: stats
    return metrics_page([Metrics(chat.model_name, chat.stats)]).body.decode()


def test_the_page_is_in_the_format_of_prometheus(client):
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert samples(reply.text)["prefix_cache_queries_total",] == 100


def test_a_counter_is_exported_under_its_fields_name(chat):
    stats = SchedulerStats(tail_copies=9, num_preemptions=1)
    found = samples(shown(chat, Stats(scheduler=stats)))
    assert found["tail_copies_total",] == 9
    assert found["num_preemptions_total",] == 1


def test_the_names_that_vllms_dashboards_use_are_exported(chat):
    stats = Stats(
        scheduler=SchedulerStats(
            num_running=3, num_waiting=4, prompt_tokens=100, prefix_queries=100, prefix_hits=40
        ),
        pool=PoolStats(num_pages=8, num_free=6, num_used=2, num_cached=1),
        engine=StepStats(generation_tokens=20),
    )
    expected = {
        ("num_requests_running",): 3,
        ("num_requests_waiting",): 4,
        ("kv_cache_usage_perc",): 0.25,
        ("prefix_cache_queries_total",): 100,
        ("prefix_cache_hits_total",): 40,
        ("prompt_tokens_total",): 100,
        ("generation_tokens_total",): 20,
    }
    found = samples(shown(chat, stats))
    assert {name: found[name] for name in expected} == expected


def test_the_histograms_of_tokens_have_vllms_names_and_steps(chat):
    engine = StepStats()
    engine.request_prompt_tokens.observe(300)
    engine.request_generation_tokens.observe(7)
    engine.iteration_tokens.observe(40)
    page = shown(chat, Stats(engine=engine))
    for name, below, above, total in (
        ("request_prompt_tokens", "200.0", "500.0", "300.0"),
        ("request_generation_tokens", "5.0", "10.0", "7.0"),
        ("iteration_tokens_total", "32.0", "64.0", "40.0"),
    ):
        assert f"# TYPE mlxserve:{name} histogram" in page
        labels = f'model_name="{chat.model_name}"'
        assert f'mlxserve:{name}_bucket{{le="{below}",{labels}}} 0.0' in page
        assert f'mlxserve:{name}_bucket{{le="{above}",{labels}}} 1.0' in page
        assert f"mlxserve:{name}_sum{{{labels}}} {total}" in page


def test_pages_are_counted_by_state_and_finished_requests_by_reason(chat):
    pool = PoolStats(num_pages=8, num_free=6, num_used=2, num_cached=1, num_evicted=10)
    engine = StepStats()
    engine.request_success.update(["stop", "length", "stop"])
    found = samples(shown(chat, Stats(pool=pool, engine=engine)))
    assert [found["pages", state] for state in ("free", "active", "cached")] == [6, 2, 1]
    assert found["request_success_total", "stop"] == 2
    assert found["request_success_total", "length"] == 1
    assert found["evicted_pages_total",] == 10


def test_every_metric_has_a_help_text(chat):
    page = shown(chat, Stats())
    helps = [line.split(" ", 3) for line in page.splitlines() if line.startswith("# HELP")]
    assert helps
    assert all(text.endswith(".") for _, _, _, text in helps)


def test_a_histogram_has_cumulative_buckets(chat):
    engine = StepStats(queue_seconds=Histogram((0.5, 1), [2, 1, 1], 4.5))
    page = shown(chat, Stats(engine=engine))
    name = 'mlxserve:request_queue_time_seconds_bucket{le="%s",model_name="fake"} %s'
    for bound, count in (("0.5", "2.0"), ("1.0", "3.0"), ("+Inf", "4.0")):
        assert name % (bound, count) in page.splitlines()
    found = samples(page)
    assert found["request_queue_time_seconds_count",] == 4
    assert found["request_queue_time_seconds_sum",] == 4.5


def test_every_request_is_timed_streamed_or_not(client):
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


def test_latencies_match_the_clock(chat):
    times = iter([100.0, 100.5, 100.9, 101.9])
    deltas = [
        Delta("a", (1,)),
        Delta("bc", (2, 3)),
        Delta("", (4,), (), FinishReason.STOP, Usage(1, 4, 0)),
    ]
    metrics = Metrics(chat.model_name, chat.stats)

    timer = metrics.timer(clock=lambda: next(times))
    for delta in deltas:
        timer.observe(delta)
    found = samples(metrics_page([metrics]).body.decode())
    assert found["time_to_first_token_seconds_sum",] == 0.5
    assert found["inter_token_latency_seconds_count",] == 3
    assert abs(found["inter_token_latency_seconds_sum",] - 1.4) < 1e-9
    assert abs(found["e2e_request_latency_seconds_sum",] - 1.9) < 1e-9
    assert abs(found["request_decode_time_seconds_sum",] - 1.4) < 1e-9


def test_each_model_has_its_own_numbers_under_its_label(chat):
    one, two = Metrics("one", chat.stats), Metrics("two", chat.stats)
    one.latencies.e2e_request_latency_seconds.observe(1.0)
    page = metrics_page([one, two]).body.decode()
    for model, count in (("one", 1.0), ("two", 0.0)):
        line = f'mlxserve:e2e_request_latency_seconds_count{{model_name="{model}"}} {count}'
        assert line in page.splitlines()
    assert page.count("# TYPE mlxserve:e2e_request_latency_seconds histogram") == 1
