"""Requests in Mooncake's format, one JSON object a line: independent arrivals, whose ids say which of them begin alike.

    {"timestamp": milliseconds, "input_length", "output_length", "hash_ids"}       an id stands for 512 tokens, the last one for what is left
"""
from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Iterable, Iterator

from .reading import Fields, Skipped, as_path, read_lines
from .sessions import Session, TraceError, TraceRequest

__all__ = ["MOONCAKE_BLOCK", "conversations", "read_mooncake", "write_mooncake"]

MOONCAKE_BLOCK = 512  # tokens a hash id stands for


def read_mooncake(path: str | os.PathLike[str], skip_bad: Skipped | None = None) -> Iterator[TraceRequest]:
    """Requests line by line; one is in memory at a time.

    Args:
        path: a .jsonl file, or a folder that holds exactly one.
        skip_bad: counts malformed lines instead of ending at the first.

    Raises:
        TraceError: no such path; or without `skip_bad`, a line that is no JSON, or a field that is missing or impossible.
    """
    path = as_path(path)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if len(files) != 1:
            raise TraceError(f"{path}: holds {len(files)} .jsonl files; name the one to read")
        path = files[0]
    return read_lines(path, _request, skip_bad)


def write_mooncake(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> int:
    """Write requests as they come; returns how many. Times are written in whole milliseconds.

    Raises:
        TraceError: a prompt without an id for each begun block of 512 tokens.
    """
    path, number = Path(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for number, r in enumerate(requests, 1):
            if r.block_size != MOONCAKE_BLOCK or len(r.hash_ids) != -(-r.input_tokens // MOONCAKE_BLOCK):
                raise TraceError(f"request {number}: a prompt of {r.input_tokens} tokens has {len(r.hash_ids)} ids of {r.block_size} tokens; "
                                 f"give one for each begun block of {MOONCAKE_BLOCK}")
            line = {"timestamp": round(r.start_s * 1000), "input_length": r.input_tokens, "output_length": r.output_tokens, "hash_ids": r.hash_ids}
            out.write(json.dumps(line) + "\n")
    return number


def _request(fields: Fields) -> TraceRequest:
    return fields.request(start_s=fields.number("timestamp") / 1000, input_name="input_length", output_name="output_length", block_size=MOONCAKE_BLOCK,
                          full_blocks_only=False)


def conversations(requests: Iterable[TraceRequest], idle_s: float = 900.0) -> Iterator[Session]:
    """Independent arrivals as sessions that a closed loop can replay: each conversation one, with the time between its requests as think time.

    A request goes on with the conversation whose last prompt it begins with, full blocks only and at least two of them, since one is what
    strangers share, a system prompt. A conversation is over when nothing has come for `idle_s`; it is given then, so that only open ones are
    kept. These traces do not say how long a request took: the time from start to start is taken, which is a little more than the gap was. And
    what two conversations share counts as unknown to each other, as sessions share nothing.

    Args:
        requests: in the order of their starts.
    """
    open_ones: OrderedDict[int, list[TraceRequest]] = OrderedDict()  # by number, the longest idle one first
    by_tail: dict[tuple[int, int], int] = {}  # (blocks, last id) of a last prompt: its conversation
    for number, request in enumerate(requests, 1):
        while open_ones and request.start_s - next(iter(open_ones.values()))[-1].start_s > idle_s:
            yield _closed(open_ones, by_tail)
        ids = request.hash_ids[:request.input_tokens // request.block_size]
        tails = ((n, ids[n - 1]) for n in range(len(ids), 0, -1))
        tail = next((t for t in tails if t in by_tail and open_ones[by_tail[t]][-1].hash_ids == ids[:t[0]]), None)
        key = number if tail is None else by_tail.pop(tail)
        so_far = open_ones.setdefault(key, [])
        think_s = request.start_s - so_far[-1].start_s if so_far else 0.0
        so_far.append(replace(request, hash_ids=ids, think_time_s=think_s))
        open_ones.move_to_end(key)
        if len(ids) > 1:
            by_tail[len(ids), ids[-1]] = key
    while open_ones:
        yield _closed(open_ones, by_tail)


def _closed(open_ones: OrderedDict[int, list[TraceRequest]], by_tail: dict[tuple[int, int], int]) -> Session:
    key, requests = open_ones.popitem(last=False)
    last = requests[-1].hash_ids
    if last and by_tail.get((len(last), last[-1])) == key:
        del by_tail[len(last), last[-1]]
    begin_s = requests[0].start_s
    return Session(f"request-{key}", requests[0].block_size, tuple(replace(r, start_s=r.start_s - begin_s) for r in requests))
