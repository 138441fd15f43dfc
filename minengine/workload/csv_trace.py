"""Arrivals with lengths alone, as comma-separated values: Splitwise's traces (Azure), its simulator's, Vidur's, or any with named columns."""
from __future__ import annotations

import csv
import os
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Iterator

from .reading import Skipped, as_path, open_text
from .sessions import MOST_TOKENS, TraceError, TraceRequest

__all__ = ["CSV_BLOCK", "read_csv"]

CSV_BLOCK = 64  # tokens of the ids that a prompt is given
KNOWN = (  # columns of time, input tokens, output tokens
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_timestamp", "prompt_size", "token_size"),
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)


def read_csv(path: str | os.PathLike[str], columns: tuple[str, str, str] | None = None, skip_bad: Skipped | None = None) -> Iterator[TraceRequest]:
    """Requests line by line; one is in memory at a time. Their starts count from the first one's.

    Nothing in such a file says which prompts begin alike, so each gets ids of its own: no cache can help it.

    Args:
        columns: names of the columns of time (seconds, or a date and time), input and output tokens (default: those of Splitwise, its simulator
            or Vidur, whichever are there).
        skip_bad: counts malformed lines instead of ending at the first.

    Raises:
        TraceError: no such path, or no such columns; or without `skip_bad`, a field that is missing or impossible.
    """
    path, ids = as_path(path), count()
    with open_text(path) as lines:
        reader = csv.DictReader(lines)
        header = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = header
        names = columns or next((known for known in KNOWN if set(known) <= set(header)), None)
        if names is None or not set(names) <= set(header):
            wanted = ", ".join(names) if names else " or ".join(", ".join(known) for known in KNOWN)
            raise TraceError(f"{path}, line 1: has the columns {', '.join(header) or 'none'}, and {wanted} are needed; rename those of time, input "
                             "and output tokens in that line, or tell read_csv their names by `columns`")
        first_s = last_s = None
        for row in _rows(reader, path):
            where = f"{path}, line {reader.line_num}"
            try:
                time_s = _seconds(row, names[0], where)
                tokens, output = (_whole(row, name, where) for name in names[1:])
                if last_s is not None and time_s < last_s:
                    raise TraceError(f"{where}, field '{names[0]}': lies {last_s - time_s:g} s before the line before; sort the file by time")
                first_s, last_s = time_s if first_s is None else first_s, time_s
            except TraceError as error:
                if skip_bad is None:
                    raise
                skip_bad.note(error)
                continue
            blocks = tuple(next(ids) for _ in range(tokens // CSV_BLOCK))
            yield TraceRequest(time_s - first_s, tokens, output, blocks, CSV_BLOCK)


def _rows(reader: csv.DictReader, path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise TraceError(f"{path}, line {reader.line_num}: is no comma-separated line ({error}); check that the file is in the stated format") from error


def _seconds(row: dict[str, str], name: str, where: str) -> float:
    """Seconds as a number, or of a date and time such as 2023-11-16 18:15:46.6805900; without a zone it is UTC."""
    text = (row.get(name) or "").strip()
    try:
        value = float(text)
        if 0 <= value < float("inf"):
            return value
    except ValueError:
        whole, dot, rest = text.partition(".")
        digits = rest[:next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]
        try:
            moment = datetime.fromisoformat(whole + rest[len(digits):])
            return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp() + (float(f"0.{digits}") if digits else 0.0)
        except ValueError:
            pass
    raise TraceError(f"{where}, field '{name}': is {text!r}; use seconds, 0 or more, or a date and time")


def _whole(row: dict[str, str], name: str, where: str) -> int:
    text = (row.get(name) or "").strip()
    try:
        value = float(text)
        if 0 <= value <= MOST_TOKENS and value == int(value):
            return int(value)
    except ValueError:
        pass
    raise TraceError(f"{where}, field '{name}': is {text!r}; use a whole number, 0 to {MOST_TOKENS}")
