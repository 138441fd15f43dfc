"""The token mask in Python: every state is the engine's own, and the widget opens where it is told to."""
import json
import random
from pathlib import Path

import pytest
from mask_cases import random_schema

pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("xgrammar", reason="pip install -c constraints.txt -e .[serve]")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from bookkit import page_grammar  # noqa: E402
from minwidgets import TokenMask  # noqa: E402
from minwidgets.masked_step import LIMITS, control_tokens, masked_step, named_tag, stop_ids, tokens_of_text  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.page_widget import VIEW_MIME  # noqa: E402
from minwidgets.token_mask import EXAMPLE, SCHEMA  # noqa: E402

from minengine.config import ConfigError  # noqa: E402
from minengine.grammar import GrammarBackend  # noqa: E402
from minengine.request import RequestError, StructuredOutputsParams  # noqa: E402
from minengine.serve.tools import FORMATS, format_tool_call, parse_tool_calls  # noqa: E402
from minengine.tokenizer import load_tokenizer  # noqa: E402

STATIC = Path(__file__).resolve().parents[1] / "book/static"
WEATHER = json.dumps(SCHEMA)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def backend(tokenizer):
    return GrammarBackend(tokenizer, tokenizer.vocab_size, stop_ids())


def step(format="glm", tool_name="get_weather", schema=WEATHER, tokens="", text=""):
    return masked_step(format, tool_name, schema, tokens, text)


def written(state):
    return "".join(text for _, text, *_ in state["pieces"])


