"""Row 2: one request decoding. Milliseconds from one token to the next, as a client of each library sees it."""
from __future__ import annotations

import time
from typing import Any

from .harness import Bench, Variant
from .table import Row, at_least, ratio
from .workload import prompt

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 65  # contexts up to 128
ROUNDS = 2


def rows(bench: Bench) -> list[Row]:
    results = bench.there_and_back([Variant("minengine decode", "bench.decode:ours"), Variant("transformers decode", "bench.decode:transformers")],
                                   ROUNDS)
    ours, theirs = ([gap for run in runs for gap in run["gaps_ms"]] for runs in results.values())
    # A ratio of speeds: theirs over ours, so that more is better.
    return [ratio("decode at batch 1, transformers' step over ours", theirs, ours, at_least(1.4), "ms",
                  f"the left column is transformers here; contexts {PROMPT_TOKENS} to {PROMPT_TOKENS + OUTPUT_TOKENS - 1}")]


def ours(threads: int) -> dict[str, Any]:
    from minengine import SamplingParams

    from .models import ours as engine

    llm = engine(threads, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    for seed in (0, 1):  # the first one warms up
        out = llm.generate({"prompt_token_ids": prompt(PROMPT_TOKENS, seed)}, params)[0]
    return {"gaps_ms": [gap * 1e3 for gap in out.metrics.itl_s]}


def transformers(threads: int) -> dict[str, Any]:
    import torch

    from .models import transformers_model

    model = transformers_model(threads)

    class Stamps:
        """A streamer: `generate` hands it the prompt, then each token."""

        def __init__(self) -> None:
            self.at_s: list[float] = []

        def put(self, _: Any) -> None:
            self.at_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    for seed in (0, 1):
        stamps, ids = Stamps(), torch.tensor([prompt(PROMPT_TOKENS, seed)])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS, do_sample=False,
                       eos_token_id=None, pad_token_id=0, streamer=stamps)
    tokens = stamps.at_s[1:]
    return {"gaps_ms": [(b - a) * 1e3 for a, b in zip(tokens, tokens[1:])]}
