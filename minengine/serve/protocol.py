"""What `/v1/chat/completions` and `/v1/completions` take: OpenAI's fields, and vLLM's extensions under vLLM's names.

A field is one of four things: done; without meaning for a server of one model (`IGNORED`: taken and left alone); something that
this engine does not do (`NEUTRAL`: taken only with the value that asks for nothing); or unknown, and refused (with the name that does the
same here, where there is one: `ELSEWHERE`).
"""
from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from ..request import RequestError, SamplingParams, StructuredOutputsParams
from .body import parse_json
from .errors import ApiError
from .limits import ServeLimits, check_count
from .shapes import Content, Prompts, Stop, ToolChoice
from .validation import shown

__all__ = ["ChatCompletionRequest", "CompletionRequest", "GenerationRequest", "Message", "json_field"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
FIRST = Field(fail_fast=True)  # of a list the first error alone: a hostile one has a million


def json_field(text: str, field: str, limits: ServeLimits) -> Any:
    """The value of a field that holds JSON as a text.

    Raises:
        RequestError: it does not.
    """
    try:
        return parse_json(text.encode(), limits)
    except ApiError as error:
        raise RequestError(f"{field}: {error.message.removeprefix('body: ')}") from None


# --- parts --------------------------------------------------------------------------------------------------------------------------


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; there is none here, so both values are met


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    """A call as this server returned it. A streamed one brings its `index`, a marked one its `error`."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    error: dict[str, Any] | None = None


class Message(_Body):
    """One turn, of any role; which fields belong to which role is checked with the conversation around it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name for it
    refusal: str | None = None
    annotations: list[Any] | None = None  # these three come back from clients that return a message whole, empty
    audio: None = None
    function_call: None = None

    @property
    def thought(self) -> str | None:
        """The assistant's reasoning, under either name."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


class Function(_Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class JsonSchema(_Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # true: a schema that no grammar can enforce in full is refused; else it is followed as far as one can


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


ELSEWHERE = {  # fields of other servers and other times, and what does the same here
    "guided_json": "structured_outputs.json", "guided_regex": "structured_outputs.regex", "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar", "json_schema": "structured_outputs.json", "grammar": "structured_outputs.grammar",
    "functions": "tools", "function_call": "tool_choice",
}


class StructuredOutputs(_Body):
    """vLLM's extension; exactly one is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1), FIRST] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


# --- requests -----------------------------------------------------------------------------------------------------------------------


class GenerationRequest(_Body):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop = ()
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    # vLLM's
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None

    # this server's
    return_timeline: bool | None = None

    # ELSEWHERE, below: other servers' names
    guided_json: SkipJsonSchema[Any] = None
    guided_regex: SkipJsonSchema[Any] = None
    guided_choice: SkipJsonSchema[Any] = None
    guided_grammar: SkipJsonSchema[Any] = None
    json_schema: SkipJsonSchema[Any] = None
    grammar: SkipJsonSchema[Any] = None

    # NEUTRAL, below
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # IGNORED: who asks, and how a provider of many models would bill, keep and route it
    user: str | None = None

    def check(self, limits: ServeLimits) -> None:
        """
        Raises:
            RequestError: a field asks for something that this engine would have to ignore, or for more than the server gives.
        """
        for name, instead in ELSEWHERE.items():
            if getattr(self, name, None):
                raise RequestError(f"{name}: goes by another name here; use {instead}")
        for name, neutral in self.neutral().items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(f"{name}={shown(value)}: is something that this engine does not do; leave it out")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: belongs to a stream; send stream=true or leave it out")
        if self.min_tokens and not (self.ignore_eos and not self.stop and not self.stop_token_ids):
            raise RequestError(f"min_tokens={self.min_tokens}: the engine does not put off an answer's end; send ignore_eos=true and no stop, "
                               f"which fills max_tokens")
        check_count(self.n or 1, limits.max_n, "n", "choices", "max_n")
        check_count(len(self.stop), limits.max_stop, "stop", "strings", "max_stop")
        check_count(sum(map(len, self.stop)), limits.max_stop_chars, "stop", "characters", "max_stop_chars")
        for name in ("cache_salt", "user"):
            check_count(len(getattr(self, name) or ""), limits.max_id_chars, name, "characters", "max_id_chars")
        if self.return_timeline and self.num_choices > 1:
            raise RequestError("return_timeline: tells of one choice; send n=1 and one prompt")

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        """Fields that this engine does not do, with the values at which they ask for nothing."""
        return {"frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},)}

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling_params(self, *, max_tokens: int, logprobs: int | None, structured: StructuredOutputsParams | None) -> list[SamplingParams]:
        """The engine's parameters, one a choice: with a seed, choice i draws from seed + i."""
        def given(name: str, default: Any) -> Any:
            value = getattr(self, name)
            return default if value is None else value

        params = SamplingParams(
            temperature=given("temperature", 1.0), top_p=given("top_p", 1.0), top_k=given("top_k", 0), min_p=given("min_p", 0.0),
            seed=self.seed, stop=self.stop, stop_token_ids=given("stop_token_ids", ()), max_tokens=max_tokens,
            ignore_eos=bool(self.ignore_eos), logprobs=logprobs, structured_outputs=structured)
        if self.seed is None:
            return [params] * (self.n or 1)
        return [replace(params, seed=self.seed + i) for i in range(self.n or 1)]

    def room(self, prompt_field: str, field: str, num_prompt_tokens: int, max_model_len: int, default: float = math.inf) -> int:
        """Tokens that the answer may have: what `field` asks for, or else the rest of the context.

        Raises:
            ApiError: prompt and answer do not fit into the context together; like vLLM, none of them is cut in silence.
        """
        left, wanted = max_model_len - num_prompt_tokens, getattr(self, field)
        if left < 1:
            raise ApiError(400, f"{prompt_field}: has {num_prompt_tokens} tokens and max_model_len is {max_model_len}, which must also hold one "
                                f"output token; send less", prompt_field, "context_length_exceeded")
        if wanted is None:
            return int(min(default, left))
        if wanted > left:
            raise ApiError(400, f"{field}={wanted}: the prompt has {num_prompt_tokens} tokens of a context of {max_model_len}; ask for at most "
                                f"{left}, or leave it out", field, "context_length_exceeded")
        return wanted


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1), FIRST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FIRST] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # a variable of templates that know it
    chat_template_kwargs: dict[str, Any] | None = None

    # ELSEWHERE: OpenAI's first names
    functions: SkipJsonSchema[Any] = None
    function_call: SkipJsonSchema[Any] = None

    # NEUTRAL
    modalities: Annotated[list[str], FIRST] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    verbosity: str | None = None

    # IGNORED
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @cached_property
    def declared(self) -> list[dict[str, Any]]:
        """The tools as templates, grammars and parsers take them: OpenAI's form without what was left out."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral() | {"modalities": (["text"],), "audio": (None,), "prediction": (None,), "web_search_options": (None,),
                                    "moderation": (None,), "verbosity": ("medium",)}


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        # The best of as many as are returned is all of them.
        return super().neutral() | {"suffix": ("",), "best_of": (self.n or 1,)}

    @property
    def num_choices(self) -> int:
        return (self.n or 1) * len(self.prompt)
