"""Metrics and health: names that dashboards know, figures of the engine, latencies measured here."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quantkit_serve.http.metrics import Meter
from quantkit_serve.request import FinishReason, Output
from quantkit_serve.service import HANDOFF_BOUNDS_S, Durations, Figures, Health, SpeculationFigures

from .conftest import Client
from .fakes import FakeService, bundled

FIGURES = Figures(
    num_waiting=3, num_running=2, num_pages=100, num_pages_used=25, num_pages_cached=7, num_pages_quarantined=1,
    prompt_tokens=1000, generated_tokens=500, cached_tokens=400, preemptions=4, prefill_steps=10, decode_steps=90,
    kv_tag_checks=99, kv_tag_mismatches=2, finished={"stop": 5, "error": 1}, worker_restarts={"decode": 3},
    handoff_seconds=Durations((2, 0, 5, *(0,) * (len(HANDOFF_BOUNDS_S) - 2)), 0.5),
    speculation=SpeculationFigures(40, 70, 50, 6),
)  # fmt: skip


def samples(client: Client) -> dict[str, float]:
    text = client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny-glm"
            rest = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name + "".join(f"{{{k}={v}}}" for k, v in rest.items())] = sample.value
    return found


def test_figures_of_the_engine(client: Client, service: FakeService) -> None:
    service.shown = FIGURES
    found = samples(client)
    expected = {
        "num_requests_running": 2, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.25,
        "kv_pages": 100, "kv_pages_cached": 7, "kv_pages_quarantined": 1,
        "prompt_tokens_total": 1000, "generation_tokens_total": 500, "num_preemptions_total": 4,
        "prefix_cache_queries_total": 1000, "prefix_cache_hits_total": 400, "prefill_steps_total": 10,
        "decode_steps_total": 90, "spec_decode_num_drafts_total": 40, "spec_decode_num_draft_tokens_total": 70,
        "spec_decode_num_accepted_tokens_total": 50, "spec_decode_num_requests_left_out_total": 6,
        "kv_tag_checks_total": 99, "kv_tag_mismatches_total": 2,
        "request_success_total{finished_reason=stop}": 5, "request_success_total{finished_reason=length}": 0,
        "request_success_total{finished_reason=error}": 1, "worker_restarts_total{phase=decode}": 3,
        "handoff_seconds_bucket{le=0.0001}": 2, "handoff_seconds_bucket{le=0.00025}": 2,
        "handoff_seconds_bucket{le=0.0005}": 7, "handoff_seconds_bucket{le=+Inf}": 7,
        "handoff_seconds_count": 7, "handoff_seconds_sum": 0.5,
    }  # fmt: skip
    assert {name: found["quantkit:" + name] for name in expected} == expected


def test_latencies(client: Client, service: FakeService) -> None:
    before = samples(client)
    client.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "n": 2})
    after = samples(client)
    counts = {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": 8,
        "e2e_request_latency_seconds": 2,
        "request_prompt_tokens": 2,
        "request_generation_tokens": 2,
    }
    for name, count in counts.items():
        key = f"quantkit:{name}_count"
        assert after[key] - before[key] == count
    assert after["quantkit:request_generation_tokens_sum"] - before["quantkit:request_generation_tokens_sum"] == 10


def test_times_are_measured_from_the_submission() -> None:
    now = [0.0]
    meter = Meter(FakeService(bundled()), "m", lambda: now[0])
    timer = meter.timer()
    for seconds, tokens, finish in ((3.0, 1, None), (5.0, 2, None), (6.0, 0, FinishReason.STOP)):
        now[0] = seconds
        timer.add(Output("r", tuple(range(tokens)), finish=finish, num_prompt_tokens=4, num_generated_tokens=3))
    text = meter.exposition("")[0].decode()
    values = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert values["quantkit:time_to_first_token_seconds_sum"] == 3
    assert values["quantkit:inter_token_latency_seconds_sum"] == 2
    assert values["quantkit:inter_token_latency_seconds_count"] == 2
    assert values["quantkit:e2e_request_latency_seconds_sum"] == 6


def test_openmetrics_if_asked_for(client: Client) -> None:
    got = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert got.headers["content-type"].startswith("application/openmetrics-text")
    assert got.text.endswith("# EOF\n")


def test_health(client: Client, service: FakeService) -> None:
    assert client.get("/health").json() == {"status": "ok", "reason": None}
    for health, status in (
        (Health(is_alive=False, reason="a step raised"), "dead"),
        (Health(is_alive=True, is_stuck=True, reason="a step takes 60 s"), "stuck"),
        (Health(is_alive=True, is_degraded=True, reason="a worker starts"), "degraded"),
    ):
        service.status = health
        got = client.get("/health")
        assert got.status_code == 503
        assert got.json() == {"status": status, "reason": health.reason}


def test_version_shows_what_the_server_was_started_with(client: Client, service: FakeService) -> None:
    got = client.get("/version").json()
    assert got["config"]["cache"]["page_size"] == 4 and got["config"]["model"]["weights"] == "dual"
    assert got["kv_format_id"] == "kv-1" and got["memory"] == {"shared": 1}
