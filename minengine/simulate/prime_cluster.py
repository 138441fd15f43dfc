"""Predictions that need the cluster: requests that queue, decoders that fill up, ranks that wait for each other.

All are runs of one deployment, the preset's, with one thing changed each time; `Runs` keeps what has been run. Replayed are public sessions, scaled to the
mean lengths of the set that they are from. The source had cold prompts between its sessions too, and did not say how many: there are none here.
"""
from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..workload.traces import Session
from .agenda import SECOND
from .cluster import simulate
from .deployment import Deployment
from .prediction import Prediction, shown

__all__ = ["CLUSTER", "POINTS", "Runs", "at_bar", "budget", "headline", "ratios", "together_or_apart", "wide"]

BAR = 100.0  # E2E tok/s per user
POINTS = {4: (42, 64, 66, 96), 3: (32, 48, 72, 96), 2: (32, 64)}  # decoders for one prefill group: sessions that the source's chart labels, and 1:3 at 32
GAP_CAPS_S = (10, 30, 60, 300)
COLD = {"cold_per_s": 0.1, "cold_tokens": 100_000, "cold_output_tokens": 500}  # an example: nobody said how many, or how long


class Runs:
    """Runs of a deployment under a loop; equal ones once.

    Args:
        deployment, loop: with the changes that they are given.
        sessions, recorded: that are replayed, and the same with the lengths that they were recorded with.
        faster: every run has this share of the loop's time; 1 for the table.
        progress: told of each run that begins: "3 of 40: decoders=2".
    """

    def __init__(self, deployment: Callable[..., Deployment], loop: Callable[..., dict[str, Any]], sessions: Sequence[Session], *, recorded: Sequence[Session],
                 faster: float = 1.0, progress: Callable[[str], None] = lambda what: None) -> None:
        self.deployment, self.loop, self.sessions, self.recorded, self.faster, self.progress = deployment, loop, sessions, recorded, faster, progress
        self._done: dict[str, Mapping[str, float | None]] = {}

    @cached_property
    def total(self) -> int:
        """How many different runs CLUSTER asks for: its figures are gone through with runs that come to 1 in everything."""
        plan = Runs(self.deployment, self.loop, (), recorded=())
        plan.total = 0
        plan._run = lambda *asked: defaultdict(lambda: 1.0)
        for figures in CLUSTER:
            for _ in figures(plan):
                pass
        return len(plan._done)

    def __call__(self, changes: Mapping[str, Any] | None = None, *, as_recorded: bool = False, **loop: Any) -> Mapping[str, float | None]:
        """The metrics of one run, see `workload.report`, and `prefill_step_s_mean`; `changes` of the deployment, and of the loop."""
        one, asked = self.deployment(**(changes or {})), self.loop(**loop)
        key = json.dumps([one.mapping(), asked, as_recorded], sort_keys=True)
        if key not in self._done:
            what = ", ".join(f"{name}={value}" for name, value in {**(changes or {}), **loop}.items()) or "the headline"
            self.progress(f"{len(self._done) + 1} of {self.total}: {what}" + (" with lengths as recorded" if as_recorded else ""))
            self._done[key] = self._run(one, asked, as_recorded)
        return self._done[key]

    def _run(self, one: Deployment, asked: dict[str, Any], as_recorded: bool) -> Mapping[str, float | None]:
        asked |= {name: asked[name] * self.faster for name in ("duration_s", "warm_s")}
        result = simulate(one, self.recorded if as_recorded else self.sessions, **asked)
        prefill = [counts for name, counts in result.engines.items() if name.startswith("prefill")]
        steps = sum(counts["steps"] for counts in prefill)
        step_s = sum(counts["busy_ps"] for counts in prefill) / SECOND / steps if steps else None
        return {**result.metrics, "prefill_step_s_mean": step_s}


def headline(runs: Runs) -> Iterator[Prediction]:
    """One DEP8 group, four TP4 decoders, 66 sessions. What a user gets follows from prefill (a queue, a chunk of a lockstep group, a transfer) and
    from the decoders' latency at the batch that results; how much all get, from how long sessions stay away between requests."""
    variants = {f"gaps of up to {cap} s": runs(gap_cap_s=float(cap)) for cap in GAP_CAPS_S[1:]}
    variants |= {"lengths as recorded": runs(as_recorded=True), "another seed": runs(seed=1),
                 "gaps no longer than the time between starts": runs(gaps="bounded"),
                 "a cold prompt of 100,000 tokens each 10 s": runs(**COLD)}
    found = runs()
    asked = (("c66_tok_s_user", "speed for a user, 66 sessions, 1:4", "tok/s", 101, "e2e_tok_s_user",
              f"a mean over requests; over their time {shown(found['e2e_tok_s_user_pooled'])}"),
             ("c66_tok_s_gpu", "output per GPU", "tok/s per GPU", 100, "output_tok_s_gpu",
              f"of {shown(found['requests'])} requests, {shown(found['input_tokens_mean'])} and {shown(found['output_tokens_mean'])} tokens in the mean"),
             ("c66_in_flight", "requests in flight", "requests", 23.8, "in_flight_mean", f"of 66 sessions, with gaps of up to {GAP_CAPS_S[0]} s"))
    for name, what, unit, reported, metric, note in asked:
        yield Prediction(id=name, what=what, unit=unit, reported=reported, predicted=found[metric], within=0.10, label="simulated", note=note,
                         spread={words: one[metric] for words, one in variants.items()})


