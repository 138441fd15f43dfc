"""Bad input: what is no JSON, what is no request, what is too large. Always a 4xx that names the field and the remedy, never a 500."""
import asyncio
import json
import re

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import example, given, settings, strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError
from serving import ENGINE, loaded

from minengine.async_llm import AsyncLLM
from minengine.config import ConfigError
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.request import RequestError
from minengine.serve.app import create_app
from minengine.serve.args import ServeArgs
from minengine.serve.body import MAX_KEYS, parse_json
from minengine.serve.errors import ERROR_RESPONSES, ApiError, api_error
from minengine.serve.limits import ServeLimits, check_count, check_regex, check_schema
from minengine.serve.protocol import ChatCompletionRequest, CompletionRequest
from minengine.serve.routes import DetokenizeRequest, TokenizeRequest
from minengine.tokenizer import Tokenizer

LIMITS = ServeLimits(max_json_depth=8, max_json_parts=100)


# --- JSON -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body, words", [
    (b"", "is not JSON"), (b"   ", "is not JSON"), (b"{", "line 1, column 2"), (b"{}{}", "Extra data"), (b"{'a': 1}", "double quotes"), (b"nul", "is not JSON"),
    (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' twice"), (b'{"x": [{"a": 1, "a": 1}]}', "the key 'a' twice"),
    (b'{"\\ud800": 1, "\\ud800": 2}', "the key '\\ud800' twice"), (b'{"a": 1, "\\u0061": 2}', "the key 'a' twice"),
    (b"[NaN]", "NaN"), (b"[Infinity]", "Infinity"), (b"[-Infinity]", "-Infinity"), (b"[1e999]", "1e999"), (b"[-1e999]", "-1e999"),
    (b"[" + b"9" * 5000 + b"]", "thousands of digits"), (b"[" + b"9" * 5000 + b".0]", "no float can hold"),
    (b'"\xff"', "byte 1 is not UTF-8"), (b'\xff\xfe"\x00a\x00"\x00', "byte 0 is not UTF-8"), (b'"\xed\xa0\x80"', "is not UTF-8"), (b"\xef\xbb\xbf{}", "BOM"),
    (b'"\\ud800"', "half of a surrogate pair"), (b'{"a": [{"b": "x\\udc00y"}]}', "half of a surrogate pair"), (b'{"\\udfff": 1}', "half of a surrogate pair"),
    (b'"a\x00b"', "is not JSON"),
    (b"[" * 9 + b"]" * 9, "deeper than max_json_depth=8"), (b"[" * 100_000, "deeper than max_json_depth=8"), (b'{"a":' * 100_000, "deeper than max_json_depth=8"),
    (b"[" + b"{}," * 100 + b"{}]", "max_json_parts=100"),
    (b"{" + b",".join(b'"%d": 0' % i for i in range(MAX_KEYS + 1)) + b"}", f"an object of {MAX_KEYS + 1} keys"),
])
def test_what_is_no_json_is_refused(body, words):
    with pytest.raises(ApiError) as caught:
        parse_json(body, LIMITS)
    told = caught.value
    assert (told.status, told.param, told.code) == (400, "body", "invalid_json")
    assert told.message.startswith("body: ") and words in told.message and "; " in told.message, told.message
    json.dumps(told.body(), ensure_ascii=False).encode()  # the answer itself is text


@pytest.mark.parametrize("body, value", [
    (b"[" * 8 + b"]" * 8, [[[[[[[[]]]]]]]]), (b'"\\ud83d\\ude00 \\u0000"', "\U0001f600 \0"), (b"[1e308, -0.0, 12345678901234567890]", [1e308, -0.0, 12345678901234567890]),
    (b'"' + b"{[" * 200 + b'"', "{[" * 200), (b"[" + b",".join([b"1"] * 1000) + b"]", [1] * 1000), (b" \n{}\t", {}),
    ("\"\u65e5\u672c\"".encode(), "\u65e5\u672c"), (b"[" * 7 + b'"a", "b"' + b"]" * 7, [[[[[[["a", "b"]]]]]]]),
])
def test_what_is_json_is_read(body, value):
    assert parse_json(body, LIMITS) == value


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)


@given(VALUES, st.booleans())
def test_any_value_is_read_as_it_was_written(value, ascii):
    assert parse_json(json.dumps(value, ensure_ascii=ascii).encode(), ServeLimits()) == value


@given(st.binary() | st.text(alphabet='{}[]",:\\udDaA01eEnN.+- \x00\u20ac').map(str.encode))
@example(b'[1E400]')
def test_any_bytes_are_read_or_refused(body):
    try:
        value = parse_json(body, LIMITS)
    except ApiError as error:
        assert error.status == 400
    else:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


