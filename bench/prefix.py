"""Row 3: what a cached prefix saves. First token of a 1,024-token prompt, 960 of them cached, against none cached; one engine."""
from __future__ import annotations

from typing import Any

from .harness import Bench, Variant
from .table import Row, at_most, ratio
from .workload import prompt

PROMPT_TOKENS, CACHED_TOKENS, PAIRS = 1024, 960, 6


def rows(bench: Bench) -> list[Row]:
    result = bench.run(Variant("cached prefix", "bench.prefix:first_tokens")).result
    return [ratio("first token, 960 of 1,024 tokens cached, against cold", result["cached_ms"], result["cold_ms"], at_most(0.2), "ms",
                  f"{(PROMPT_TOKENS - CACHED_TOKENS) / PROMPT_TOKENS:.3f} of the prompt is computed, over all of its context")]


def first_tokens(threads: int) -> dict[str, Any]:
    from minengine import SamplingParams

    from .models import ours

    llm = ours(threads, block_size=64)

    def ttft_ms(ids: list[int], cached: int) -> float:
        out = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))[0]
        if out.num_cached_tokens != cached:
            raise RuntimeError(f"{out.num_cached_tokens} tokens were cached, {cached} were expected")
        return out.metrics.ttft_s * 1e3

    samples: dict[str, list[float]] = {"cold_ms": [], "cached_ms": []}
    for pair in range(PAIRS + 1):  # the first pair warms up
        cold = prompt(PROMPT_TOKENS, seed=2 * pair)
        cached = cold[:CACHED_TOKENS] + prompt(PROMPT_TOKENS - CACHED_TOKENS, seed=2 * pair + 1)
        samples["cold_ms"].append(ttft_ms(cold, 0))
        samples["cached_ms"].append(ttft_ms(cached, CACHED_TOKENS))
    return {name: values[1:] for name, values in samples.items()}
