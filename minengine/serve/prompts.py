"""From messages and tools to the tokens of a prompt.

What the model's own chat template renders is left to it. What it does not know (tools, calls, results: many templates print
only `content`) is written as text, in the wire format that the tool call parser reads. Whether a template knows something is not
guessed from its source: it is asked to render one of each, once, and the result is looked at.

A conversation that goes on must keep its prompt: what turn 2 sends begins with what turn 1 sent and the model answered, or the
prefix cache finds nothing. So nothing here depends on how a conversation ends, and tools are told of first, whatever `tool_choice` is.

Control tokens are the template's to write: in what a request brings they are text (`plain_text`).
"""
from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..config import ConfigError
from ..request import RequestError
from ..tokenizer import Tokenizer
from .errors import ApiError
from .limits import ServeLimits, check_count
from .plain_text import PlainText
from .protocol import ChatCompletionRequest, Message, json_field
from .tools import format_tool_call

__all__ = ["ChatPrompt", "ChatPrompts"]

LONG_TEXT = 8192  # characters; from there on a prompt is rendered and tokenized beside the event loop
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self")
MARK = "knownmark"  # looked for in what a template renders

Turn = dict[str, Any]


@dataclass(frozen=True)
class ChatPrompt:
    token_ids: list[int]
    reasoning: bool  # the prompt ends inside <think>, so the answer begins with reasoning


