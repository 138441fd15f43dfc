"""What a replay came to: a record a request, and from the records every metric beside its definition.

    metrics = report(records, duration_s=900, gpus=24, slo=Slo(e2e_tok_s=100))
    print(table({"engine": metrics}))

Engine, server and simulator give the same records, so their reports can stand side by side. Pure Python.
"""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from math import fsum
from typing import Any, Iterable, Mapping

from .closed_loop import Turn
from .metrics import MetricError, decode_tok_s, e2e_tok_s, e2e_tok_s_user, interactivity_q, itl_s, output_tok_s_gpu, ttft_s
from .stats import mean, percentile

__all__ = ["DEFINITIONS", "Record", "Slo", "few_requests", "report", "table"]


@dataclass(slots=True, kw_only=True)
class Record:
    """One request of a replay. Times in seconds on one clock, that of all records beside it; None: it did not come to that.

        arrival ── wait ──▶ admitted ── prefill ──▶ first token ── decode ──▶ end
    """

    session: str  # of one live copy
    agent: int
    number: int  # of the agent's requests
    arrival_s: float
    admitted_s: float | None = None  # first computed on; None where nobody says, as behind a URL
    first_token_s: float | None = None
    end_s: float | None = None  # answered or failed
    input_tokens: int
    cached_tokens: int = 0  # of the input, found in any cache
    output_tokens: int = 0
    num_hits_by_tier: dict[str, int] = field(default_factory=dict)  # of cached_tokens, where they were: "device", "host", ...
    error: str | None = None
    cold: bool = False  # from outside the sessions

    @classmethod
    def of(cls, turn: Turn, arrival_s: float) -> Record:
        """Of a turn that arrives now."""
        return cls(session=turn.session, agent=turn.agent, number=turn.number, arrival_s=arrival_s, input_tokens=turn.request.input_tokens, cold=turn.cold)

    @classmethod
    def from_json(cls, line: str) -> Record:
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def answered(self) -> bool:
        """It ended, with at least a token and no error."""
        return self.end_s is not None and self.error is None and self.output_tokens > 0

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        return ttft_s(self.arrival_s, self.first_token_s)

    @property
    def itl_s(self) -> float | None:
        """None for an answer of one token: it has no gap."""
        return itl_s(self.latency_s, self.ttft_s, self.output_tokens) if self.output_tokens > 1 else None


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a request must not miss to count as good; None: no limit.

    Raises:
        MetricError: a limit that is not positive.
    """

    ttft_s: float | None = None  # at most
    itl_s: float | None = None  # at most; an answer of one token has none, and meets it
    e2e_tok_s: float | None = None  # at least

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise MetricError(f"slo {limit.name}={value!r}: use a positive limit, or None for none")

    def met(self, record: Record) -> bool:
        """Whether this answered request meets every limit."""
        gap = record.itl_s
        return ((self.ttft_s is None or record.ttft_s <= self.ttft_s) and (self.itl_s is None or gap is None or gap <= self.itl_s)
                and (self.e2e_tok_s is None or e2e_tok_s(record.latency_s, record.output_tokens) >= self.e2e_tok_s))


_SPREAD = ("mean", "p50", "p90", "p99")
DEFINITIONS: dict[str, tuple[str, str]] = {  # name: unit, definition
    "requests": ("", "answered within the window; all that follows is of these unless it says otherwise"),
    "failed": ("", "ended within the window with an error, or without a token"),
    "input_tokens_mean": ("tokens", "of a prompt"),
    "output_tokens_mean": ("tokens", "of an answer"),
    **{f"ttft_s_{how}": ("s", "first token - arrival (AIPerf's TTFT): queueing and prefill are inside") for how in _SPREAD},
    **{f"queue_s_{how}": ("s", "first computed on - arrival") for how in _SPREAD},
    **{f"itl_s_{how}": ("s", "(latency - TTFT) / (output tokens - 1), one number a request (AIPerf's ITL)") for how in _SPREAD},
    **{f"gap_s_{how}": ("s", "between two neighbouring tokens of an answer, all gaps of all requests; the simulator alone tells it") for how in _SPREAD[1:]},
    "e2e_tok_s_user": ("tok/s", "mean over requests of output tokens / latency (the article's E2E tok/s/user, read as a mean over requests)"),
    "e2e_tok_s_user_pooled": ("tok/s", "all output tokens / all latencies; over a window much longer than a request, throughput / this = requests in flight"),
    "decode_tok_s_user": ("tok/s", "mean over requests of 1 / ITL (AIPerf's tok/s/user): neither queue nor first token inside"),
    "decode_tok_s_user_p90": ("tok/s", "1 / P90 of ITL: the percentile before the inversion"),
    "e2e_interactivity_p90": ("tok/s", "1 / P90 of latency / output tokens (InferenceX): the percentile before the inversion"),
    "output_tok_s": ("tok/s", "output tokens / window"),
    "output_tok_s_gpu": ("tok/s", "output tokens / window / all GPUs, those of prefill included"),
    "goodput_req_s": ("req/s", "requests that meet every limit of the SLO / window"),
    "goodput_share": ("", "of the requests that ended, failed ones included, those that meet the SLO"),
    "hit_rate": ("", "tokens found in a cache / tokens of prompts"),
    "in_flight_mean": ("", "requests under way, mean over the window's time; unfinished and failed ones too"),
    "in_flight_most": ("", "most requests under way at once within the window"),
}
"""Unit and definition of each metric, in the order in which they are shown; `hit_rate_TIER` follows `hit_rate` for each tier there is."""


def report(records: Iterable[Record], duration_s: float, gpus: int = 1, *, start_s: float = 0.0, slo: Slo | None = None) -> dict[str, float | None]:
    """Every metric of DEFINITIONS over the window (start_s, start_s + duration_s]; None where no request has it.

    A request belongs to the window in which it ends. So the first seconds of a replay, in which few have ended, are better left out by `start_s`.

    Args:
        gpus: all that serve.
        slo: for the goodput; without one its metrics are None.

    Raises:
        MetricError: a window of no time, no GPU, or times of a record that run backwards.
    """
    if not (duration_s > 0 and gpus >= 1):
        raise MetricError(f"duration_s={duration_s}, gpus={gpus}: use a positive time and at least one GPU")
    end_s = start_s + duration_s
    records = [r for r in records if r.arrival_s < end_s and (r.end_s is None or r.end_s > start_s)]
    ended = [r for r in records if r.end_s is not None and r.end_s <= end_s]
    good = [r for r in ended if r.answered]
    latencies, outputs = [r.latency_s for r in good], [r.output_tokens for r in good]
    gaps = [gap for r in good if (gap := r.itl_s) is not None]
    found: dict[str, float | None] = dict.fromkeys(DEFINITIONS)
    found.update(requests=len(good), failed=len(ended) - len(good), **_in_flight(records, start_s, end_s))
    found.update(output_tok_s=output_tok_s_gpu(sum(outputs), duration_s, 1), output_tok_s_gpu=output_tok_s_gpu(sum(outputs), duration_s, gpus))
    found.update(_spread("ttft_s", [r.ttft_s for r in good]))
    found.update(_spread("queue_s", [r.admitted_s - r.arrival_s for r in good if r.admitted_s is not None]))
    found.update(_spread("itl_s", gaps))
    if good:
        found.update(input_tokens_mean=mean(r.input_tokens for r in good), output_tokens_mean=mean(outputs),
                     e2e_tok_s_user=e2e_tok_s_user(latencies, outputs), e2e_tok_s_user_pooled=e2e_tok_s_user(latencies, outputs, how="pooled"),
                     e2e_interactivity_p90=interactivity_q(latencies, outputs))
    if gaps and min(gaps) > 0:
        found.update(decode_tok_s_user=mean(map(decode_tok_s, gaps)), decode_tok_s_user_p90=decode_tok_s(percentile(gaps, 90)))
    if slo and ended:
        met = sum(map(slo.met, good))
        found.update(goodput_req_s=met / duration_s, goodput_share=met / len(ended))
    prompts = sum(r.input_tokens for r in good)
    if prompts:
        found["hit_rate"] = sum(r.cached_tokens for r in good) / prompts
        for tier in sorted({tier for r in good for tier in r.num_hits_by_tier}):
            found[f"hit_rate_{tier}"] = sum(r.num_hits_by_tier.get(tier, 0) for r in good) / prompts
    return found


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_{how}": mean(values) if how == "mean" else percentile(values, int(how[1:])) for how in _SPREAD} if values else {}


def _in_flight(records: list[Record], start_s: float, end_s: float) -> dict[str, float]:
    """Mean over the window's time, and most at once. At a moment at which one ends and another arrives, there is only the other."""
    spans = [(max(r.arrival_s, start_s), end_s if r.end_s is None else min(r.end_s, end_s)) for r in records]
    now = most = 0
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        now += change
        most = max(most, now)
    return {"in_flight_mean": fsum(end - begin for begin, end in spans) / (end_s - start_s), "in_flight_most": most}


