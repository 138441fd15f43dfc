"""A request on its way through a cluster, as the front sees it: where it is, and what it has given so far."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Sequence

from ..prompt import Prompt
from ..request import CompletionOutput, RequestOutput, Resume, SamplingParams, Timeline
from .messages import Delta

if TYPE_CHECKING:
    from .source import KVSource

__all__ = ["Flight"]


@dataclass(eq=False)
class Flight:
    """
    Attributes:
        hashes: of the prompt's full blocks, for the router.
        worker, key: who computes it now, and under which key; None while it waits for a place.
        prefill, decode: where it was routed; `decode` is None if that worker has lost it before it got it.
        source: where its rows wait for a decoder, while there is none.
        held: (worker, key) of rows that are kept for its decoder until that has shown that it has them.
        renew_s, renewals: when the lease of what is held is to be made longer next, and how often it was.
        awaits: the prefill worker that is to compute it once its decoder has made room.
        reserved: (worker, key) where its decoder waits for rows that the prefill worker writes.
        deaths: workers that ended, or fell silent, while they had it.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    cache_salt: str | None
    session_id: str | None
    hashes: Sequence[bytes]
    timeline: Timeline
    worker: str | None = None
    key: str | None = None
    prefill: str | None = None
    decode: str | None = None
    source: KVSource | None = None
    held: tuple[str, str] | None = None
    renew_s: float = 0.0
    renewals: int = 0
    awaits: str | None = None
    reserved: tuple[str, str] | None = None
    attempts: int = 0
    deaths: int = 0
    avoid: set[str] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    num_cached_tokens: int = 0

    def new_key(self) -> str:
        self.attempts += 1
        self.key = f"{self.request_id}#{self.attempts}"
        return self.key

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)

    @property
    def resume(self) -> Resume | None:
        """What another worker needs to go on exactly here; None if nothing was given yet."""
        if not self.token_ids:
            return None
        return Resume(output_token_ids=tuple(self.token_ids), sent_chars=self.num_chars, timeline=self.timeline, num_cached_tokens=self.num_cached_tokens)

    def take(self, delta: Delta) -> RequestOutput:
        """Book a delta and make the output of it."""
        if not self.token_ids:
            self.num_cached_tokens = delta.num_cached_tokens
        self.token_ids += delta.token_ids
        self.num_chars += len(delta.text)
        if delta.timeline is not None:
            self.timeline = delta.timeline
        else:
            self.timeline.token_s += delta.token_s
        return self._output(CompletionOutput(0, delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason, delta.logprobs), delta.error)

    def end(self, reason: str, now_s: float, error: str | None = None) -> RequestOutput:
        """The last output of a request that no worker ends."""
        self.timeline = replace(self.timeline, finished_s=now_s)
        return self._output(CompletionOutput(0, "", [], reason, None, None if self.params.logprobs is None else []), error)

    def _output(self, completion: CompletionOutput, error: str | None) -> RequestOutput:
        return RequestOutput(self.request_id, self.prompt.text, self.prompt.token_ids, [completion], completion.finish_reason is not None,
                             self.num_cached_tokens, self.timeline, error)
