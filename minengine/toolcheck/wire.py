"""From the bytes of an answer, whole or streamed, to one Answer; what does not hold together is said, not mended."""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Iterable

__all__ = ["Answer", "from_stream", "from_whole", "refused"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The first choice of a chat completion, or a refusal.

    calls: the entries of `tool_calls` as they came, or as their deltas assemble.
    broken: why the answer is no chat completion at all, in a sentence; None when it is one.
    """

    status: int = 200
    error: dict[str, Any] | None = None  # the `error` object of a refusal
    content: str = ""
    reasoning: str = ""
    calls: tuple[Any, ...] = ()
    finish_reason: Any = None
    completion_tokens: int | None = None
    broken: str | None = None


def refused(status: int, text: str) -> Answer:
    """An answer with another status than 200. Without OpenAI's `error` object, `error` is None and `broken` quotes the text."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if not isinstance(error, dict):
        return Answer(status=status, broken=f"the body has no error object: {text[:200]!r}")
    return Answer(status=status, error=error)


def from_whole(text: str) -> Answer:
    """An answer that was not streamed."""
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, (list, tuple)):
            return Answer(broken=f"tool_calls is no list: {calls!r:.100}")
        return Answer(content=_text(message, "content"), reasoning=_reasoning(message), calls=tuple(calls),
                      finish_reason=choice.get("finish_reason"), completion_tokens=_tokens(body))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Answer(broken=f"the body is no chat completion ({type(error).__name__}: {error}): {text[:200]!r}")


def from_stream(events: Iterable[str]) -> Answer:
    """A streamed answer from the data of its server-sent events, as the OpenAI client would assemble it.

    The first delta of a call carries its index, id, type and name; later ones only add to `arguments`. Indices start at 0 and leave no gap.
    """
    content, reasoning, calls = [], [], []
    finish, tokens, done, choices = None, None, False, 0
    for event in events:
        if done:
            return Answer(broken=f"data after [DONE]: {event[:100]!r}")
        if event == "[DONE]":
            done = True
            continue
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                return Answer(broken=f"the stream carries an error: {json.dumps(chunk['error'])[:200]}")
            tokens = _tokens(chunk) if chunk.get("usage") else tokens
            for choice in chunk["choices"]:
                choices += 1
                if finish is not None:
                    return Answer(broken="a choice's chunk follows its finish_reason")
                delta = choice.get("delta") or {}
                content.append(_text(delta, "content"))
                reasoning.append(_reasoning(delta))
                for part in delta.get("tool_calls") or ():
                    fault = _add(calls, part)
                    if fault:
                        return Answer(broken=fault)
                finish = choice.get("finish_reason")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Answer(broken=f"an event is no chunk of a chat completion ({type(error).__name__}: {error}): {event[:200]!r}")
    if not done or not choices:
        return Answer(broken="the stream ends without [DONE]" if choices else "the stream holds no choice")
    return Answer(content="".join(content), reasoning="".join(reasoning), calls=tuple(calls), finish_reason=finish, completion_tokens=tokens)


def _add(calls: list[dict[str, Any]], part: dict[str, Any]) -> str | None:
    """Take one delta of a call in; returns what is wrong with it."""
    index, function = part.get("index"), part.get("function") or {}
    if not isinstance(index, int) or not 0 <= index <= len(calls):
        return f"a call's delta has index {index!r} after {len(calls)} calls"
    if index == len(calls):
        calls.append({"id": part.get("id"), "type": part.get("type"), "function": {"name": function.get("name"), "arguments": ""}})
    else:
        call = calls[index]
        for name, old, new in (("id", call["id"], part.get("id")), ("name", call["function"]["name"], function.get("name"))):
            if new is not None and new != old:
                return f"call {index} changes its {name} from {old!r} to {new!r}"
    calls[index]["function"]["arguments"] += function.get("arguments") or ""
    if part.get("error") is not None:
        calls[index]["error"] = part["error"]
    return None


def _text(holder: dict[str, Any], name: str) -> str:
    text = holder.get(name)
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{name} is {type(text).__name__}, not text")
    return text or ""


def _reasoning(holder: dict[str, Any]) -> str:
    return _text(holder, "reasoning_content") or _text(holder, "reasoning")


def _tokens(body: dict[str, Any]) -> int | None:
    return (body.get("usage") or {}).get("completion_tokens")