def allowed_ids(matcher, size):
    mask = torch.full((1, -(-size // 32)), -1, dtype=torch.int32)
    matcher.fill(mask, 0)
    return np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:size].nonzero()[0].tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_a_walk_is_the_engines_walk(backend, tokenizer, format):
    draw = random.Random(61)
    for _ in range(4):
        schema = random_schema(draw)
        params = StructuredOutputsParams(structural_tag=named_tag(format, "get_weather", json.loads(schema)))
        matcher, ids = backend.matcher(params), []
        for _ in range(12):
            state = step(format, schema=schema, tokens=".".join(map(str, ids)))
            expected = allowed_ids(matcher, tokenizer.vocab_size)
            assert state["allowed"] == len(expected) and state["stop"] == (stop_ids()[0] in expected)
            assert {id for id, *_ in state["shown"]} <= set(expected) and (len(expected) > 18 or len(state["shown"]) == len(expected) - state["stop"])
            if not state["shown"]:
                break
            ids.append(draw.choice(state["shown"])[0])
            assert matcher.accept(ids[-1])
        assert [id for id, *_ in state["pieces"]] == ids[: len(state["pieces"])]


@pytest.mark.parametrize("format", FORMATS)
def test_jumps_are_the_engines(backend, format):
    params = StructuredOutputsParams(structural_tag=named_tag(format, "get_weather", SCHEMA))
    state = step(format)
    assert state["forced_tokens"] == backend.matcher(params).jump(1000) and len(state["forced_tokens"]) > 5
    assert state["forced"].startswith(written(step(format, tokens=".".join(map(str, state["forced_tokens"])))))


@pytest.mark.parametrize("format", FORMATS)
def test_a_text_is_written_as_far_as_the_grammar_goes(format):
    text = format_tool_call(format, "get_weather", EXAMPLE)
    whole = step(format, text=text)
    assert (written(whole), whole["refused"], whole["stop"], whole["ended"]) == (text, "", True, False)
    assert parse_tool_calls(written(whole), format=format)[1] == [{"name": "get_weather", "arguments": EXAMPLE}]
    before, _, behind = text.partition("3")
    wrong = step(format, text=f"{before}three{behind}")
    assert (written(wrong), wrong["refused"]) == (before, f"three{behind}")
    assert [text.strip() for _, text, _ in wrong["shown"] if text.strip()] == list("1234567")
    ended = step(format, tokens=".".join(str(id) for id, *_ in whole["pieces"]) + f".{stop_ids()[0]}", text="x")
    assert (ended["ended"], ended["allowed"], ended["shown"], ended["refused"]) == (True, 0, [], "x")


def test_what_a_token_forces_is_counted_where_it_stands():
    state = step(text="<tool_call>get_weather<arg_key>city</arg_key><arg_value>A")
    *forced, last = state["pieces"]
    assert all(must for *_, must in forced) and not last[3] and last[2] == 49_152 - len(control_tokens())
    assert state["allowed"] == last[2] and state["vocab_size"] == 49_152
    for id, text, behind in state["shown"]:
        assert step(tokens=".".join(str(piece[0]) for piece in state["pieces"]) + f".{id}")["allowed"] == behind, text


@pytest.mark.parametrize("arguments, sentence", [
    ({"format": "xml"}, "format='xml': use one of glm, llama"),
    ({"tool_name": "two words"}, "tool_name='two words': use 1 to 64 letters, digits, _ or -"),
    ({"schema": "{"}, "schema: this is not JSON ("),
    ({"schema": "[]"}, "schema: write an object such as"),
    ({"schema": " " * (LIMITS["schema"] + 1)}, "schema: use a text of up to 8000 characters"),
    ({"tokens": "1,2"}, "tokens='1,2': write ids with dots between them"),
    ({"tokens": "999999"}, "tokens: the grammar masks token 999999 at place 1; start over or go back"),
    ({"tokens": "0"}, "tokens: the grammar masks token 0 at place 1"),
    ({"tokens": "1." * LIMITS["tokens"] + "1"}, "tokens: use up to 1000"),
    ({"text": "x" * (LIMITS["text"] + 1)}, "text: use up to 4000 characters"),
    ({"schema": '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}}'}, "tools[0].function.parameters"),
])
def test_refusals_are_sentences(arguments, sentence):
    with pytest.raises(RequestError) as error:
        step(**arguments)
    assert str(error.value).startswith(sentence)


def test_the_widget_opens_with_the_engines_answer():
    widget = TokenMask(text="<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>three")
    assert widget.step == step(text=widget.text, schema=widget.schema) and widget.step["refused"] == "three"
    assert json.loads(widget.schema) == SCHEMA and widget.initial == {name: getattr(widget, name) for name in widget.takes}
    data, metadata = widget._repr_mimebundle_()
    assert metadata[VIEW_MIME]["needs"] == "grammar" and "'three' is refused" in data["text/plain"] and "get_weather" in metadata[VIEW_MIME]["minwidget"]


def test_the_examples_steps_are_in_the_page():
    widget = TokenMask(format="llama", tool_name="add", schema={"type": "object", "properties": {"a": {"type": "integer"}}}, example={"a": 12})
    ways = [one["settings"]["tokens"] for one in widget.known[1:]]
    assert ways[0] == "" and all(later.startswith(earlier) for earlier, later in zip(ways, ways[1:])) and len(set(ways)) == len(ways)
    assert widget.known[-1]["value"]["ended"] and written(widget.known[-2]["value"]) == '{"name": "add", "parameters": {"a": 12}}'
    assert all(one["value"] == masked_step(**one["settings"]) for one in widget.known)
    assert len(TokenMask(schema=widget.schema).known) == 1


def test_a_trait_asks_the_engine_again():
    widget = TokenMask()
    widget.text = "<tool_call>get_weather<arg_key>unit"
    assert widget.step["refused"] == "unit" and widget.answer["settings"]["text"] == widget.text
    widget.schema = "{"
    with pytest.raises(ConfigError, match="schema: this is not JSON"):
        widget.step


@pytest.mark.parametrize("options, sentence", [
    ({"stream": 1}, "unknown option 'stream'; known options: example, format, tool_name, schema, tokens, text"),
    ({"format": "xml"}, "format='xml'"),
    ({"example": {"city": "Oslo", "unit": "kelvin"}}, "example={'city': 'Oslo', 'unit': 'kelvin'}: its schema allows no such call, from 'kelvin"),
    ({"example": {"city": "Oslo"}}, "example={'city': 'Oslo'}: its schema allows no such call"),
])
def test_an_authors_mistake_is_an_error(options, sentence):
    with pytest.raises(ConfigError) as error:
        TokenMask(**options)
    assert str(error.value).startswith(sentence)


def test_the_page_gets_the_vocabulary_of_the_engines_grammars(tokenizer, tmp_path):
    page_grammar.write(tmp_path)
    text = (tmp_path / page_grammar.FILE).read_text(encoding="utf8")
    data = json.loads(text.removeprefix("globalThis.minGrammarData = ").removesuffix(";\n"))
    assert len(data["tokens"]) == tokenizer.vocab_size and data["stop"] == stop_ids() and len(text) < 600_000
    assert data["tokens"][tokenizer.encode(" the")[0]] == "\u0120the" and data["tokens"][0] == "" and data["control"]["2"] == "<|im_end|>"
    assert sum(map(len, data["tokens"])) == sum(map(len, tokens_of_text()))
    assert data["wire"]["glm"] == {"before": f"<tool_call>{data['tool']}", "after": "</tool_call>"}
    assert data["wire"]["llama"] == {"before": f'{{"name": "{data["tool"]}", "parameters": ', "after": "}"}


def test_the_page_knows_the_same_limits_and_shows_the_same_tokens():
    script = (STATIC / "grammar.js").read_text(encoding="utf8")
    assert "const LIMITS = { schema: 8000, text: 4000, tokens: 1000 };" in script and LIMITS == {"schema": 8000, "text": 4000, "tokens": 1000}
    assert len(bundle("token_mask.js")) < 40_000
