"""Needle recall of smollm2: codes hidden in prose that is read into the cache once, then asked for by name.

    ... No Person shall be a Representative who ...
    The secret code of Alice is 4821.
    ... The secret code of Alice is 4821

Every code is said twice, at two places: said once, smollm2 finds too few of them in 16 bits already for a loss to show.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..llm import LLM
from ..request import SamplingParams
from ..workload.texts import TEXTS, paragraphs
from .bootstrap import Outcomes

__all__ = ["Needle", "needle"]

NAMES = ("Alice", "Boris", "Clara", "David", "Felix", "Grace", "Henry", "Jacob", "Karen", "Louis", "Maria", "Olivia", "Peter", "Quinn", "Rosa",
         "Simon", "Victor", "Wendy")  # one token each, so that no name is found more easily than another
QUESTION = "The secret code of {} is "  # to be continued
TIMES_SAID = 2
DIGITS = 4  # a token each in smollm2's vocabulary


@dataclass(frozen=True)
class Needle:
    """One context: its ids, and for each hidden code the ids of its question and the digits to be said."""

    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    codes: tuple[str, ...]


def make_needle(tokenizer: Any, rng: np.random.Generator, length: int, codes: int) -> Needle:
    """`codes` facts at random places between sentences of the public-domain texts, `length` tokens together.

    Raises:
        ValueError: more codes than names, or too many for the length.
    """
    if not 1 <= codes <= len(NAMES):
        raise ValueError(f"codes={codes}: use 1 to {len(NAMES)}, one a name")
    names = rng.permutation(NAMES)[:codes].tolist()
    said = ["".join(rng.choice(list("0123456789"), DIGITS)) for _ in names]
    facts = [_encode(tokenizer, f"{QUESTION.format(name)}{code}.\n\n") for name, code in zip(names, said)] * TIMES_SAID
    room = length - sum(map(len, facts))
    if room < 1:
        raise ValueError(f"length={length}: {codes} codes take {length - room} tokens, said {TIMES_SAID} times, and leave no room for prose; use more tokens or fewer codes")
    filler, last = [], int(rng.integers(len(_prose(tokenizer))))
    while room > 0:  # backwards from a sentence drawn at random; the first one may begin in its middle
        sentence = _prose(tokenizer)[last % len(_prose(tokenizer))]
        filler.insert(0, sentence[-room:])
        room, last = room - len(sentence), last - 1
    places = rng.integers(len(filler) + 1, size=len(facts))
    parts = [part for at in range(len(filler) + 1) for part in (*(facts[i] for i in np.flatnonzero(places == at)), *filler[at: at + 1])]
    return Needle(sum(parts, ()), tuple(_encode(tokenizer, QUESTION.format(name)) for name in names), tuple(said))


def needle(llm: LLM, contexts: int = 60, codes: int = 5, lengths: tuple[int, int] = (400, 1000), seed: int = 0) -> Outcomes:
    """Ask for every code of every context: 1 where all four digits are said, greedily decoded, else 0.

    A context is prefilled once; each question then takes all of it from the prefix cache, in the engine's row format.

    Args:
        llm: smollm2 or another model whose tokenizer has a token for each digit, with prefix caching.
        lengths: least and most tokens of a context; lengths are spread evenly between, rounded up to whole blocks where that is no more.
        seed: of contexts, names and codes; the same seed asks the same questions of every format.

    Raises:
        ValueError: no length between the two is a whole number of blocks, or a context does not fit.
        RuntimeError: a question did not find its whole context in the cache.
    """
    block_size, tokenizer = llm.kv_cache.block_size, llm.get_tokenizer()
    least, most = -(-lengths[0] // block_size), lengths[1] // block_size  # blocks
    if not 1 <= least <= most:
        raise ValueError(f"lengths={lengths}: no whole number of blocks of {block_size} tokens lies between; use others or a smaller block_size")
    right = []
    for number, blocks in enumerate(np.linspace(least, most, contexts).round().astype(int)):
        task = make_needle(tokenizer, np.random.default_rng((seed, number)), int(blocks) * block_size, codes)
        llm.reset_prefix_cache()
        llm.generate({"prompt_token_ids": task.context}, SamplingParams(max_tokens=1, temperature=0.0))
        outs = llm.generate([{"prompt_token_ids": task.context + question} for question in task.questions],
                            SamplingParams(max_tokens=DIGITS, temperature=0.0, ignore_eos=True))
        if any(out.num_cached_tokens < len(task.context) for out in outs):
            raise RuntimeError(f"context {number}: only {min(out.num_cached_tokens for out in outs)} of {len(task.context)} tokens came from the cache; "
                               "give the engine more blocks, and enable_prefix_caching")
        right += [out.outputs[0].text.strip() == code for out, code in zip(outs, task.codes)]
    return Outcomes.of(right, codes)


@lru_cache(maxsize=2)
def _prose(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Ids of the texts' sentences, a line each; headings and other short lines are left out."""
    sentences = (one for name in TEXTS for text in paragraphs(name) for one in re.split(r"(?<=[.;]) +", text) if len(one) > 40)
    return tuple(_encode(tokenizer, one + "\n\n") for one in sentences)


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
