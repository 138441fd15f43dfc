"""What a model wrote, taken apart: reasoning, content, tool calls; whole or streamed, with the same result. Pure Python."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generator, Mapping, Sequence

from . import glm, llama
from .declared import MALFORMED, UNDECLARED, declared_tools
from .source import EndOfText, Source

__all__ = ["FORMATS", "Delta", "ToolCallParser", "format_tool_call", "parse_tool_calls"]

READERS = {"glm": glm, "llama": llama}
FORMATS = tuple(READERS)

THINK, THINK_END = "<think>", "</think>"


@dataclass
class Delta:
    """What one chunk completed."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ToolCallParser:
    """Takes a text apart while it comes. Content and reasoning are passed on at once, but for what may be the beginning of a tag; a
    call comes whole, when its closing tag has. Text around calls is content to the letter, white space included.

    A call is `{"name": str, "arguments": dict}`; one that cannot be carried out as it stands has `"error": {"code", "message"}` besides:
    `undeclared_tool`, or `malformed_arguments` (see `glm`, `llama` for the form, `declared` for what is checked of a schema). A call that
    the text's end cuts off is content, never a call.

    Args:
        format: one of FORMATS.
        tools: OpenAI's list, as `check_tools` lets it pass; None where nothing is known of the tools.
        reasoning: True where the text begins inside reasoning; False where only a leading `<think>` begins it; None where that is not
            known: then what stands before the first `</think>` is reasoning, if that comes before the first sign of a call.

    Attributes:
        content, reasoning, calls: all so far.
    """

    def __init__(self, format: str, tools: Sequence[Mapping[str, Any]] | None = None, reasoning: bool | None = None) -> None:
        if format not in READERS:
            raise ValueError(f"format={format!r}: unknown; use one of {', '.join(FORMATS)}")
        self._format, self._tools, self._mode = READERS[format], declared_tools(tools), reasoning
        self._source = Source()
        self._contents: list[str] = []
        self._reasonings: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._reader = self._read()
        next(self._reader)

    @property
    def content(self) -> str:
        return "".join(self._contents)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    def feed(self, chunk: str) -> Delta:
        """What this chunk completed.

        Raises:
            ValueError: after `finish`.
        """
        if self._source.ended:
            raise ValueError("chunk: the text was finished; use a new parser for another one")
        return self._advance(chunk)

    def finish(self) -> Delta:
        """The rest. An unfinished call's text becomes content."""
        self._source.ended = True
        return self._advance("")

    def _advance(self, chunk: str) -> Delta:
        before = len(self._contents), len(self._reasonings), len(self.calls)
        self._source.append(chunk)
        next(self._reader, None)
        return Delta("".join(self._contents[before[0]:]), "".join(self._reasonings[before[1]:]), self.calls[before[2]:])

    def _read(self) -> Generator[None, None, None]:
        source = self._source
        yield
        try:
            yield from self._read_reasoning()
            while True:
                opener = yield from source.flow(self._format.OPENERS, self._contents.append)
                source.pos -= len(opener)
                start = source.mark()
                source.pos += len(opener)
                try:
                    call = yield from self._format.read_call(source, self._tools)
                except EndOfText:
                    source.pos = len(source.text)
                    self._contents.append(source.since(start))
                    raise
                if call is None:
                    self._contents.append(source.since(start))
                else:
                    self.calls.append(self._judged(*call))
                source.release()
        except EndOfText:
            return

    def _read_reasoning(self) -> Generator[None, None, None]:
        source, begun = self._source, self._mode is True
        start = source.mark()
        try:
            if (yield from source.tag(THINK)):
                begun = True
            else:
                source.back(start)
                if self._mode is None:
                    _, tag = yield from source.until(THINK_END, *self._format.SIGNS)
                    begun = tag == THINK_END
                    source.back(start)
        except EndOfText:
            source.back(start)
        source.release()
        if begun:
            yield from source.flow((THINK_END,), self._reasonings.append)

    def _judged(self, name: str, arguments: dict[str, Any], wrong: str | None) -> dict[str, Any]:
        call: dict[str, Any] = {"name": name, "arguments": arguments}
        tool = self._tools.get(name) if self._tools is not None else None
        if self._tools is not None and tool is None:
            known = ", ".join(self._tools) or "none"
            call["error"] = {"code": UNDECLARED, "message": f"name={name!r}: no such tool is declared; use one of these: {known}"}
        elif wrong := wrong or (tool.fault(arguments) if tool else None):
            call["error"] = {"code": MALFORMED, "message": wrong}
        return call


def parse_tool_calls(text: str, format: str = "glm", tools: Sequence[Mapping[str, Any]] | None = None,
                     reasoning: bool | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of a whole text; see ToolCallParser."""
    parser = ToolCallParser(format, tools, reasoning)
    parser.feed(text)
    parser.finish()
    return parser.content, parser.calls


def format_tool_call(format: str, name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call, which the parser reads back.

    Raises:
        ValueError: an unknown format, a value that is not JSON, or (GLM) a string, key or name that the format cannot hold.
    """
    if format not in READERS:
        raise ValueError(f"format={format!r}: unknown; use one of {', '.join(FORMATS)}")
    return READERS[format].format_call(name, arguments)