# --- fields -----------------------------------------------------------------------------------------------------


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    text: str


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    n: int = 1
    on: bool = False
    content: str | list[Part] | None = None
    ids: list[int] = []


@pytest.mark.parametrize("body, param, message", [
    ({"n": "x"}, "n", "n='x': use a whole number"),
    ({"n": 1.5}, "n", "n=1.5: use a whole number"),
    ({"on": 1}, "on", "on=1: use true or false"),
    ({"n": True}, "n", "n=true: use a whole number"),
    ({"n": 1e40}, "n", "n=1e+40: use a whole number"),
    ({"on": 10**80}, "on", "on=1" + "0" * 59 + "...: use true or false"),
    ({"nn": 1}, "nn", "nn: is not a field that this server knows; remove it or check its spelling"),
    ({"ids": [1, 2, None]}, "ids.2", "ids.2=null: use a whole number"),
    ({"ids": {"0": 1}}, "ids", "ids={...}: use a list"),
    ({"content": 5}, "content", "content=5: use a text or use a list"),
    ({"content": [{"text": "a"}, {"text": 5}]}, "content.1.text", "content.1.text=5: use a text"),
    ({"content": [{}]}, "content.0.text", "content.0.text: is missing; add it"),
    ({"content": [{"text": "a", "str": 1}]}, "content.0.str", "content.0.str: is not a field that this server knows; remove it or check its spelling"),
    ({"n": "x" * 1000}, "n", "n='" + "x" * 60 + "'...: use a whole number"),
    ([], "body", "body=[]: send a JSON object"),
    ("text", "body", "body='text': send a JSON object"),
])
def test_a_bad_field_is_named_with_its_remedy(body, param, message):
    with pytest.raises(ValidationError) as caught:
        Body.model_validate(body)
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    told = api_error(RequestValidationError(found, body=body))
    assert (told.status, told.param, told.message) == (400, param, message)


@pytest.mark.parametrize("field, value, told", [("logit_bias", {str(id): 1.0 for id in range(99)}, "{...}"), ("frequency_penalty", 0.5, "0.5")])
def test_a_field_that_the_engine_does_not_do_is_told_in_json(field, value, told):
    with pytest.raises(RequestError, match=f"^{field}={re.escape(told)}: "):
        CompletionRequest(prompt="a", **{field: value}).check(ServeLimits())


def test_a_missing_item_is_named_by_its_place():
    missing = {"type": "missing", "loc": ("body", "pair", 2), "msg": "", "input": [1, 2]}
    told = api_error(RequestValidationError([missing], body={"pair": [1, 2]}))
    assert (told.param, told.message) == ("pair.2", "pair.2: is missing; add it")


def test_a_bad_body_of_many_errors_is_told_of_in_no_more_time_than_one(monkeypatch):
    class Counted(dict):
        looked_at = 0

        def __contains__(self, key):
            Counted.looked_at += 1
            return super().__contains__(key)

    body = Counted({f"k{i}": 1 for i in range(10_000)})
    errors = [{"type": "extra_forbidden", "loc": ("body", key), "msg": "", "input": 1} for key in body]
    assert api_error(RequestValidationError(errors, body=body)).param == "k0"
    assert Counted.looked_at <= 100


