"""Reasoning apart from content, where no tools are declared and nothing else is looked for."""
from __future__ import annotations

from .tools import Delta

__all__ = ["ReasoningParser"]

END = "</think>"


class ReasoningParser:
    """For a text that begins inside reasoning: up to the first `</think>` it is that, and behind it content, calls or not. Has the
    face of `ToolCallParser`."""

    def __init__(self) -> None:
        self._inside = True
        self._held = ""  # what may be the beginning of the tag

    def feed(self, chunk: str) -> Delta:
        if not self._inside:
            return Delta(content=chunk)
        text = self._held + chunk
        reasoning, tag, content = text.partition(END)
        if tag:
            self._inside, self._held = False, ""
            return Delta(content, reasoning)
        begun = next((n for n in range(min(len(END) - 1, len(text)), 0, -1) if END.startswith(text[-n:])), 0)
        self._held = text[len(text) - begun:]
        return Delta(reasoning=text[: len(text) - begun])

    def finish(self) -> Delta:
        rest, self._held = self._held, ""
        return Delta(reasoning=rest)
