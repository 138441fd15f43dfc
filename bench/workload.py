"""The fixed workload that every engine serves: token ids and forced output lengths, drawn from one seed.

Ids are drawn, not tokenised: no text or tokenizer version can change them, no two prompts share a block, and the work
of a step depends on lengths alone. Only `Random.random()` is used, which Python keeps the same from version to version.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random

__all__ = ["Item", "make_workload", "prompt", "workload_hash"]

FIRST_TEXT_TOKEN = 17  # smollm2's ids below are control tokens
VOCAB = 49152


@dataclass(frozen=True, slots=True)
class Item:
    prompt_token_ids: tuple[int, ...]
    output_tokens: int  # exactly so many are generated: end-of-text is ignored


def make_workload(num_requests: int = 32, prompt_tokens: tuple[int, int] = (32, 512), output_tokens: tuple[int, int] = (16, 128),
                  seed: int = 0) -> list[Item]:
    """Requests with lengths uniform in the given ranges, both ends included."""
    rng = Random(seed)

    def between(low: int, high: int) -> int:
        return low + int(rng.random() * (high - low + 1))

    return [Item(tuple(between(FIRST_TEXT_TOKEN, VOCAB - 1) for _ in range(between(*prompt_tokens))), between(*output_tokens))
            for _ in range(num_requests)]


def prompt(num_tokens: int, seed: int) -> list[int]:
    """One prompt of a given length; different seeds share no prefix worth caching."""
    return list(make_workload(1, (num_tokens, num_tokens), seed=seed)[0].prompt_token_ids)


def workload_hash(items: list[Item]) -> str:
    """SHA-256 over lengths and ids: two runs with the same hash served the same work."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.output_tokens}:{','.join(map(str, item.prompt_token_ids))};".encode())
    return digest.hexdigest()