# --- to read ------------------------------------------------------------------------------------------------

def table(reports: Mapping[str, Mapping[str, float | None]], definitions: bool = True) -> str:
    """Reports side by side, a metric a line with its unit and definition. A metric that none of them has is left out."""
    names = [name for name in _in_order(reports) if any(metrics.get(name) is not None for metrics in reports.values())]
    width = max(map(len, ("metric", *names)))
    columns = {label: [_number(metrics.get(name)) for name in names] for label, metrics in reports.items()}
    widths = {label: max(map(len, (label, *cells))) for label, cells in columns.items()}
    lines = ["  ".join(("metric".ljust(width), *(label.rjust(widths[label]) for label in columns), "unit  ", "definition" if definitions else "")).rstrip()]
    for i, name in enumerate(names):
        unit, definition = DEFINITIONS.get(name, ("", f"tokens found in the {name.removeprefix('hit_rate_')} cache / tokens of prompts"))
        cells = (cells[i].rjust(widths[label]) for label, cells in columns.items())
        lines.append("  ".join((name.ljust(width), *cells, unit.ljust(6), definition if definitions else "")).rstrip())
    return "\n".join(lines)


FEW = 100  # requests: of fewer, a P99 lies between the two largest values


def few_requests(reports: Mapping[str, Mapping[str, float | None]]) -> str | None:
    """What to say of percentiles, where a report has too few requests for them."""
    few = [f"{label} {metrics['requests']}" for label, metrics in reports.items() if metrics["requests"] < FEW]
    return f"Few requests ({', '.join(few)}): the P99 of fewer than {FEW} is little else than the largest value." if few else None


def _in_order(reports: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    tiers = sorted({name for metrics in reports.values() for name in metrics} - DEFINITIONS.keys())
    for name in DEFINITIONS:
        yield name
        if name == "hit_rate":
            yield from tiers


def _number(value: float | None) -> str:
    """Four figures; a whole number as it is."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