class ChatPrompts:
    """
    Args:
        tool_format: how the model writes calls, one of `tools.FORMATS`.
        chat_template: a file that replaces the model's own template.

    Raises:
        ConfigError: the template cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer | None, tool_format: str, chat_template: str | None, limits: ServeLimits) -> None:
        if tokenizer is not None and chat_template is not None:
            try:
                source = Path(chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template={chat_template!r}: cannot be read ({error}); give a jinja2 file in UTF-8") from error
            if not source.strip():
                raise ConfigError(f"chat_template={chat_template!r}: is empty; give a jinja2 template, or leave it out for the model's own")
            tokenizer = Tokenizer(tokenizer.backend, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, chat_template=source)
        self.tokenizer, self.tool_format, self.limits = tokenizer, tool_format, limits
        self.plain = None if tokenizer is None else PlainText(tokenizer)
        self._check_template(chat_template)
        user, called = {"role": "user", "content": "a"}, {"id": "0", "type": "function", "function": {"name": MARK, "arguments": {"a": MARK}}}
        tool = {"type": "function", "function": {"name": MARK, "description": "", "parameters": {"type": "object", "properties": {}}}}
        answered = [{"role": "assistant", "content": "b", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "0", "name": "c", "content": MARK}]
        self.knows_tools = self._shows([user], [tool])
        self.knows_calls = self._shows([user, answered[0]])
        plain = [user, {"role": "assistant", "content": "b"}] if not self.knows_calls else [user, {**answered[0], "tool_calls": [
            {**called, "function": {"name": "c", "arguments": {"a": "d"}}}]}]
        self.knows_results = self._shows([*plain, answered[1]])

    def _check_template(self, path: str | None) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            if self.tokenizer is not None:
                self.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
        except (RequestError, RecursionError) as error:
            reason = error.__cause__ or error
            if isinstance(reason, TemplateSyntaxError):
                raise ConfigError(f"chat_template: is not jinja2 ({reason}); mend it, or give another file with --chat-template") from error
            if path is not None:
                raise ConfigError(f"chat_template={path!r}: cannot render one message of a user ({reason}); mend it") from error

    def _shows(self, turns: list[Turn], tools: list[Turn] | None = None) -> bool:
        try:
            return self.tokenizer is not None and MARK in self.tokenizer.apply_chat_template(turns, tools=tools)
        except RequestError:
            return False

    async def prompt(self, body: ChatCompletionRequest, max_tokens: int | None = None) -> ChatPrompt:
        """
        Args:
            max_tokens: a prompt of more need not be tokenized, if that can be told from its length.

        Raises:
            RequestError: the messages are no conversation, are too long, or the template refuses them.
            ApiError: there are more than `max_tokens`.
        """
        long = self._check_size(body) > LONG_TEXT or body.tools
        return await asyncio.to_thread(self.render, body, max_tokens) if long else self.render(body, max_tokens)

    def render(self, body: ChatCompletionRequest, max_tokens: int | None = None) -> ChatPrompt:
        """`prompt`, on this thread."""
        if self.tokenizer is None:
            raise RequestError("messages: this model has no tokenizer; use /v1/completions with token ids")
        turns = self._turns(body.messages)
        tools = self.plain.guard(body.declared)
        if tools and not self.knows_tools:
            about = self._about(tools)
            if turns[0]["role"] == "system":
                turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{about}"}
            else:
                turns.insert(0, {"role": "system", "content": about})
        try:
            text = self.tokenizer.apply_chat_template(turns, tools=(tools or None) if self.knows_tools else None,
                                                      **self.plain.guard(_variables(body)))
        except RecursionError:
            raise RequestError("messages: a tool call's arguments are nested too deeply for the chat template; flatten them") from None
        if max_tokens is not None:
            self.check_length(text, "messages", max_tokens)
        return ChatPrompt(self.plain.encode(text), text.rstrip().endswith("<think>"))

    def check_length(self, text: str, field: str, max_tokens: int) -> None:
        """
        Raises:
            ApiError: the text is so long that it has more than `max_tokens` tokens, whatever they are.
        """
        if (least := self.plain.least_tokens(text)) > max_tokens:
            raise ApiError(400, f"{field}: has {len(text)} characters, so {least} tokens at the least, and max_model_len is {max_tokens}; send less",
                           field, "context_length_exceeded")

    def _check_size(self, body: ChatCompletionRequest) -> int:
        """Characters of the conversation, tools not counted."""
        check_count(len(body.messages), self.limits.max_messages, "messages", "messages", "max_messages")
        size = sum(len(message.content or "") + len(message.thought or "")
                   + sum(len(call.function.arguments) for call in message.tool_calls or ()) for message in body.messages)
        check_count(size, self.limits.max_prompt_chars, "messages", "characters", "max_prompt_chars")
        return size

    # --- messages as templates expect them ------------------------------------------------------------------

    def _turns(self, messages: Sequence[Message]) -> list[Turn]:
        names: dict[str, str] = {}  # of the functions called so far, by call id
        turns = []
        for at, message in enumerate(messages):
            field = f"messages.{at}"
            if message.tool_calls and message.role != "assistant":
                raise RequestError(f"{field}.tool_calls: belong to the assistant; remove them from a message of role='{message.role}'")
            if message.role == "assistant":
                turns.append(self._assistant(message, field, names))
                continue
            if message.content is None:
                raise RequestError(f"{field}.content: is missing; a message of role='{message.role}' needs a text")
            if message.role == "tool":
                turns.append(self._result(message, field, names))
                continue
            if message.tool_call_id is not None:
                raise RequestError(f"{field}.tool_call_id: belongs to a tool's result; send role='tool' or leave it out")
            role = "system" if message.role == "developer" else message.role
            turns.append(self.plain.guard({"role": role, "content": message.content} | ({"name": message.name} if message.name else {})))
        return turns

    def _assistant(self, message: Message, field: str, names: dict[str, str]) -> Turn:
        content = message.content if message.content is not None else message.refusal
        if content is None and not message.tool_calls:
            raise RequestError(f"{field}.content: is missing; an assistant's message has content, tool_calls or both")
        turn: Turn = {"role": "assistant", "content": self.plain.guard(content or "", own=True)}
        if message.thought is not None:
            turn["reasoning_content"] = self.plain.guard(message.thought, own=True)
        calls = []
        own_ids: set[str] = set()
        for at, call in enumerate(message.tool_calls or ()):
            if call.id in own_ids:
                raise RequestError(f"{field}.tool_calls.{at}.id={call.id[:80]!r}: is another call's of this message too; give each call an id of its own")
            own_ids.add(call.id)
            names[call.id] = call.function.name
            where = f"{field}.tool_calls.{at}.function.arguments"
            arguments = json_field(call.function.arguments, where, self.limits) if call.function.arguments.strip() else {}
            if not isinstance(arguments, dict):
                raise RequestError(f"{where}: is JSON but no object; send the arguments by name, '{{}}' when there are none")
            calls.append({"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}})
        if calls and self.knows_calls:
            turn["tool_calls"] = self.plain.guard(calls)
        elif calls:
            turn["content"] += "".join(self._written(call["function"], f"{field}.tool_calls.{at}.function") for at, call in enumerate(calls))
        return turn

    def _written(self, function: dict[str, Any], field: str) -> str:
        try:
            written = format_tool_call(self.tool_format, function["name"], function["arguments"])
        except ValueError as error:  # the format has no way to write it
            raise RequestError(f"{field}.{error}") from None
        guarded = self.plain.guard(function)
        return written if guarded == function else format_tool_call(self.tool_format, guarded["name"], guarded["arguments"])

    def _result(self, message: Message, field: str, names: Mapping[str, str]) -> Turn:
        if message.tool_call_id is None:
            raise RequestError(f"{field}.tool_call_id: is missing; send the id of the call that this is the result of")
        if message.tool_call_id not in names:
            raise RequestError(f"{field}.tool_call_id={message.tool_call_id[:80]!r}: no earlier message made this call; "
                               "send the assistant's message with its tool_calls before the result")
        content = self.plain.guard(message.content)
        if not self.knows_results:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        about = {"tool_call_id": message.tool_call_id, "name": message.name or names[message.tool_call_id]}
        return {"role": "tool", **self.plain.guard(about), "content": content}

    # --- tools, for templates that know none ----------------------------------------------------------------

    def _about(self, tools: list[Turn]) -> str:
        """The tools as a text for the system's turn."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = format_tool_call(self.tool_format, "name-of-the-tool", {"name-of-an-argument": "value"})
        return f"You may call these tools, one description a line:\n{listed}\nTo call one, write\n{example}\nand wait for its result."


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """Variables of the template that the request sets."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in OWN_VARIABLES or not name.isidentifier():
            raise RequestError(f"chat_template_kwargs.{name[:40]}: is not the request's to set; remove it")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables
