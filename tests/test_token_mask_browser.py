"""The token mask on a built page: the engine's own masks worked out in the page, from a server and from a file, loaded only when needed."""
import hashlib
import json
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from mask_cases import next_token, random_schema
from small_book import cell, small_book

pytest.importorskip("xgrammar", reason="pip install -c constraints.txt -e .[serve]")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from minwidgets.masked_step import named_tag, stop_ids  # noqa: E402
from minwidgets.token_mask import EXAMPLE, SCHEMA  # noqa: E402

from minengine.grammar import GrammarBackend  # noqa: E402
from minengine.request import StructuredOutputsParams  # noqa: E402
from minengine.serve.tools import FORMATS, format_tool_call  # noqa: E402
from minengine.simulate.answer import answer  # noqa: E402
from minengine.tokenizer import load_tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
CALL = "minwidgets.masked_step.masked_step"
TEXT = json.dumps(SCHEMA, indent=1)
PAGES = {"masks": "# Masks\n\n" + cell("from minwidgets import TokenMask\n\nTokenMask()") + "\n## Below\n\n" + cell(
    "from minwidgets import RowBytes\n\nRowBytes()")}
FILES = {"grammar.js", "grammar-data.js", "grammar-schema.js", "vendor/xgrammar.js"}
AXE = "axe.run('.tm').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
START = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
LOADS = 60_000  # ms that WebAssembly may take to start on a busy machine


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    """The page's address on a server, under a sub-path, and as a file."""
    html = small_book(tmp_path_factory.mktemp("masks") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/masks.html", "file": f"{html.as_uri()}/chapters/masks.html"}


class Masks:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".tm")

    def press(self, name):
        self.root.get_by_role("button", name=name, exact=True).click()
        self.settle()

    def write(self, text):
        self.root.get_by_label("What the model would write").fill(text)
        self.page.keyboard.press("Enter")
        self.settle()

    def settle(self):
        self.page.wait_for_selector(".tm[aria-busy=false]", timeout=LOADS)

    def call(self):
        return "".join(self.root.locator(".tm-piece").all_inner_texts()).replace("\u2423", " ")

    def refused(self):
        return "".join(self.root.locator(".tm-refused").all_inner_texts())

    def allowed(self):
        return self.root.locator(".rb-stat").first.inner_text()

    def buttons(self):
        return self.root.locator(".tm-token .tm-text").all_inner_texts()

    def message(self):
        return self.root.locator(".rb-message").inner_text()

    def live(self):
        return self.root.locator("[aria-live=polite]").inner_text()

    def set_schema(self, schema):
        self.root.get_by_label("JSON schema").fill(schema if isinstance(schema, str) else json.dumps(schema))


def state(**settings):
    return answer(CALL, {"format": "glm", "tool_name": "get_weather", "schema": TEXT, "tokens": "", "text": "", **settings})["value"]


def count(**settings):
    return f"{state(**settings)['allowed']:,}"


def requests_of(page):
    """Addresses that a page asks for from now on, of the files that work out masks."""
    log = []
    page.on("request", lambda request: any(request.url.endswith("/_static/" + name) for name in FILES) and log.append(request.url))
    return log


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_examples_steps_need_nothing_loaded(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        log = requests_of(watched.page)
        page = watched.open(book[scheme])
        masks = Masks(page)
        assert masks.root.get_attribute("aria-busy") == "false" and masks.call() == "" and masks.allowed() == count()
        assert "Token mask: a call" not in page.locator(".minwidget").first.inner_text()  # the words for a page without scripts
        whole = format_tool_call("glm", "get_weather", EXAMPLE)
        for _ in range(12):
            masks.press("Step")
        assert whole.startswith(masks.call()) and masks.allowed() == count(text=masks.call())
        page.evaluate("""() => { const step = [...document.querySelectorAll(".tm button")].find((it) => it.textContent === "Step");
            while (!step.hasAttribute("aria-disabled")) step.click(); }""")
        assert masks.call() == whole + "<|im_end|>" and masks.live() == "The call is complete." and masks.buttons() == []
        masks.press("Back")
        assert masks.call() == whole and masks.buttons() == ["end of the answer"]
        masks.press("Start over")
        assert masks.call() == ""
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
        assert log == [] and not watched.wrong


def test_masks_are_loaded_at_the_first_touch_once_and_from_this_site(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        log, masks = requests_of(page), Masks(page)
        masks.write(START + "A")
        assert masks.call() == START + "A" and masks.allowed() == count(text=START + "A")
        site = book["http"].removesuffix("chapters/masks.html") + "_static/"
        assert sorted(log) == sorted(site + name for name in FILES)
        masks.write("b</arg_value>")
        assert masks.allowed() == count(text=START + "Ab</arg_value>") and len(log) == len(FILES) and not watched.wrong


MASKS = """async (asked) => {
    const found = [];
    for (const settings of asked) {
        const { call } = await minGrammar.at(settings);
        const hash = await crypto.subtle.digest("SHA-256", new Uint8Array(call.mask.buffer, call.mask.byteOffset, call.mask.byteLength));
        call.matcher.dispose();
        found.push([...new Uint8Array(hash)].map((byte) => byte.toString(16).padStart(2, "0")).join(""));
    }
    return found;
}"""


def test_every_mask_is_the_engines_bit_for_bit(browser, book):  # noqa: F811
    """Walks over calls of random tools: the masks of minengine.grammar itself, and masked_step's whole answers."""
    draw = random.Random(71)
    tokenizer = load_tokenizer("smollm2")
    backend = GrammarBackend(tokenizer, tokenizer.vocab_size, stop_ids())
    asked, masks = [], []
    for number in range(40):
        format, name, schema, ids = FORMATS[number % 2], draw.choice(("get_weather", "f", "do-it_2")), random_schema(draw), []
        matcher = backend.matcher(StructuredOutputsParams(structural_tag=named_tag(format, name, json.loads(schema))))
        mask = torch.full((1, -(-tokenizer.vocab_size // 32)), -1, dtype=torch.int32)
        for _ in range(24):
            mask.fill_(-1)
            matcher._state.fill_next_token_bitmask(mask)  # the grammar's own; `fill` takes bytes out that end no character
            asked.append({"format": format, "tool_name": name, "schema": schema, "tokens": ".".join(map(str, ids)), "text": ""})
            masks.append(hashlib.sha256(mask.numpy().tobytes()).hexdigest())
            matcher.fill(mask, 0)
            allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little").nonzero()[0].tolist()
            ids.append(stop_ids()[0] if allowed == stop_ids() else next_token(draw, allowed, tokenizer.token_bytes))
            assert matcher.accept(ids[-1])
            if ids[-1] in stop_ids():
                break
            if draw.random() < 0.4:
                ids += matcher.jump(1000)
    assert len(masks) > 500
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        Masks(page).write("<")  # loads them
        assert page.evaluate(MASKS, asked) == masks
        some = draw.sample(asked, 120) + [{**one, "tokens": "", "text": draw.choice(("", '{"name": "f', START)) + draw.choice(("é", '"x', "</", "日本", "7"))}
                                          for one in draw.sample(asked, 60)]
        found = page.evaluate("async ([call, asked]) => { const all = []; for (const one of asked) all.push(await minGrammar.ask(call, one)); return all; }",
                              [CALL, some])
        for theirs, settings in zip(found, some, strict=True):
            assert theirs == answer(CALL, settings), settings
        assert not watched.wrong


@pytest.mark.parametrize("schema, sentence", [
    ('{"type": "object"', "schema: this is not JSON"),
    ({"type": "object"}, "schema.properties: name at least one"),
    ({"type": "string"}, "schema: the parameters of a tool are an object"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}, "schema.properties.a.pattern: this page's"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "schema.properties.a.type: give one of string, integer"),
    ({"type": "object", "properties": {"a": {"type": "array"}}}, "schema.properties.a.items: say what the array holds"),
    ({"type": "object", "properties": {"a": {"type": "number", "minimum": -1}}}, "schema.properties.a.minimum: of a number"),
    ({"type": "object", "properties": {"a": {"enum": [1.5]}}}, "schema.properties.a: this page knows strings, whole numbers"),
    ({"type": "object", "properties": {"a": {"const": "</arg_value>"}}}, "schema: </arg_value> ends an argument"),
    ({"type": "object", "properties": {'a"b': {"type": "null"}}}, "schema.properties: this page knows no quote"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}, "schema.additionalProperties: this page knows only false"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, 'schema.required: there is no property "b"'),
])
def test_what_the_page_cannot_follow_is_a_sentence(browser, book, schema, sentence):  # noqa: F811
    with Watched(browser, 1280) as watched:
        masks = Masks(watched.open(book["http"]))
        masks.set_schema(schema)
        watched.page.wait_for_function("(start) => document.querySelector('.tm .rb-message').textContent.startsWith(start)", arg=sentence, timeout=LOADS)
        assert masks.buttons() == [] and masks.allowed() == "–"
        masks.press("Reset")
        assert masks.message() == "" and masks.allowed() == count() and not watched.wrong


def test_another_schema_keeps_of_the_call_what_it_allows(browser, book):  # noqa: F811
    other = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bern"]}}, "required": ["city"]}
    with Watched(browser, 1280) as watched:
        masks = Masks(watched.open(book["http"]))
        masks.write(START + "Berlin")
        masks.set_schema(other)
        watched.page.wait_for_selector(".tm-refused", timeout=LOADS)
        assert (masks.call(), masks.refused()) == (START + "Ber", "lin") and masks.buttons() == ["n"]
        masks.root.get_by_role("button", name="n, then").click()
        masks.settle()
        assert (masks.call(), masks.refused(), masks.message()) == (START + "Bern", "", "") and not watched.wrong


def test_it_goes_on_by_itself_to_the_end_of_any_call(browser, book):  # noqa: F811
    draw = random.Random(73)
    with Watched(browser, 1280) as watched:
        page = watched.open(book["file"])
        masks = Masks(page)
        page.clock.install()
        for format in ("GLM’s tags", "Llama’s JSON"):
            masks.root.locator("label", has_text=format).click()
            masks.set_schema(random_schema(draw))
            page.clock.run_for(400)
            masks.settle()
            masks.root.get_by_role("button", name="Play", exact=True).click()
            for _ in range(200):
                page.clock.run_for(400)
                masks.settle()
                if masks.live() == "The call is complete.":
                    break
            assert masks.live() == "The call is complete.", masks.call()
            assert masks.root.get_by_role("button", name="Play", exact=True).get_attribute("aria-disabled") == "true"
        assert not watched.wrong


def test_while_they_load_the_page_says_so(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        held = []
        page.route("**/grammar.js", lambda route: held.append(route))  # the start waits until we have looked
        masks = Masks(page)
        masks.root.get_by_label("What the model would write").fill(START)
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('.tm .tm-note').textContent.startsWith('Loading the grammars')")
        held[0].continue_()
        masks.settle()
        assert masks.call() == START and masks.root.locator(".tm-note").inner_text() == "" and not watched.wrong


def test_without_webassembly_or_its_files_the_examples_steps_stay(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        watched.page.add_init_script("delete globalThis.WebAssembly")
        masks = Masks(watched.open(book["http"]))
        assert masks.root.locator(".tm-note").inner_text().startswith("This browser has no WebAssembly")
        assert masks.root.get_by_label("JSON schema").is_disabled() and masks.root.get_by_label("What the model would write").is_disabled()
        masks.press("Step")
        assert masks.call() == "<" and not watched.wrong
    for missing in FILES:
        with Watched(browser, 1280) as watched:
            watched.page.context.route(f"**/_static/{missing}", lambda route: route.fulfill(status=404, body="gone"))
            masks = Masks(watched.open(book["http"]))
            masks.root.get_by_label("What the model would write").fill(START)
            watched.page.keyboard.press("Enter")
            watched.page.wait_for_function("document.querySelector('.tm .tm-note').textContent.startsWith('Grammars could not be loaded')", timeout=LOADS)
            assert masks.call() == "" and masks.allowed() == count(), missing


def test_a_state_is_an_address(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        masks = Masks(page)
        masks.write(START + "A</arg_value>three")
        page.wait_for_url(re.compile(r"#TokenMask\.text="))
        masks.press("Back")  # first what is refused goes
        page.wait_for_url(re.compile(r"#TokenMask\.tokens=[0-9.]+$"))
        with Watched(browser, 1280) as other:
            shared = Masks(other.open(page.url))
            shared.settle()
            assert shared.call() == masks.call() and shared.allowed() == masks.allowed()
            shared.press("Reset")
            other.page.wait_for_url(re.compile(r"masks\.html$"))
            assert shared.call() == "" and not other.wrong
        page.evaluate("location.hash = '#TokenMask.tokens=44.44'")
        page.wait_for_function("document.querySelector('.tm .rb-message').textContent.startsWith('tokens: the grammar masks token 44 at place 2')")
        page.evaluate("location.hash = '#TokenMask.format=llama&TokenMask.text=%7B%22name%22%3A%20three'")
        page.wait_for_selector(".tm[aria-busy=false] .tm-refused")
        assert (masks.call(), masks.refused()) == ('{"name": ', "three") and not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        masks = Masks(page)
        forced = state()["forced"]
        assert masks.live() == f"1 token is allowed next; {forced} must come."
        masks.root.get_by_role("button", name="Reset").focus()
        for key in ("Tab", "Tab", "Enter"):  # past the call, which scrolls, to Step
            page.keyboard.press(key)
        assert masks.call() == "<" and page.evaluate("document.activeElement.textContent") == "Step"
        masks.root.locator(".tm-token").nth(1).focus()
        name = masks.root.locator(".tm-token .tm-text").nth(1).inner_text()
        page.keyboard.press("Enter")
        masks.settle()
        assert masks.call() == "<" + name and page.evaluate("document.activeElement.className") == "tm-token"
        assert unnamed_controls(page, ".tm") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"])
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        masks = Masks(page)
        page.locator(".tm summary").click()
        assert page.evaluate(AXE) == []
        masks.write(START + "A</arg_value>three")
        assert page.evaluate(AXE) == []
        masks.set_schema("{")
        page.wait_for_selector(".tm-wrong")
        assert page.evaluate(AXE) == []
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
        assert page.evaluate("getComputedStyle(document.querySelector('.tm .rb-drawing')).transitionDuration") == "0s"


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"])
        colours = """() => [getComputedStyle(document.querySelector(".tm")).color, getComputedStyle(document.querySelector(".tm-bar-next")).fill,
            getComputedStyle(document.querySelector(".tm-token")).backgroundColor]"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        assert all(one != other for one, other in zip(light, page.evaluate(colours), strict=True))
