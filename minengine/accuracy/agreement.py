"""Agreement of greedy continuations: how long an answer stays, word for word, what it is with 16-bit rows."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..llm import LLM
from ..request import SamplingParams
from ..workload.texts import TEXTS, paragraphs
from .bootstrap import Outcomes

__all__ = ["agreement", "continuations"]

REQUEST = "Explain the following passage in your own words.\n\n"


def continuations(llm: LLM, prompts: int = 40, tokens: int = 64, passage: int = 160, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Greedy answers, `tokens` ids each, to requests to explain a passage of `passage` tokens from the public-domain texts.

    The answer depends on the passage, which is in the cache, and goes on past an end-of-sequence, so that all are equally long.
    """
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("\n\n".join(text for name in TEXTS for text in paragraphs(name)), add_special_tokens=False)
    starts = np.random.default_rng(seed).choice(len(ids) - passage, size=prompts, replace=False)
    chats = [llm.chat_prompt([{"role": "user", "content": REQUEST + tokenizer.decode(ids[at: at + passage])}]) for at in starts.tolist()]
    outs = llm.generate(chats, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return tuple(tuple(out.outputs[0].token_ids) for out in outs)


def agreement(ours: Sequence[Sequence[int]], baseline: Sequence[Sequence[int]]) -> Outcomes:
    """Tokens of each of our answers before the first that differs from the baseline's; all of them where none does. A prompt is a context.

    Raises:
        ValueError: not the same prompts, or answers of different lengths.
    """
    if len(ours) != len(baseline) or any(len(a) != len(b) for a, b in zip(ours, baseline)):
        raise ValueError(f"ours and baseline must answer the same prompts with as many tokens; got {len(ours)} and {len(baseline)} answers")
    same = [next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one)) for one, other in zip(ours, baseline)]
    return Outcomes.of(same, 1)
