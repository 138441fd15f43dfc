"""How large a request may be: checked before anything is built from it."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any, Iterable

from ..config import ConfigError
from ..request import RequestError

__all__ = ["ServeLimits", "check_count", "check_regex", "check_schema"]

_KEYWORD_OF_COUNT = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Each field is a command-line flag of `minengine serve` too."""

    max_body_bytes: int = 8 << 20
    max_json_depth: int = 64  # of the whole body; tool schemas lie about six levels down in it
    max_json_parts: int = 50_000  # objects and lists in the body; a message with a tool call has five
    max_prompt_chars: int = 2_000_000  # text is measured before it is tokenized; tokens are the engine's own limit
    max_prompts: int = 64  # of one /v1/completions request
    max_messages: int = 4096
    max_tools: int = 128
    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 32
    max_schema_count: int = 20_000  # minItems, maxLength and their kin added up, and any repeat in a regex: a grammar grows with them
    max_regex_chars: int = 4096
    max_grammar_chars: int = 64 << 10
    max_choices: int = 1024  # of structured_outputs.choice
    max_n: int = 32
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_top_logprobs: int = 20
    max_id_chars: int = 256  # cache_salt, X-Session-Id, user

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{f.name}={value!r}: use a whole number, 1 or more")


def check_count(number: int, limit: int, field: str, what: str, name: str) -> None:
    """Raise unless `number` is at most `limit`; `name` is the field of ServeLimits that sets it."""
    if number > limit:
        raise RequestError(f"{field}: has {number} {what} and the server takes {limit}; send fewer or raise --{name.replace('_', '-')}")


def check_schema(schema: Any, field: str, limits: ServeLimits) -> None:
    """A JSON schema from outside, before a grammar is compiled from it: its bytes, depth, counts and patterns.

    Raises:
        RequestError: it is no schema, or too large.
    """
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{field}: is a {type(schema).__name__} and no JSON schema; send an object")
    level: list[Any] = [schema] if isinstance(schema, dict) else []  # true and false are schemas too
    depth = counts = 0
    while level:  # breadth first, without recursion: depth is what is being checked
        depth += 1
        if depth > limits.max_schema_depth:
            raise RequestError(f"{field}: is nested deeper than max_schema_depth={limits.max_schema_depth}; flatten it, use $defs or raise --max-schema-depth")
        for node in level:
            if isinstance(node, dict):
                counts += _check_keywords(node, field, limits)
        level = [child for node in level for child in _children(node) if isinstance(child, (dict, list))]
    if counts > limits.max_schema_count:  # a grammar has a state for each
        raise RequestError(f"{field}: has counts (maxLength, minItems, ...) that add up to more than max_schema_count={limits.max_schema_count}; "
                           "use smaller ones or raise --max-schema-count")
    size = len(json.dumps(schema, ensure_ascii=False).encode(errors="surrogatepass"))
    check_count(size, limits.max_schema_bytes, field, "bytes of JSON schema", "max_schema_bytes")


def check_regex(pattern: str, field: str, limits: ServeLimits) -> None:
    """A regular expression from outside: its length and the counts of its repeats.

    Raises:
        RequestError: it is too large.
    """
    check_count(len(pattern), limits.max_regex_chars, field, "characters of regex", "max_regex_chars")
    for repeat in _REPEAT.finditer(pattern):
        largest = max(repeat[1], repeat[2] or "", key=lambda digits: (len(digits), digits))
        if len(largest) > 9 or int(largest) > limits.max_schema_count:
            raise RequestError(f"{field}: repeats something {repeat[0][:24]} times, above max_schema_count={limits.max_schema_count}; "
                               "use a smaller count or raise --max-schema-count")


def _check_keywords(node: dict[str, Any], field: str, limits: ServeLimits) -> int | float:
    """The sum of this node's counts."""
    counts = 0
    for keyword in _KEYWORD_OF_COUNT:
        count = node.get(keyword)
        if isinstance(count, bool) or not isinstance(count, (int, float)):
            continue
        counts += max(count, 0)
        if count > limits.max_schema_count:
            raise RequestError(f"{field}: has a {keyword} above max_schema_count={limits.max_schema_count}; use a smaller one or raise --max-schema-count")
    if isinstance(pattern := node.get("pattern"), str):
        check_regex(pattern, f"{field}.pattern", limits)
    patterns = node.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        check_regex(pattern, f"{field}.patternProperties", limits)
    return counts


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node
