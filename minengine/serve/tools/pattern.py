"""Regular expressions as xgrammar 0.2 reads them, made to allow no more than JSON Schema means. Pure Python.

xgrammar matches whole strings, which is within what a search allows; but its `.` takes line ends, and it ignores anchors in the middle and,
in some patterns, what looks around; and a quote, a backslash or a control character that stands alone it writes into JSON as it is.
With `tags` true nothing that is written may hold "<": a string that may end GLM's value cannot be allowed, and is not needed often.
"""
from __future__ import annotations

import re

__all__ = ["Unenforceable", "plain_pattern"]

_ESCAPES = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[A-Za-z]|.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\(\?(?!:|<[A-Za-z_])")
_PLAIN_ESCAPE = re.compile(r"\\[^A-Za-z1-9]|\\[dDwWsStnrfvxu]", re.DOTALL)
_LINE_ENDS = r"\n\r\u2028\u2029"
_ESCAPED = '"\\' + "".join(map(chr, range(32)))
_IN_JSON = "asks for a character that JSON escapes; leave it out, or name it in a class in brackets"
_ANY = {r"[\s\S]", r"[\S\s]", r"[\w\W]", r"[\W\w]", r"[\d\D]", r"[\D\d]"}


class Unenforceable(ValueError):
    """A grammar cannot hold a model to this; the message says why."""


def plain_pattern(pattern: str, tags: bool) -> str:
    """
    Raises:
        Unenforceable: an anchor in the middle, a look around, a reference back, a character that JSON escapes, or, with `tags`,
            a "<" that is asked for by name.
    """
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\" and (found := _ESCAPES.match(pattern, at)):
            piece = _escape(found.group(), tags)
        elif character == "[" and (found := _CLASS.match(pattern, at)):
            piece = _character_class(found.group(), tags)
        else:
            found = None
            if character == "^" and at > 0 or character == "$" and at < len(pattern) - 1:
                raise Unenforceable("has an anchor in the middle; keep '^' for its beginning and '$' for its end")
            if _GROUP.match(pattern, at):
                raise Unenforceable("looks around or sets flags; say what the string is")
            if tags and character == "<" and not pattern.endswith("(?", 0, at):
                raise Unenforceable("asks for '<', with which a tag of the format begins; leave it out")
            if character in _ESCAPED:
                raise Unenforceable(_IN_JSON)
            piece = f"[^{_LINE_ENDS}{'<' if tags else ''}]" if character == "." else character
        parts.append(piece)
        at = found.end() if found else at + 1
    return "".join(parts)


def _escape(escape: str, tags: bool) -> str:
    if not _PLAIN_ESCAPE.match(escape):
        raise Unenforceable(f"has {escape!r}; use characters, classes and repetitions")
    if escape[1] not in "dDwWsS" and any(_matches(escape, character) for character in _ESCAPED):
        raise Unenforceable(_IN_JSON)
    if tags and escape in (r"\S", r"\W", r"\D"):
        return f"[^{escape.lower()}<]"
    if tags and _matches(escape, "<"):
        raise Unenforceable("asks for '<', with which a tag of the format begins; leave it out")
    return escape


def _character_class(written: str, tags: bool) -> str:
    if not tags or not _matches(written, "<"):
        return written
    if written.startswith("[^"):
        return written[:-1] + "<]"
    if written in _ANY:
        return "[^<]"
    raise Unenforceable("has a character class with '<', with which a tag of the format begins; leave it out")


def _matches(piece: str, character: str) -> bool:
    """Does a piece that stands for one character stand for this one?"""
    try:
        return re.fullmatch(piece, character) is not None
    except re.error:
        return False  # nor can xgrammar: it refuses the whole
