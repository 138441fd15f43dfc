"""One case of the suite: a request, what must be true of its answer, and the words for what was not."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CALL_FAULTS", "KINDS", "Case", "Expect", "Verdict"]

KINDS = {
    "ok": "what was asked holds",
    "malformed": "a call that a client cannot use: no JSON object, not the schema's, an undeclared name without a mark, a wrong finish_reason",
    "lost": "no call where the choice demands one and nothing cut the answer, or an answer of many tokens that shows none of them",
    "leaked": "the call's raw text stands in the content",
    "mismatch": "the same request, streamed and whole, gives different answers",
    "wrong_status": "a good request refused, or a bad one answered, or refused without the field's name",
    "no_answer": "no answer within the time, a broken connection, or a server that is gone after a bad request",
}
CALL_FAULTS = ("malformed", "lost", "leaked", "mismatch")  # what the rate of malformed or lost calls counts


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What must hold. The declared tools, their schemas and the choice are read from the request itself.

    status: the statuses that are right; (200, 400) where a server may refuse what it cannot hold, but not break it.
    param: a 400 must carry one of these names at the start of `error.param`; empty: it need not carry any.
    both: send it whole and streamed, and compare.
    loose: the schema was not promised (a keyword beyond a grammar, `strict` not said): arguments need only be an object, and a mark is no fault.
    """

    status: tuple[int, ...] = (200,)
    param: tuple[str, ...] = ()
    both: bool = False
    loose: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """`body` is the request without `model`, and without `max_tokens` unless the case is about it; a str is sent as it is."""

    id: str  # category/what/how
    category: str
    checks: str  # one sentence, printed by --list
    body: Any
    expect: Expect = field(default_factory=Expect)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """kind: one of KINDS. calls: how many were returned. cut: the answer ended by max_tokens."""

    kind: str
    detail: str = ""
    calls: int = 0
    cut: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: is none of {', '.join(KINDS)}")
