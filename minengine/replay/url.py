"""Any server with OpenAI's /v1/completions as the target of a replay, ours or a peer's, over the standard library's HTTP.

How it may be asked is tried once, before the replay: prompts as token ids, which make lengths and common beginnings exact, or as text, a common
English word for each token (most tokenizers make about one token of each; a record has the length that the server counted); and with
`ignore_eos`, without which answers may end before their recorded length. Copies of a session differ in every token, so no `cache_salt` is needed.
"""
from __future__ import annotations

import json
from contextlib import closing
from threading import Thread
from typing import Any

from ..config import ConfigError
from ..toolcheck.client import Client, NoAnswer, Refused
from ..workload.closed_loop import Turn
from ..workload.report import Record
from ..workload.scaling import PromptTokens
from .wall import WallTarget

__all__ = ["UrlTarget", "WORDS"]

TOKEN_IDS = (1000, 31_999)  # text in the vocabularies of today's models
WORDS = (
    "the of and to in is was for on that with as it by at from his an were are which this be had or not but have one her they you all "
    "their she been has who will there when more no out up so said what about into than them can only time new some could these two may "
    "first then do any like my now over such our man me even most made after also did many before must through back years where much your "
    "way well down should because long each just people how too little state good very make world still see own men work here life both"
).split()
SESSION = "X-Session-Id"  # tells our own cluster, and whoever else heeds it, what belongs together


class UrlTarget(WallTarget):
    """
    Args:
        model: the name to ask for; None: the first that the server lists.
        timeout_s: for one answer.

    Raises:
        ConfigError: no address, or nobody there who answers completions.
    """

    label = "server"

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        super().__init__()
        try:
            self.client = Client(base_url, api_key, timeout_s)
            self.model = model or self.client.models()[0]
        except (ValueError, NoAnswer) as error:
            raise ConfigError(f"target: {error}") from error
        self.asks, self._more = self._try()

    @property
    def ignores_eos(self) -> bool:
        """Whether answers have the length that is asked for."""
        return "ignore_eos" in self._more

    def _try(self) -> tuple[str, dict[str, Any]]:
        """How it may be asked: for "tokens" or "text", and with which fields beside."""
        complaint: Exception | None = None
        for asks, more in (("tokens", {"ignore_eos": True}), ("text", {"ignore_eos": True}), ("tokens", {}), ("text", {})):
            self.asks, self._more = asks, more
            self._draw = PromptTokens(*TOKEN_IDS) if asks == "tokens" else PromptTokens(0, len(WORDS) - 1)
            prompt = [TOKEN_IDS[0], TOKEN_IDS[1]] if asks == "tokens" else "the time"
            try:
                with closing(self.client.events("/completions", self._body(prompt, 1))) as events:
                    if all("error" not in _chunk(event) for event in events):
                        return asks, more
            except (Refused, ValueError) as error:
                complaint = error
            except NoAnswer as error:
                raise ConfigError(f"target: {error}") from error
        raise ConfigError(f"target={self.client.base_url}: does not answer /completions as a stream ({complaint}); give a server that has OpenAI's API, "
                          "and its model with --model")

    def _body(self, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, **self._more}

    def send(self, turn: Turn, due_s: float) -> Record:
        drawn = self._draw(turn)
        prompt = drawn if self.asks == "tokens" else " ".join(WORDS[i] for i in drawn)
        record = Record.of(turn, self.clock())
        Thread(target=self._serve, args=(turn, record, prompt), name=f"replay {turn.session}", daemon=True).start()
        return record

    def _serve(self, turn: Turn, record: Record, prompt: list[int] | str) -> None:
        seen = Record.of(turn, record.arrival_s)  # the replay's own is written in one go, and not after the replay is over
        try:
            with closing(self.client.events("/completions", self._body(prompt, turn.request.output_tokens), {SESSION: turn.session})) as events:
                for event in events:
                    self._read(_chunk(event), seen)
            if seen.output_tokens == 0 and seen.error is None:
                seen.error = "the answer has no token"
        except Exception as error:  # whatever a server sends, the replay goes on
            seen.error = f"{type(error).__name__}: {error}"
        seen.end_s = self.clock()
        self.over.put((turn, record, seen))

    def _read(self, chunk: dict[str, Any], seen: Record) -> None:
        """One event. A server that counts nothing gets a token for each event with an answer in it."""
        if "error" in chunk:
            raise ValueError(str(chunk["error"]))
        if chunk.get("choices"):
            if seen.first_token_s is None:
                seen.first_token_s = self.clock()
            seen.output_tokens += 1
        usage = chunk.get("usage")
        if usage:
            seen.input_tokens, seen.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def wait(self, until_s: float) -> list[tuple[Turn, Record]]:
        ended = []
        for turn, record, seen in super().wait(until_s):
            for name in ("first_token_s", "end_s", "input_tokens", "cached_tokens", "output_tokens", "error"):
                setattr(record, name, getattr(seen, name))
            ended.append((turn, record))
        return ended

    def close(self) -> None:
        """What is under way is left to end by itself; its threads end with the process."""


def _chunk(event: str) -> dict[str, Any]:
    found = json.loads(event)
    if not isinstance(found, dict):
        raise ValueError(f"an event of the stream is no JSON object: {event[:100]}")
    return found
