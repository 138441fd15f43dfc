"""What a page's grammar masks are made from besides xgrammar: smollm2's vocabulary, and what stands around the arguments of a call.

It is one script of the site, made in each build from the engine and the model's own file, if a page needs it. A script, not JSON: a
page that was opened from a file may load it too.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["FILE", "data", "write"]

FILE = "grammar-data.js"
TOOL = "tool_name"  # in `wire`: where the tool's name goes


def data() -> dict[str, Any]:
    """`tokens`: the text of every token by its id, one character a byte, as GPT-2 writes bytes; `control`: name of each control token
    by its id; `stop`: ids that end an answer; `wire`: by format, what stands before and behind the arguments of a call of `tool`."""
    from minengine.serve.tools import FORMATS
    from minwidgets.masked_step import control_tokens, named_tag, stop_ids, tokens_of_text

    def frame(format: str) -> dict[str, str]:
        tag = named_tag(format, TOOL, {"type": "object", "properties": {"a": {"type": "string"}}})["format"]
        return {"before": tag["begin"], "after": tag["end"]}

    written = _alphabet()
    return {"tokens": ["".join(map(written.__getitem__, token)) for token in tokens_of_text()], "control": control_tokens(), "stop": stop_ids(),
            "tool": TOOL, "wire": {format: frame(format) for format in FORMATS}}


def write(target: Path) -> None:
    """Lay the file under `target`, the site's folder of static files, unless it is there."""
    if not (target / FILE).exists():
        (target / FILE).write_text(f"globalThis.minGrammarData = {json.dumps(data(), ensure_ascii=False, separators=(',', ':'))};\n", encoding="utf8")


def _alphabet() -> dict[int, str]:
    from minengine.tokenizer import BYTE_OF_CHARACTER

    return {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
