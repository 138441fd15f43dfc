"""The `openai` package, unmodified, against a real server with smollm2."""
import asyncio
import json

import pytest

openai = pytest.importorskip("openai", reason="the openai package is missing; run: make setup")

from serving import server  # noqa: E402

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city now.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo", "Lima"]},
                                                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                   "required": ["city", "unit"], "additionalProperties": False}}}
TIME = {"type": "function", "function": {
    "name": "get_time", "strict": True,
    "parameters": {"type": "object", "properties": {"zone": {"type": "integer", "minimum": -12, "maximum": 14}}, "required": ["zone"],
                   "additionalProperties": False}}}
TOOLS = [WEATHER, TIME]
HELLO = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def served():
    with server("smollm2") as running:
        yield running


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def streamed(chunks):
    """One choice's deltas added up, the way a client does it: (text, calls, finish_reason, usage, entries of logprobs)."""
    text, calls, finish_reason, usage, entries = "", {}, None, None, []
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert finish_reason is None, "nothing comes behind the finish"
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                mine = calls.setdefault(call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                mine["id"] += call.id or ""
                mine["function"]["name"] += call.function.name or ""
                mine["function"]["arguments"] += call.function.arguments or ""
            entries += choice.logprobs.content if choice.logprobs else []
            finish_reason = choice.finish_reason or finish_reason
    return text, [calls[index] for index in sorted(calls)], finish_reason, usage, entries


def functions(calls):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_whole_answer(client):
    answer = client.chat.completions.create(model="smollm2", messages=HELLO, max_completion_tokens=12, temperature=0)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "smollm2"
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.message.tool_calls is None
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage.completion_tokens == 12 and answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_adds_up_to_the_whole(client):
    options = dict(model="smollm2", messages=HELLO, max_completion_tokens=16, temperature=0, logprobs=True, top_logprobs=3)
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text, calls, finish_reason, usage, entries = streamed(chunks)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert [chunk for chunk in chunks if not chunk.choices] == chunks[-1:]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    choice = whole.choices[0]
    assert (text, finish_reason) == (choice.message.content, choice.finish_reason) and calls == []
    assert entries == choice.logprobs.content
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_logprobs_spell_the_text(client):
    choice = client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Écris: café, naïve, 日本"}], max_tokens=20,
                                            temperature=0, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    spelled = bytes(byte for entry in entries if entry.token != "<|im_end|>" for byte in entry.bytes)
    assert spelled.decode(errors="replace") == choice.message.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries), "greedy takes the best token"


def test_choices_have_seeds_of_their_own(client):
    options = dict(model="smollm2", messages=HELLO, max_tokens=8, temperature=1.5)
    three = [choice.message.content for choice in client.chat.completions.create(**options, n=3, seed=7).choices]
    assert len(set(three)) > 1
    assert three[2] == client.chat.completions.create(**options, seed=9).choices[0].message.content, "choice i draws from seed + i"
    texts = {0: "", 1: "", 2: ""}
    usage = None
    for chunk in client.chat.completions.create(**options, n=3, seed=7, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == three
    assert usage.completion_tokens == 24 and usage.prompt_tokens < 60, "a prompt counts once"


def test_stop_strings_end_an_answer_before_them(client):
    options = dict(model="smollm2", messages=HELLO, max_tokens=40, temperature=0)
    full = client.chat.completions.create(**options).choices[0].message.content
    stop = full[10:14]
    choice = client.chat.completions.create(**options, stop=[stop, "never seen"]).choices[0]
    assert choice.message.content == full[: full.index(stop)] and choice.finish_reason == "stop"
    assert streamed(client.chat.completions.create(**options, stop=stop, stream=True))[0] == choice.message.content


def test_the_asynchronous_client_reads_many_streams_at_once(served):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none", timeout=120) as client:
            async def one(number):
                stream = await client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": f"Count to {number}."}],
                                                              max_tokens=6, temperature=0, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            together = await asyncio.gather(*map(one, range(8)))
            assert [await one(number) for number in (2, 5)] == [together[2], together[5]]

    asyncio.run(main())


def test_an_answer_follows_a_json_schema(client):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
              "required": ["name", "age"], "additionalProperties": False}
    options = dict(model="smollm2", messages=[{"role": "user", "content": "Describe a person as JSON."}], max_tokens=80, temperature=0,
                   response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}})
    choice = client.chat.completions.create(**options).choices[0]
    person = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and list(person) == ["name", "age"] and isinstance(person["age"], int)
    assert streamed(client.chat.completions.create(**options, stream=True))[0] == choice.message.content


@pytest.mark.parametrize("tool_choice, names", [("required", {"get_weather", "get_time"}),
                                                ({"type": "function", "function": {"name": "get_time"}}, {"get_time"})])
def test_calls_are_the_same_streamed_and_whole(client, tool_choice, names):
    options = dict(model="smollm2", messages=[{"role": "user", "content": "What is the weather in Oslo?"}], tools=TOOLS, tool_choice=tool_choice,
                   parallel_tool_calls=False, max_tokens=100, temperature=0)
    choice = client.chat.completions.create(**options).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_") and call.function.name in names
    json.loads(call.function.arguments)
    text, calls, finish_reason, _, _ = streamed(client.chat.completions.create(**options, stream=True))
    assert functions(calls) == functions([call.model_dump()]) and (text, finish_reason) == ("", "tool_calls")


def test_a_cut_call_is_no_call(client):
    options = dict(model="smollm2", messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=6, temperature=0)
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None and choice.message.content
    assert streamed(client.chat.completions.create(**options, stream=True))[:3] == (choice.message.content, [], "length")


def test_three_turns_with_tools_streamed(client):
    """user, call, result, answer, question, call, result, answer, and a third question: each turn reads the one before from the cache."""
    messages = [{"role": "system", "content": "You help travellers."}]
    cached = []

    def turn(tool_choice, max_tokens):
        chunks = client.chat.completions.create(model="smollm2", messages=messages, tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False,
                                                max_tokens=max_tokens, temperature=0, stream=True, stream_options={"include_usage": True})
        text, calls, finish_reason, usage, _ = streamed(chunks)
        cached.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
        messages.append({"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {}))
        return text, calls, finish_reason

    for question, tool in (("How is the weather in Lima?", "get_weather"), ("And what time is it there?", "get_time")):
        messages.append({"role": "user", "content": question})
        text, calls, finish_reason = turn({"type": "function", "function": {"name": tool}}, 100)
        assert finish_reason == "tool_calls" and [name for name, _ in functions(calls)] == [tool]
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": json.dumps({"answer": "sunny, 14:05"})})
        text, calls, finish_reason = turn("none", 12)
        assert text and not calls
    messages.append({"role": "user", "content": "Thank you. What should I pack?"})
    text, calls, _ = turn("none", 12)
    assert text and not calls
    tokens = [hit for hit, _ in cached]
    assert tokens == sorted(tokens) and len(set(tokens)) == len(tokens), cached
    # A turn computes what is new: the prompt before it and its answer come from the cache, but for a block's worth at the seam.
    for (_, before), (hit, _) in zip(cached, cached[1:]):
        assert hit > before - 32, cached


def test_the_client_sees_errors_as_its_own_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smollm2", messages=HELLO, logit_bias={"5": 1})
    assert bad.value.param == "logit_bias"


def test_completions(client):
    options = dict(model="smollm2", prompt=["The sky is", "Two plus two is"], max_tokens=6, temperature=0)
    whole = client.completions.create(**options)
    assert whole.object == "text_completion" and [choice.index for choice in whole.choices] == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
