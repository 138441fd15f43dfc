"""Text that arrives in chunks, read forward in linear time, with marks to go back to. Pure Python.

Readers are generators: they suspend where the text ends so far and go on when `append` has brought more. What a reader does
depends on the text alone, never on where it was cut: that is what makes a parser exact over every split into chunks.
"""
from __future__ import annotations

import re
from bisect import bisect_right
from functools import cache
from typing import Callable, Generator, Iterator

__all__ = ["WHITESPACE", "EndOfText", "Source"]

WHITESPACE = " \t\n\r"  # JSON's, and the grammar's

_SPACES = re.compile(f"[{WHITESPACE}]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a JSON string: what needs no look
_SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")

Reader = Generator[None, None, "bool | str"]


@cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


class EndOfText(Exception):
    """The text ended where a reader needed more of it."""


class Source:
    """
    Attributes:
        text, pos: what has come and is not dropped yet, and how far it is read.
        ended: no more will come.
    """

    def __init__(self) -> None:
        self.text, self.pos, self.ended = "", 0, False
        self._base = 0  # where in the whole text `text` begins
        self._oldest: int | None = None  # mark, in the whole text
        self._kept: list[tuple[int, str]] = []  # what was read since then and is dropped from `text`, each piece with its place

    def append(self, chunk: str) -> None:
        if self._oldest is not None:
            start = max(self._oldest - self._base, 0)
            self._kept.append((self._base + start, self.text[start:self.pos]))
        self._base += self.pos
        self.text, self.pos = self.text[self.pos:] + chunk, 0

    # Marks -----------------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """Remembers this place, for `since` and `back`, until `release`."""
        place = self._base + self.pos
        if self._oldest is None:
            self._oldest = place
        return place

    def release(self) -> None:
        self._oldest = None
        self._kept.clear()

    def since(self, mark: int) -> str:
        """The text read since a mark."""
        if mark >= self._base:
            return self.text[mark - self._base:self.pos]
        return "".join([*self._dropped(mark)[1], self.text[:self.pos]])

    def back(self, mark: int) -> None:
        """Returns to a mark. Within one chunk nothing is copied: many returns in a large one stay cheap."""
        if mark < self._base:
            index, pieces = self._dropped(mark)
            self.text = "".join([*pieces, self.text])
            start, piece = self._kept[index]
            self._kept[index:] = [(start, piece[:mark - start])]
            self._base = mark
        self.pos = mark - self._base

    def _dropped(self, mark: int) -> tuple[int, list[str]]:
        """The kept text from a mark on, in pieces, and the index of the first."""
        index = bisect_right(self._kept, mark, key=lambda kept: kept[0]) - 1
        start, piece = self._kept[index]
        return index, [piece[mark - start:], *(later for _, later in self._kept[index + 1:])]

    # Readers ---------------------------------------------------------------------------------------------------------

    def more(self) -> Iterator[None]:
        """Waits for a chunk, or for the news that none will come: whoever still needs one then is told by EndOfText."""
        if self.ended:
            raise EndOfText
        yield

    def flow(self, tags: tuple[str, ...], sink: Callable[[str], object]) -> Reader:
        """Passes the text before the first of `tags` to `sink`, as it comes, and returns the tag, read. At the end of the text
        `sink` has got everything."""
        pattern = _any_of(tags)
        while True:
            found = pattern.search(self.text, self.pos)
            end = found.start() if found else len(self.text) if self.ended else len(self.text) - self._begun(tags)
            if end > self.pos:
                sink(self.text[self.pos:end])
            self.pos = found.end() if found else end
            if found:
                return found.group()
            yield from self.more()

    def until(self, *tags: str) -> Generator[None, None, tuple[str, str]]:
        """The text before the first of `tags`, and the tag; both are read."""
        parts: list[str] = []
        tag = yield from self.flow(tags, parts.append)
        return "".join(parts), tag

    def spaces(self) -> Iterator[None]:
        """Skips white space, so that `text[pos]` is the next other character."""
        while True:
            self.pos = _SPACES.match(self.text, self.pos).end()
            if self.pos < len(self.text):
                return
            yield from self.more()

    def tag(self, *tags: str) -> Reader:
        """Reads white space and one of `tags`, which it returns; "" where another text stands (the white space is read then too)."""
        yield from self.spaces()
        while True:
            for tag in tags:
                if self.text.startswith(tag, self.pos):
                    self.pos += len(tag)
                    return tag
            if not any(tag.startswith(self.text[self.pos:self.pos + len(tag)]) for tag in tags):
                return ""
            yield from self.more()

    def string(self) -> Reader:
        """Reads the rest of a JSON string behind its opening quote; False at the first character that JSON does not allow."""
        while True:
            self.pos = _PLAIN.match(self.text, self.pos).end()
            if self.pos == len(self.text):
                yield from self.more()
            elif self.text[self.pos] == '"':
                self.pos += 1
                return True
            elif self.text[self.pos] != "\\":
                return False  # a control character
            else:
                yield from self._hold(2)
                escape = self.text[self.pos + 1]
                if escape == "u":
                    yield from self._hold(6)
                if not (_HEX4.match(self.text, self.pos + 2) if escape == "u" else escape in '"\\/bfnrt'):
                    return False
                self.pos += 6 if escape == "u" else 2

    def json(self) -> Reader:
        """Reads one JSON value; False at the first character that JSON does not allow. Any depth: the stack is a list."""
        stack: list[str] = []  # the closing brackets still to come
        while True:
            yield from self.spaces()
            character = self.text[self.pos]
            if character in "{[":
                self.pos += 1
                stack.append("}" if character == "{" else "]")
                yield from self.spaces()
                if self.text[self.pos] != stack[-1]:
                    if character == "{" and not (yield from self._key()):
                        return False
                    continue
            elif character == '"':
                self.pos += 1
                if not (yield from self.string()):
                    return False
            elif not (yield from self._scalar()):
                return False
            # A value has ended, or an empty container is about to: close what closes here, up to the next value.
            while stack:
                yield from self.spaces()
                character = self.text[self.pos]
                if character not in (",", stack[-1]):
                    return False
                self.pos += 1
                if character == ",":
                    yield from self.spaces()
                    if stack[-1] == "}" and not (yield from self._key()):
                        return False
                    break
                stack.pop()
            if not stack:
                return True

    def _key(self) -> Reader:
        if self.text[self.pos] != '"':
            return False
        self.pos += 1
        return (yield from self.string()) and bool((yield from self.tag(":")))

    def _scalar(self) -> Reader:
        parts: list[str] = []
        while True:
            end = _SCALAR_CHARACTERS.match(self.text, self.pos).end()
            parts.append(self.text[self.pos:end])
            self.pos = end
            if end < len(self.text):
                return bool(_SCALAR.fullmatch("".join(parts)))
            yield from self.more()

    def _hold(self, characters: int) -> Iterator[None]:
        while len(self.text) - self.pos < characters:
            yield from self.more()

    def _begun(self, tags: tuple[str, ...]) -> int:
        """How many characters at the end of the text may be the beginning of a tag."""
        longest = min(max(map(len, tags)) - 1, len(self.text) - self.pos)
        for length in range(longest, 0, -1):
            if any(tag.startswith(self.text[len(self.text) - length:]) for tag in tags):
                return length
        return 0
