"""Small synthetic traces in both formats, so that everything runs where the public ones are not at hand.

    python -m minengine.workload.synthetic FOLDER      writes FOLDER/agentx/*.json and FOLDER/mooncake/requests.jsonl

Invented from a seed, shaped like agent work (a long shared prefix, short tails, a few huge ones, gaps while tools run) but
with prompts under 8,192 tokens, so that smollm2 can replay them. They say nothing about real users: any figure that a page
computes from them is an example, not evidence.
"""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["write_agentx", "write_mooncake"]

BLOCK = 64
LONGEST = 7600  # tokens of a prompt


def _skewed(rng: Random, median: float, sigma: float) -> float:
    """A log-normal draw: most near the median, a few many times larger."""
    normal = math.sqrt(-2 * math.log(1 - rng.random())) * math.cos(2 * math.pi * rng.random())
    return median * math.exp(sigma * normal)


class _Ids:
    """Fresh block ids, counted up: ids are equal only where a prefix is."""

    def __init__(self) -> None:
        self.last = 0

    def grow(self, ids: list[int], num_tokens: int, size: int) -> list[int]:
        """`ids` extended to the full blocks of `num_tokens`."""
        new = range(self.last + 1, self.last + 1 + num_tokens // size - len(ids))
        self.last += len(new)
        return [*ids, *new]


def _agent(rng: Random, ids: _Ids, prefix: list[int], first_tokens: int, turns: int, model: str) -> list[dict[str, Any]]:
    """One agent's requests: each prompt is the last one, what was answered, and what a tool returned."""
    requests: list[dict[str, Any]] = []
    tokens, blocks, start_s = first_tokens, prefix, 0.0
    for turn in range(turns):
        output = max(8, int(_skewed(rng, 60, 0.9)))
        if turn:
            tokens += requests[-1]["out"] + int(_skewed(rng, 130, 1.5))
            if tokens > LONGEST:  # the agent compacts its history: everything after the fixed prefix is new
                tokens, blocks = first_tokens + int(_skewed(rng, 700, 0.3)), prefix
        gap_s = 0.0 if not turn else float(round(_skewed(rng, 9, 1.5), 1))
        blocks = ids.grow(blocks, tokens, BLOCK)
        # A server of 0.5 s a request, 20,000 new tokens a second and 25 ms an output token.
        ttft_s = round(0.5 + tokens / 20000 + rng.random() * 0.4, 2)
        api_s = round(ttft_s + 0.025 * (output - 1) * (0.8 + 0.4 * rng.random()), 2)
        start_s = round(start_s + gap_s, 2)
        requests.append({"t": start_s, "type": "s", "model": model, "in": tokens, "out": output, "hash_ids": blocks,
                         "input_types": ["tool_result" if turn else "text"], "output_types": ["tool_use" if turn < turns - 1 else "text"],
                         "stop": "tool_use" if turn < turns - 1 else "end_turn", "api_time": api_s, "ttft": ttft_s, "think_time": gap_s})
        start_s = round(start_s + api_s, 2)
    return requests


def write_agentx(folder: Path, sessions: int = 6, seed: int = 0) -> None:
    """`sessions` files in AgentX's format; every second session has a subagent."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(sessions):
        rng, ids = Random(seed * 1000 + number), _Ids()
        prefix = ids.grow([], 1200, BLOCK)  # tools and system prompt
        model = "synthetic"
        requests = _agent(rng, ids, prefix, 1200 + int(_skewed(rng, 300, 0.8)), 10 + int(rng.random() * 8), model)
        if number % 2:
            parent = requests[2]
            inner = _agent(rng, ids, ids.grow([], 640, BLOCK), 640 + int(_skewed(rng, 200, 0.5)), 4, model)
            duration_s = inner[-1]["t"] + inner[-1]["api_time"]
            began_s = parent["t"] + parent["api_time"]
            requests.insert(3, {"t": round(began_s + duration_s, 2), "type": "subagent", "agent_id": f"sub-{number}", "subagent_type": "Explore",
                                "duration_ms": round(duration_s * 1000), "status": "completed", "models": [model], "requests": inner})
            for request in requests[4:]:  # the parent waits for its subagent
                request["t"] = round(request["t"] + duration_s, 2)
            requests[4]["think_time"] = round(requests[4]["think_time"] + duration_s, 2)
        session = {"id": f"synthetic_{number:02d}", "models": [model], "block_size": BLOCK, "hash_id_scope": "local", "tool_tokens": 900,
                   "system_tokens": 300, "requests": requests}
        (folder / f"synthetic_{number:02d}.json").write_text(json.dumps(session, separators=(",", ":")) + "\n", encoding="utf-8")


def write_mooncake(file: Path, requests: int = 240, seed: int = 0) -> None:
    """Chat requests in Mooncake's format: most are new conversations behind one system prompt, some come back longer."""
    size = 512
    rng, ids = Random(seed), _Ids()
    ids.last = -1  # Mooncake counts from 0
    system = ids.grow([], size, size)
    conversations: list[tuple[int, list[int]]] = []
    file.parent.mkdir(parents=True, exist_ok=True)
    now_ms = 0.0
    with file.open("w", encoding="utf-8") as out:
        for _ in range(requests):
            if conversations and rng.random() < 0.4:
                tokens, known = conversations.pop(int(rng.random() * len(conversations)))
                tokens += int(_skewed(rng, 500, 0.8))
            else:
                tokens, known = size + int(_skewed(rng, 1500, 0.9)), system
            tokens = min(tokens, LONGEST)
            whole = ids.grow(known[: tokens // size], tokens, size)  # only full blocks come back unchanged
            line = ids.grow(whole, -(-tokens // size) * size, size)
            conversations.append((tokens, whole))
            output = min(2000, max(1, int(_skewed(rng, 250, 0.8))))
            out.write(json.dumps({"timestamp": int(now_ms), "input_length": tokens, "output_length": output, "hash_ids": line}) + "\n")
            now_ms += -math.log(1 - rng.random()) * 1500  # arrivals at random, 1.5 s apart on average


if __name__ == "__main__":
    write_agentx(Path(sys.argv[1]) / "agentx")
    write_mooncake(Path(sys.argv[1]) / "mooncake" / "requests.jsonl")
