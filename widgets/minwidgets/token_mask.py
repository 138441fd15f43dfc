"""The widget Token mask: a tool call written token by token, and at each place the tokens that its grammar allows.

    TokenMask()
    TokenMask(tool_name="add", schema={"type": "object", ...}, example={"a": 1}, format="llama")
    TokenMask(text="<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>three")

`schema` is that of the tool's parameters, a dict or a text; without one there is a tool about the weather. `example` are arguments that
Step writes until a reader chooses another token. `text` is what the widget opens with: as much of it as the grammar allows is written, the rest is struck out. A link opens the
widget at a text, a format or a schema too: ``{setting}`three is refused <TokenMask.text=...>` `` (the text percent-encoded).

Nothing here knows a grammar: `answer` is what `minwidgets.masked_step` gives. With a kernel Python asks it; on a static page the page's
host does, of xgrammar in WebAssembly, loaded when a reader first needs it. Until then the page has the example's steps in `known`.
"""
from __future__ import annotations

import json
from typing import Any, Mapping

import traitlets
from minengine.config import ConfigError
from minengine.serve.tools import FORMATS, format_tool_call
from minengine.simulate.answer import answer

from .masked_step import MODEL, masked_step, stop_ids
from .modules import bundle, styles
from .page_widget import PageWidget

__all__ = ["EXAMPLE", "SCHEMA", "TokenMask"]

CALL = "minwidgets.masked_step.masked_step"
TAKES = ("format", "tool_name", "schema", "tokens", "text")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
EXAMPLE = {"city": "Zürich", "days": 3, "unit": "celsius"}


class TokenMask(PageWidget):
    """A call as far as it is written, the tokens that may come next, the text that must.

    Every trait is two-way while a kernel runs. What `masked_step` refuses is refused by the constructor and by `step`; the page shows
    the same sentence. On a page without a kernel some keywords of JSON Schema are refused as well, each in a sentence that names it.
    """

    needs = "grammar"
    _esm = bundle("token_mask.js")
    _css = styles("controls.css", "token_mask.css")

    format = traitlets.Unicode(FORMATS[0], help="of the call on the wire").tag(sync=True)
    tool_name = traitlets.Unicode("get_weather").tag(sync=True)
    schema = traitlets.Unicode(help="JSON schema of the tool's parameters, as text").tag(sync=True)
    tokens = traitlets.Unicode("", help="ids of the tokens that are written, dots between them").tag(sync=True)
    text = traitlets.Unicode("", help="text behind them").tag(sync=True)
    answer = traitlets.Dict(help="{settings, value} or {settings, error}, of minengine.simulate.answer").tag(sync=True)
    known = traitlets.List(help="answers that the page has without asking: the opening one, and the example's").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the settings as they were made").tag(sync=True)
    formats = traitlets.List(list(FORMATS), read_only=True).tag(sync=True)
    model_name = traitlets.Unicode(MODEL, read_only=True, help="whose vocabulary it is").tag(sync=True)
    stop_token = traitlets.Int(help="the token that ends an answer").tag(sync=True)
    call = traitlets.Unicode(CALL, read_only=True, help="the function that answers").tag(sync=True)
    takes = traitlets.List(list(TAKES), read_only=True, help="the traits that are its arguments").tag(sync=True)
    page_source = traitlets.Unicode("grammar", read_only=True, help="what answers in a page without a kernel").tag(sync=True)
    engine = traitlets.Unicode("", help="of a static page: whether that is loading, ready, or why there is none").tag(sync=True)

    def __init__(self, *, schema: Mapping[str, Any] | str | None = None, example: Mapping[str, Any] | None = None, **settings: str) -> None:
        if unknown := next((name for name in settings if name not in ("format", "tool_name", "tokens", "text")), None):
            raise ConfigError(f"unknown option '{unknown}'; known options: example, {', '.join(TAKES)}")
        if schema is None:
            schema, example = SCHEMA, EXAMPLE if example is None else example
        text = schema if isinstance(schema, str) else json.dumps(schema, indent=1, ensure_ascii=False)
        super().__init__(schema=text, stop_token=stop_ids()[0], **settings)
        self.initial = self._settings()
        self.answer = answer(CALL, self.initial)
        self.step  # an author's mistake is an error here, not a sentence in the page
        self.known = [self.answer, *([] if example is None else self._steps(example))]
        self.observe(self._ask, list(self.takes))

    def _settings(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.takes}

    def _ask(self, _: Any) -> None:
        self.answer = answer(CALL, self._settings())

    def _steps(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers on the way of a call with these arguments, from nothing to its end token."""
        start = {**self.initial, "tokens": "", "text": ""}
        whole = masked_step(**{**start, "text": format_tool_call(self.format, self.tool_name, example)})
        if whole["refused"] or not whole["stop"]:
            raise ConfigError(f"example={example}: its schema allows no such call, from {whole['refused']!r} on; correct one of them")
        ids = [id for id, *_ in whole["pieces"]] + [self.stop_token]
        return [answer(CALL, {**start, "tokens": ".".join(map(str, ids[:count]))}) for count in range(len(ids) + 1)]

    @property
    def step(self) -> dict[str, Any]:
        """What `masked_step` gives for the traits as they are now.

        Raises:
            ConfigError: it refuses them.
        """
        if "error" in self.answer:
            raise ConfigError(self.answer["error"])
        return self.answer["value"]

    def _in_words(self) -> str:
        asked = f"a call of {self.tool_name} in the format {self.format}"
        try:
            now = self.step
        except ConfigError as error:
            return f"Token mask: {asked}: {error}"
        written = "".join(text for _, text, *_ in now["pieces"])
        forced = f"; the text {now['forced']!r} must come next" if now["forced"] else ""
        refused = f"; {now['refused']!r} is refused" if now["refused"] else ""
        return (f"Token mask: {asked}, written so far {written!r}: {now['allowed']:,} of {now['vocab_size']:,} tokens are allowed next"
                f"{forced}{refused}.")
