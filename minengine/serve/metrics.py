"""What Prometheus scrapes at /metrics. Names are vLLM's where the meaning is the same.

The engine's counts are read when they are asked for. A request is observed once, at its end, from its timeline, so a token costs
the running server nothing.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .worker_metrics import worker_families

if TYPE_CHECKING:
    from ..request import RequestOutput
    from ..streams import AsyncFront

__all__ = ["ServerMetrics"]

# vLLM's bounds, and finer ones below them: small models are faster than those that its bounds were chosen for.
SHORT_S = (.0005, .001, .0025, .005, .0075, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_S = (.001, .0025, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
LONG_S = (.005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5)) + (1_000_000,)
REASONS = ("stop", "length", "abort", "error")


class Histogram:
    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1  # a bucket holds its own bound
            self.sum += value

    def family(self, labels: dict[str, str]) -> Metric:
        bounds = [*map(repr, map(float, self.bounds)), "+Inf"]
        family = HistogramMetricFamily(self.name, self.about, labels=list(labels))
        family.add_metric(list(labels.values()), list(zip(bounds, accumulate(self.counts))), self.sum)
        return family


class ServerMetrics:
    """The server's own registry: two servers in one process do not mix their counts.

    `observe` and `render` belong to the event loop's thread.
    """

    def __init__(self, engine: AsyncFront, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token, queueing included.", FIRST_S)
        self._itl = Histogram("vllm:inter_token_latency_seconds", "Gaps between neighbouring output tokens of a request.", SHORT_S)
        self._tpot = Histogram("vllm:request_time_per_output_token_seconds", "Mean gap between the output tokens of a request.", SHORT_S)
        self._e2e = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LONG_S)
        self._queue = Histogram("vllm:request_queue_time_seconds", "From arrival to first admission.", LONG_S)
        self._prefill = Histogram("vllm:request_prefill_time_seconds", "From first admission to the first token.", LONG_S)
        self._decode = Histogram("vllm:request_decode_time_seconds", "From the first token to the end.", LONG_S)
        self._inference = Histogram("vllm:request_inference_time_seconds", "From first admission to the end.", LONG_S)
        self._prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._generation = Histogram("vllm:request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def observe(self, output: RequestOutput) -> None:
        """Account for a request at its end; `output` is its last one."""
        times = output.metrics
        self._prompt.observe([len(output.prompt_token_ids)])
        self._generation.observe([len(times.token_s)])
        if times.admitted_s is not None:
            self._queue.observe([times.admitted_s - times.arrival_s])
        if times.finished_s is None:
            return
        self._e2e.observe([times.finished_s - times.arrival_s])
        if not times.token_s:
            return
        first, last = times.token_s[0], times.token_s[-1]
        self._ttft.observe([first - times.arrival_s])
        self._prefill.observe([first - times.admitted_s])
        self._decode.observe([times.finished_s - first])
        self._inference.observe([times.finished_s - times.admitted_s])
        if len(times.token_s) > 1:
            self._itl.observe(times.itl_s)
            self._tpot.observe([(last - first) / (len(times.token_s) - 1)])

    def count_answer(self, method: str, handler: str, status: int) -> None:
        """Count an answer by its endpoint; status 0: the client left before there was one."""
        self._answers[method, handler, str(status)] += 1

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats, names, values = self._engine.stats(), list(self._labels), list(self._labels.values())
        for name, about, value in (
            ("vllm:num_requests_running", "Requests that hold blocks and take part in steps.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold; 1 is all.", stats.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(name, about, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, about, value in (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Output tokens.", stats.generation_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("vllm:num_preemptions", "Times that a request gave its blocks up, of requests that have ended.", stats.preemptions),
            ("minengine:steps", "Steps of the engine.", stats.steps),
            ("minengine:jump_forward_tokens", "Output tokens that a grammar forced: written without being sampled.", stats.jump_forward_tokens),
        ):
            counter = CounterMetricFamily(name, about, labels=names)
            counter.add_metric(values, value)
            yield counter
        ended = CounterMetricFamily("vllm:request_success", "Requests that have ended, by reason.", labels=[*names, "finished_reason"])
        for reason in REASONS:
            ended.add_metric([*values, reason], stats.finished.get(reason, 0))
        yield ended
        yield from worker_families(self._engine.workers)
        answers = CounterMetricFamily("http_requests", "Answers by endpoint and status.", labels=["method", "handler", "status"])
        for key, count in sorted(self._answers.items()):
            answers.add_metric(key, count)
        yield answers
        for histogram in (self._ttft, self._itl, self._tpot, self._e2e, self._queue, self._prefill, self._decode, self._inference, self._prompt,
                          self._generation):
            yield histogram.family(self._labels)
