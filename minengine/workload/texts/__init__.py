"""Texts that nobody owns, for measurements on real language; where they come from is in README.md beside them."""
from __future__ import annotations

from pathlib import Path

__all__ = ["TEXTS", "paragraphs"]

TEXTS = ("us-constitution", "us-declaration")


def paragraphs(name: str) -> list[str]:
    """A text's paragraphs in order, headings among them, each on one line: the lines' ends are the file's, not the author's.

    Raises:
        ValueError: unknown name.
    """
    if name not in TEXTS:
        raise ValueError(f"name='{name}': use one of {', '.join(TEXTS)}")
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="ascii")
    return [" ".join(lines.split()) for lines in text.split("\n\n") if lines.strip()]
