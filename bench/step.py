"""Rows 4 and 5: a decode step against the matrix products it cannot avoid, and what the engine adds around the model.

Step and products take turns in one process, on the same machine state. Two floors: the products as the engine runs them, alone,
on its own weights; and plain `F.linear` on weights of the same shapes and dtype, whose weights are read where they lie.
"""
from __future__ import annotations

import time
from typing import Any, Callable

from .harness import Bench, Variant
from .table import Row, at_most, figure, ratio
from .workload import prompt

BATCHES = (1, 8, 16)
CONTEXT, STEPS, WARM_UP_STEPS = 64, 56, 6  # contexts from 64 to 128
LONG_CONTEXTS, LONG_BATCHES, LONG_STEPS = (512, 2048), (1, 8), 12


def rows(bench: Bench) -> list[Row]:
    found = []
    for batch in BATCHES:
        result = bench.run(Variant(f"decode step, batch {batch}", "bench.step:against_products", {"batch": batch})).result
        at = f"decode step at batch {batch}, contexts {CONTEXT} to {CONTEXT + STEPS + WARM_UP_STEPS}"
        found.append(ratio(f"{at}, against its products alone", result["step_ms"], result["products_ms"], at_most(1.25), "ms"))
        found.append(ratio(f"{at}, against F.linear of the same shapes", result["step_ms"], result["plain_ms"], at_most(1.25), "ms"))
    found.append(figure(f"engine time outside the model, batch {BATCHES[-1]}, share of the step",
                        [(step - model) / step * 100 for step, model in zip(result["step_ms"], result["model_ms"])], at_most(5.0), "%",
                        "schedule, inputs, sampling, bookkeeping: all of step() but forward and logits"))
    for batch in LONG_BATCHES:
        result = bench.run(Variant(f"attention, batch {batch}", "bench.step:attention", {"batch": batch})).result
        for context in (CONTEXT, *LONG_CONTEXTS):
            case = result[str(context)]
            found.append(figure(f"attention's own cost at batch {batch}, {context:,} tokens", case["attention_ms"], None, "ms",
                                f"of a step of {sum(case['step_ms']) / len(case['step_ms']):.1f} ms; without its projections, all layers"))
    return found


def _decoding_engine(threads: int, batch: int, context: int, steps: int):
    """An engine whose `batch` requests have all been prefilled and will decode for `steps` steps."""
    from minengine import SamplingParams

    from .models import KV_BYTES, ours

    engine = ours(threads, max_num_seqs=batch, kv_cache_memory_bytes=KV_BYTES, enable_prefix_caching=False).llm_engine
    _fill(engine, batch, context, steps, SamplingParams)
    return engine


def _fill(engine, batch: int, context: int, steps: int, params) -> None:
    for seed in range(batch):
        engine.add_request(f"{context}-{seed}", {"prompt_token_ids": prompt(context, seed)},
                           params(max_tokens=steps + 2 * context, temperature=0.0, ignore_eos=True))
    while any(r.num_tokens - r.num_computed_tokens > 1 for r in engine.requests.values()):
        engine.step()


def _clear(engine) -> None:
    for request_id in list(engine.requests):
        engine.abort_request(request_id)


def products(part: Any) -> list[Any]:
    """Every weight matrix of a model, in the order of its layers."""
    from minengine.model.linear import Linear

    if isinstance(part, Linear):
        return [part]
    if isinstance(part, list):
        parts = part
    elif type(part).__module__.startswith("minengine.model."):
        parts = list(vars(part).values())
    else:
        return []
    return [linear for inner in parts for linear in products(inner)]


def against_products(threads: int, batch: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    engine = _decoding_engine(threads, batch, CONTEXT, STEPS + WARM_UP_STEPS)
    linears = products(engine.model)
    shapes = [tuple(linear.weight.shape) for linear in linears]  # (out, in)
    plain = [torch.randn(shape) for shape in shapes]
    inputs = {width: torch.randn(batch, width) for _, width in shapes}
    samples: dict[str, list[float]] = {"step_ms": [], "model_ms": [], "products_ms": [], "plain_ms": []}

    def timed(name: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        call()
        samples[name].append((time.perf_counter() - start) * 1e3)

    def run_products() -> None:
        for linear, (_, width) in zip(linears, shapes):
            linear(inputs[width])

    def run_plain() -> None:
        for weight, (_, width) in zip(plain, shapes):
            F.linear(inputs[width], weight)

    with torch.inference_mode():
        for _ in range(STEPS + WARM_UP_STEPS):
            model_s = engine.times.model_s
            timed("step_ms", engine.step)
            samples["model_ms"].append((engine.times.model_s - model_s) * 1e3)
            timed("products_ms", run_products)
            timed("plain_ms", run_plain)
    return {name: values[WARM_UP_STEPS:] for name, values in samples.items()}


class _Timed:
    """Stands in front of a part of the model and adds up the time spent in it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.spent_s = inner, 0.0

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        out = method(*args)
        self.spent_s += time.perf_counter() - start
        return out

    def __call__(self, *args: Any) -> Any:
        return self._call(self.inner, *args)

    def add_to(self, *args: Any) -> Any:
        return self._call(self.inner.add_to, *args)


def attention(threads: int, batch: int) -> dict[str, Any]:
    """Attention without its projections: rotation, cache write and read, scores, values."""
    from minengine import SamplingParams
    from minengine.model.linear import Linear

    engine = _decoding_engine(threads, batch, CONTEXT, LONG_STEPS)
    whole, projections = [], []
    for layer in engine.model.layers:
        for name, part in vars(layer.attention).items():
            if isinstance(part, Linear):
                projections.append(_Timed(part))
                setattr(layer.attention, name, projections[-1])
        layer.attention = _Timed(layer.attention)
        whole.append(layer.attention)

    def own_s() -> float:
        return sum(part.spent_s for part in whole) - sum(part.spent_s for part in projections)

    results = {}
    for context in (CONTEXT, *LONG_CONTEXTS):
        _clear(engine)
        _fill(engine, batch, context, LONG_STEPS, SamplingParams)
        engine.step()
        case: dict[str, list[float]] = {"attention_ms": [], "step_ms": []}
        for _ in range(LONG_STEPS):
            before, start = own_s(), time.perf_counter()
            engine.step()
            case["step_ms"].append((time.perf_counter() - start) * 1e3)
            case["attention_ms"].append((own_s() - before) * 1e3)
        results[str(context)] = case
    return results