def at_bar(points: Sequence[tuple[float, float]], bar: float = BAR) -> float | None:
    """Sessions at which the speed for a user is `bar`, between points (sessions, speed) in a straight line; None: no two points enclose it."""
    points = sorted(points)
    for (fewer, faster), (more, slower) in zip(points, points[1:]):
        if faster >= bar > slower:
            return fewer + (faster - bar) / (faster - slower) * (more - fewer)
    return None


def ratios(runs: Runs) -> Iterator[Prediction]:
    """Which number of decoders serves most sessions of one prefill group at 100 tok/s, from the points that the source's chart labels. More
    decoders make batches smaller and tokens quicker, until the prefill group is the one that is too slow."""
    sessions = {}
    for decoders, labelled in POINTS.items():
        sessions[decoders] = at_bar([(count, runs({"decoders": decoders}, concurrency=count)["e2e_tok_s_user"]) for count in labelled]) or 0.0
    best = max(sessions, key=sessions.__getitem__)
    note = "sessions at the bar, between the points: " + ", ".join(f"1:{decoders} {shown(count)}" for decoders, count in sessions.items())
    yield Prediction(id="best_ratio", what="ratio that serves most sessions at 100 tok/s", unit="", reported="1:4", predicted=f"1:{best}",
                     label="simulated", note=note)
    yield Prediction(id="c66_sessions", what="sessions at 100 tok/s on 1:4", unit="sessions", reported=66, predicted=sessions[4], label="simulated",
                     note="reported: 66 at 101 tok/s")


def budget(runs: Runs) -> Iterator[Prediction]:
    """Prefill steps of 8,192 tokens a rank against 4,096. A request that comes during a step waits for its end, and a rank without much to do waits
    for the rank that has a full chunk; both are half as long with half the budget."""
    def both(**loop: Any) -> dict[str, float]:
        large, small = runs({"max_num_batched_tokens": 8192}, **loop), runs(**loop)
        return {"8K": 1e3 * large["queue_s_p50"], "4K": 1e3 * small["queue_s_p50"], "wait": _cut(large["queue_s_p50"], small["queue_s_p50"]),
                "median": _cut(large["ttft_s_p50"], small["ttft_s_p50"]), "mean": _cut(large["ttft_s_mean"], small["ttft_s_mean"])}

    found, fewer = both(), both(concurrency=32)
    asked = (("queue_wait_8k_ms", "8K", "median prefill queue wait, 8K tokens a step", "ms", 550,
              "the source's load in these runs was not said; 66 sessions here"),
             ("queue_wait_4k_ms", "4K", "the same, 4K tokens a step", "ms", 110, ""),
             ("queue_wait_cut", "wait", "cut of that wait", "of it", 0.80,
              "most of a wait is a part of a step, at any load; the source must have had a queue at 8K that was gone at 4K"),
             ("ttft_cut_4k", "median", "cut of the median time to first token", "of it", 0.20, f"of the mean {found['mean']:.2f}"))
    for name, key, what, unit, reported, note in asked:
        yield Prediction(id=name, what=what, unit=unit, reported=reported, predicted=found[key], within=0.30, label="simulated", note=note,
                         spread={"32 sessions": fewer[key]})


def together_or_apart(runs: Runs) -> Iterator[Prediction]:
    """P90 of the requests' inter-token latencies on 24 GPUs, prefill apart against engines that do both. There a stream stands still while a chunk of
    someone's prompt is computed: briefly on TP4, where four GPUs share a chunk, long on DEP8, where one GPU has it and seven wait."""
    apart = runs()["itl_s_p90"]
    cuts = {}
    for name, engines in (("TP4", 6), ("TP8", 3), ("DEP8", 3)):
        cuts[name] = _cut(runs({"topology": name, "engines": engines})["itl_s_p90"], apart)
    yield Prediction(id="pd_p90_itl_cut", what="cut of p90 inter-token latency by splitting, against six TP4 engines", unit="of it", reported=0.40,
                     predicted=cuts["TP4"], label="simulated", note="what the source split was not said; against three TP8 or DEP8: "
                     f"{cuts['TP8']:.2f}, {cuts['DEP8']:.2f}")


def wide(runs: Runs) -> Iterator[Prediction]:
    """One DEP16 prefill group against two DEP8, twice the headline's sessions and decoders: how long a step takes. Each is as long as the slowest of
    sixteen ranks instead of eight. In return all requests share one queue, so a step has more in it and a prompt finds a free rank sooner."""
    doubled = {"decoders": 8}
    one = runs({**doubled, "prefill": "DEP16"}, concurrency=132)
    two = runs({**doubled, "prefills": 2}, concurrency=132)
    ratio = {name: one[name] / two[name] for name in ("prefill_step_s_mean", "ttft_s_mean", "ttft_s_p50")}
    yield Prediction(id="dep16_over_2x_dep8", what="a prefill step of one DEP16 over one of two DEP8", unit="times", reported=1.179,
                     predicted=ratio["prefill_step_s_mean"], within=0.05 / 1.179, label="simulated",
                     note="what took longer was not said: this reading is ours. Of the time to first token the mean is "
                          f"{ratio['ttft_s_mean']:.2f}, the median {ratio['ttft_s_p50']:.2f} times")


def _cut(before: float, after: float) -> float:
    """Part of it that is gone; 0 of nothing."""
    return 1 - after / before if before else 0.0


CLUSTER: tuple[Callable[[Runs], Iterator[Prediction]], ...] = (headline, ratios, budget, together_or_apart, wide)
