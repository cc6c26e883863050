"""Metrics in Prometheus' format, under vLLM's names with another prefix, so that dashboards need one change.

What the engine counts is read from ``Service.figures`` at each scrape; latencies are measured here, where a
client's request begins. One registry per app: tests and processes with several apps don't mix.

Source of the names: https://docs.vllm.ai/en/latest/design/metrics.html.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..request import FinishReason, Output
from ..service import HANDOFF_BOUNDS_S, Durations, Figures, Service

PREFIX = "quantkit:"
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Meter:
    """All metrics of an app."""

    def __init__(self, service: Service, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(_FiguresCollector(service, model))
        self.first = self._histogram("time_to_first_token_seconds", "Until the first token.", FIRST_S, model)
        self.next = self._histogram("inter_token_latency_seconds", "Between tokens.", NEXT_S, model)
        self.whole = self._histogram("e2e_request_latency_seconds", "Until the last token.", WHOLE_S, model)
        self.prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS, model)
        self.generated = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS, model)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], model: str) -> Histogram:
        found = Histogram(PREFIX + name, what, ["model_name"], buckets=buckets, registry=self._registry)
        return found.labels(model)

    def timer(self) -> Timer:
        return Timer(self)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Text and its content type."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind


class Timer:
    """Measures one answer."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._start = meter.clock()
        self._last: float | None = None

    def add(self, output: Output) -> None:
        now, num_tokens = self._meter.clock(), len(output.token_ids)
        if num_tokens:
            if self._last is None:
                self._meter.first.observe(now - self._start)
                self._last = now
                num_tokens -= 1
            for _ in range(num_tokens):  # tokens that come together took the same share of the time
                self._meter.next.observe((now - self._last) / num_tokens)
            self._last = now
        if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._meter.whole.observe(now - self._start)
            self._meter.prompt.observe(output.num_prompt_tokens)
            self._meter.generated.observe(output.num_generated_tokens)


class _FiguresCollector(Collector):
    def __init__(self, service: Service, model: str) -> None:
        self._service, self._model = service, model

    def describe(self) -> Iterator[Metric]:
        """Registering must not ask the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        figures = self._service.figures()
        for name, what, gauge in _gauges(figures):
            yield self._of(GaugeMetricFamily(PREFIX + name, what, labels=["model_name"]), gauge)
        for name, what, count in _counters(figures, self._service.config.cache.has_prefix_cache):
            yield self._of(CounterMetricFamily(PREFIX + name, what, labels=["model_name"]), count)
        success = CounterMetricFamily(
            PREFIX + "request_success", "Answers by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason in FinishReason:
            success.add_metric([self._model, reason.value], figures.finished.get(reason.value, 0))
        yield success
        restarts = CounterMetricFamily(
            PREFIX + "worker_restarts", "Workers that were started anew.", labels=["model_name", "phase"]
        )
        for phase, count in figures.worker_restarts.items():
            restarts.add_metric([self._model, phase], count)
        yield restarts
        yield self._handoffs(figures.handoff_seconds)

    def _handoffs(self, durations: Durations) -> Metric:
        found = HistogramMetricFamily(
            PREFIX + "handoff_seconds", "From the prefill worker to the decode worker.", labels=["model_name"]
        )
        bounds = (*(str(bound) for bound in HANDOFF_BOUNDS_S), "+Inf")
        counts = accumulate(durations.counts)
        found.add_metric([self._model], list(zip(bounds, counts, strict=True)), durations.total_s)
        return found

    def _of(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family


def _gauges(figures: Figures) -> tuple[tuple[str, str, float], ...]:
    usage = figures.num_pages_used / figures.num_pages if figures.num_pages else 0.0
    return (
        ("num_requests_running", "Requests that have pages.", figures.num_running),
        ("num_requests_waiting", "Requests that wait for their first step.", figures.num_waiting),
        ("kv_cache_usage_perc", "Share of the pages that requests hold, 0 to 1.", usage),
        ("kv_pages", "Pages of the pool.", figures.num_pages),
        ("kv_pages_cached", "Pages that only the prefix cache holds.", figures.num_pages_cached),
        (
            "kv_pages_quarantined",
            "Freed pages that a running step may still write.",
            figures.num_pages_quarantined,
        ),
    )


def _counters(figures: Figures, has_prefix_cache: bool) -> tuple[tuple[str, str, float], ...]:
    drafts = figures.speculation
    return (
        ("prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", figures.prompt_tokens),
        ("generation_tokens", "Generated tokens.", figures.generated_tokens),
        ("num_preemptions", "Requests that gave up their pages.", figures.preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up.", figures.prompt_tokens if has_prefix_cache else 0),
        ("prefix_cache_hits", "Prompt tokens found.", figures.cached_tokens),
        ("prefill_steps", "Steps on prefill weights.", figures.prefill_steps),
        ("decode_steps", "Steps on decode weights.", figures.decode_steps),
        ("spec_decode_num_drafts", "Times that proposed tokens were verified.", drafts.num_drafts),
        ("spec_decode_num_draft_tokens", "Proposed tokens.", drafts.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Proposed tokens that were right.", drafts.num_accepted_tokens),
        (
            "spec_decode_num_requests_left_out",
            "Requests for which no tokens are proposed (sampling, grammars, penalties).",
            drafts.num_requests_left_out,
        ),
        ("kv_tag_checks", "Checks of page tags.", figures.kv_tag_checks),
        ("kv_tag_mismatches", "Entries that named a page of someone else.", figures.kv_tag_mismatches),
    )