@pytest.mark.parametrize("kind, body", [
    (ChatCompletionRequest, {"messages": [{}] * 1000}),
    (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * 1000}]}),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 1000}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 1000}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * 1000}}),
    (CompletionRequest, {"prompt": ["a", 1] * 1000}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * 1000}),
    (TokenizeRequest, {"messages": [{}] * 1000}),
    (DetokenizeRequest, {"tokens": ["x"] * 1000}),
])
def test_a_list_of_bad_items_is_a_few_errors(kind, body):
    """Errors are put together on the event loop: a megabyte of them would stop every stream for seconds."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 3


# --- sizes ------------------------------------------------------------------------------------------------------


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize("schema, words", [
    ([], "is a list and no JSON schema"), (None, "is a NoneType"), ("x", "is a str"),
    (nested(5), "deeper than max_schema_depth=4"), ({"enum": ["x" * 1000]}, "--max-schema-bytes"), ({"enum": ["\u20ac" * 400]}, "--max-schema-bytes"),
    ({"maxLength": 101}, "has a maxLength above max_schema_count=100"), ({"items": {"minItems": 1e9}}, "has a minItems"), ({"maxItems": 10**4000}, "has a maxItems"),
    ({"properties": {key: {"maxLength": 51} for key in "ab"}}, "add up to more than max_schema_count=100"),
    ({"pattern": "a" * 51}, "has 51 characters of regex"), ({"pattern": "a{1,101}"}, "repeats something {1,101} times"),
    ({"pattern": "a{" + "9" * 40 + "}"}, "repeats something"), ({"patternProperties": {"a{999}": {}}}, "repeats something {999} times"),
    ({"properties": {"pattern": {"pattern": "x" * 99}}}, "characters of regex"),
])
def test_a_schema_too_large_is_refused_by_its_field(schema, words):
    limits = ServeLimits(max_schema_depth=4, max_schema_bytes=1000, max_schema_count=100, max_regex_chars=50)
    with pytest.raises(RequestError) as caught:
        check_schema(schema, "tools.3.function.parameters", limits)
    assert words in str(caught.value)
    told = api_error(caught.value)
    assert told.status == 400 and told.param.startswith("tools.3.function.parameters")
    assert "; " in told.message


def test_a_schema_within_the_limits_is_taken():
    limits = ServeLimits(max_schema_depth=4, max_schema_bytes=1000, max_schema_count=100, max_regex_chars=50)
    check_schema(nested(4), "f", limits)
    check_schema({"properties": {"pattern": {"type": "string"}, "maxLength": {"maxLength": 100}}, "pattern": "a{1,100}{2,}"}, "f", limits)
    check_schema({"maxLength": True}, "f", limits)  # no count; the grammar's compiler says what it thinks of it
    check_schema(True, "f", limits)


def test_depth_is_found_without_recursion():
    schema = nested(20_000)
    with pytest.raises(RequestError, match="max_schema_depth=32"):
        check_schema(schema, "f", ServeLimits())


def test_a_count_and_a_regex_alone():
    check_count(3, 3, "n", "choices", "max_n")
    with pytest.raises(RequestError, match="n: has 4 choices and the server takes 3; send fewer or raise --max-n"):
        check_count(4, 3, "n", "choices", "max_n")
    check_regex("[a-z]{2,}x{3}", "f", ServeLimits())
    with pytest.raises(RequestError, match="f: repeats"):
        check_regex("(a{100}){100000}", "f", ServeLimits())


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "9"])
def test_a_limit_is_a_whole_number(value):
    with pytest.raises(ConfigError, match="max_n="):
        ServeLimits(max_n=value)


# --- the whole server against anything ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app():
    model, tokenizer = loaded("glm-mini")
    talking = Tokenizer(tokenizer.backend, chat_template="{% for turn in messages %}{{ turn.content }} {% endfor %}")
    args = EngineArgs(model="glm-mini", **ENGINE)
    engine = AsyncLLM(LLMEngine(args, model=model, tokenizer=talking))
    yield create_app(engine, ServeArgs(engine=args))
    asyncio.run(engine.shutdown())


GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "n": 1, "stop": ["x"], "seed": 1, "stream": False,
                             "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "none"},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 1, "n": 1, "stop": ["x"], "temperature": 0.5, "logprobs": 1, "stream": False},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
}


@st.composite
def bodies(draw):
    """A good body with something in it replaced, removed or added, at any depth."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body = json.loads(json.dumps(GOOD[path]))
    for _ in range(draw(st.integers(1, 2))):
        node = body
        while True:
            key = draw(st.sampled_from([*node, "x"])) if isinstance(node, dict) else draw(st.integers(0, len(node) - 1))
            inner = node.get(key) if isinstance(node, dict) else node[key]
            if not isinstance(inner, (dict, list)) or not inner or draw(st.booleans()):
                break
            node = inner
        if isinstance(node, dict) and draw(st.integers(0, 3)) == 0:
            node.pop(key, None)
        else:
            node[key] = draw(VALUES | st.sampled_from([-1, 0, 10**20, "", [], {}, [[]], "\0", 1e308, ["a"] * 40]))
    return path, body


def post(app, path, content, headers):
    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(main())


def check_answer(answer):
    assert answer.status_code == 200 or answer.status_code in ERROR_RESPONSES and answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        if answer.status_code == 400:
            assert error["param"], error
            assert ": " in error["message"], error


@settings(max_examples=300)
@given(bodies())
def test_any_change_to_a_good_request_is_answered_in_kind(app, request_):
    path, body = request_
    check_answer(post(app, path, json.dumps(body).encode(), {"Content-Type": "application/json"}))


@settings(max_examples=100)
@given(st.sampled_from(sorted(GOOD)), st.binary(max_size=200), st.sampled_from(["application/json", "application/json; charset=utf-16", "text/plain", ""]))
def test_any_bytes_are_answered_in_kind(app, path, content, kind):
    check_answer(post(app, path, content, {"Content-Type": kind}))
