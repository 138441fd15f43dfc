"""Reading a trace file so that every complaint names the file, the line, the field and the remedy, and malformed parts can be passed over."""
from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, TextIO, TypeVar

from .sessions import MOST_TOKENS, TraceError, TraceRequest

__all__ = ["VARIABLE", "Fields", "Skipped", "as_path", "open_text", "parsed", "read_lines"]

VARIABLE = "MINENGINE_TRACES"
T = TypeVar("T")


class Skipped:
    """Counts what a reader passes over because it is malformed.

        skipped = Skipped()
        requests = list(read_mooncake(path, skip_bad=skipped))
        print(skipped.count, skipped.first)
    """

    KEPT = 5

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []  # messages of the first few

    def note(self, error: TraceError) -> None:
        self.count += 1
        if len(self.first) < self.KEPT:
            self.first.append(str(error))

    @property
    def complaint(self) -> str:
        """The first one as the end of a sentence; "" where there is none."""
        return f"; the first complaint: {self.first[0]}" if self.first else ""


def as_path(given: str | os.PathLike[str]) -> Path:
    """
    Raises:
        TraceError: it is no path.
    """
    try:
        return Path(given)
    except TypeError as error:
        raise TraceError(f"path={given!r}: use the path of a file or folder") from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    try:
        stream = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened ({error.strerror}); check the path, or set {VARIABLE}") from error
    with stream:
        try:
            yield stream
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: is no UTF-8 text ({error.reason} at byte {error.start}); unpack it first if it is packed") from error


def parsed(text: str, where: str) -> Any:
    """JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(("{", "[")):
            raise TraceError(f"{where}: is no JSON; name a trace: AgentX's .json, .jsonl of AgentX or Mooncake, or .csv") from error
        raise TraceError(f"{where}: is no complete JSON ({error.msg} at character {error.pos}); fetch the file again") from error
    except RecursionError as error:
        raise TraceError(f"{where}: is nested too deeply; check that the file is in the stated format") from error


def read_lines(path: Path, read: Callable[[Fields], T], skip_bad: Skipped | None) -> Iterator[T]:
    """What `read` makes of each JSON object of a file with one a line; one line in memory at a time. Empty lines are nothing.

    Raises:
        TraceError: the file cannot be opened; or without `skip_bad`, a line is malformed.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                found = read(Fields(parsed(line, where), where))
            except TraceError as error:
                if skip_bad is None:
                    raise
                skip_bad.note(error)
            else:
                yield found


class Fields:
    """A JSON object and where it stands, so that every complaint can say both."""

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise TraceError(f"{where}: is a {type(value).__name__} where an object was expected; check that the file is in the stated format")
        self.value = value

    def error(self, name: str, what: str, remedy: str) -> TraceError:
        return TraceError(f"{self.where}, field '{name}': {what}; {remedy}")

    def get(self, name: str, default: Any = None) -> Any:
        return self.value.get(name, default)

    def number(self, name: str) -> float:
        """A finite number, 0 or more."""
        given = self.value.get(name)
        if given is None:
            raise self.error(name, "is missing", "an object of this kind needs it")
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < float("inf"):
            raise self.error(name, f"is {given!r}", "use a number, 0 or more")
        return given

    def maybe(self, name: str) -> float | None:
        return None if self.value.get(name) is None else float(self.number(name))

    def whole(self, name: str, at_least: int = 0) -> int:
        given = self.number(name)
        if given != int(given) or not at_least <= given <= MOST_TOKENS:
            raise self.error(name, f"is {given!r}", f"use a whole number, {at_least} or more" + (f" and at most {MOST_TOKENS}" if given > MOST_TOKENS else ""))
        return int(given)

    def objects(self, name: str) -> Iterator["Fields"]:
        given = self.value.get(name)
        if not isinstance(given, list):
            raise self.error(name, "is missing" if given is None else "is no list", "list the requests there")
        for i, item in enumerate(given):
            yield Fields(item, f"{self.where}, {name}[{i}]")

    def request(self, *, start_s: float, input_name: str, output_name: str, block_size: int, full_blocks_only: bool) -> TraceRequest:
        tokens, ids = self.whole(input_name), self.value.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise self.error("hash_ids", "is missing" if ids is None else "is no list of whole numbers", "give one id a block of the prompt")
        expected = tokens // block_size if full_blocks_only else -(-tokens // block_size)
        if len(ids) != expected:
            raise self.error("hash_ids", f"has {len(ids)} ids and {tokens} tokens in blocks of {block_size} make {expected}",
                             f"check '{input_name}' and the block size")
        return TraceRequest(start_s, tokens, self.whole(output_name), tuple(ids), block_size, self.maybe("api_time"), self.maybe("think_time"),
                            self.maybe("ttft"))
