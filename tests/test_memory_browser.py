"""The widget Memory ladder on a built page in a real browser: alive with no kernel, right to the last byte, and usable."""
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from small_book import cell, small_book

from minengine.arithmetic import CARDS
from minengine.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
IMPORT = "from minwidgets import MemoryLadder\n\n"
SMALL = dict(model="Llama-3.1-8B", topology="TP1", card="own", hbm_gb=24, kv_cache_dtype="bfloat16", beside="given", beside_gb=2)
PAGES = {"ladder": "# A ladder\n\n" + cell(IMPORT + "MemoryLadder()"), "small": "# Small\n\n" + cell(IMPORT + f"MemoryLadder(**{SMALL!r})")}
# The widget's module and its tables, from the state that is embedded in the page: the very text that readers run.
MODULE = """() => {
    const { state } = JSON.parse(document.querySelector('script[type="application/vnd.jupyter.widget-state+json"]').textContent);
    const widget = Object.values(state).find((entry) => entry.model_module === "anywidget").state;
    const address = URL.createObjectURL(new Blob([widget._esm], { type: "text/javascript" }));
    return import(address).then((module) => { window.tested = module; window.tables = widget.tables; });
}"""
# With the keys of the tables in another order: a stored notebook sorts them.
NUMBERS = """(states) => states.map((state) => {
    const byKey = (_, it) => (it !== null && typeof it === "object" && !Array.isArray(it) ? Object.fromEntries(Object.entries(it).sort().reverse()) : it);
    try {
        return tested.numbers(state, JSON.parse(JSON.stringify(tables, byKey))).compared;
    } catch (error) {
        return error.message;
    }
})"""
AXE = "axe.run('.ml').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
CLASHES = """() => {
    const room = document.querySelector(".ml").getBoundingClientRect();
    const boxes = [...document.querySelectorAll(".ml svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const apart = (one, other) => one.right <= other.left || other.right <= one.left || one.bottom <= other.top || other.bottom <= one.top;
    return [boxes.filter(([, box]) => box.left < room.left || box.right > room.right).map(([text]) => text),
            boxes.filter(([, one], i) => boxes.slice(i + 1).some(([, other]) => !apart(one, other))).map(([text]) => text)];
}"""


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    html = small_book(tmp_path_factory.mktemp("ladder") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/", "file": f"{html.as_uri()}/chapters/", "folder": html}


@pytest.fixture(scope="module")
def made():
    """The widget in Python, which is set as the page is."""
    pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")
    from minwidgets import MemoryLadder

    def at(**state):
        widget = MemoryLadder()
        for name, value in state.items():
            setattr(widget, name, value)
        return widget

    return at


def in_units(value, units):
    unit = 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    exact = unit == 0 and value == int(value)
    text = f"{round(value):,}" if exact or value >= 999.5 else f"{value:#.3g}".rstrip(".")
    return f"{text}\u00a0{units[unit]}"


def spoken_bytes(nbytes):
    return in_units(nbytes, ["bytes", "kB", "MB", "GB", "TB"])


def random_state(draw):
    """Any state that the traits take, fitting together or not."""
    return {
        "model": draw.choice(["GLM-5.3", "GLM-5.3", "Llama-3.1-8B"]), "topology": draw.choice(["TP1", "TP4", "TP8", "TEP8", "DEP8", "TP8+DCP4"]),
        "card": draw.choice([*CARDS, "own"]), "hbm_gb": draw.choice([1, 24, 1000, round(draw.uniform(1, 400), 3)]),
        "kv_cache_dtype": draw.choice(["bfloat16", "fp8", "fp8", "nvfp4_fp8_ds_mla", "nvfp4"]), "weights": draw.choice(["bfloat16", "fp8", "nvfp4"]),
        "beside": draw.choice(["solved", "solved", "given"]), "beside_gb": draw.choice([0, 8, 250, round(draw.uniform(0, 60), 2)]),
        "step_tokens": draw.choice([1, 4096, 65536, draw.randint(1, 65536)]), "session_tokens": draw.choice([1, 146_000, 10**7, draw.randint(1, 10**7)]),
        "untouched": draw.choice([0, 64.6, 2000, round(draw.uniform(0, 200), 2)]),
    }


class Laddered:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".ml")

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def pick(self, group, value):
        self.root.locator(f"input[type=radio][name$='-{group}'][value='{value}']").check()

    def numbers(self):
        return self.root.locator(".rb-stat").all_inner_texts()

    def message(self):
        return self.root.locator(".rb-message").inner_text()


def shown(widget):
    """The four figures of a widget in Python, as the page says them."""
    now = widget.numbers
    left = spoken_bytes(now.left_bytes) if now.left_bytes >= 0 else f"−{spoken_bytes(-now.left_bytes)}"
    tokens = "none" if now.left_bytes < 0 else in_units(now.tokens / 1e6, ["million"]) if now.tokens >= 999_500 else f"{now.tokens:,}"
    if tokens.endswith("million"):  # zeros at the end are left out
        amount = tokens.split("\u00a0")[0]
        tokens = (f"{float(amount):g}" if float(amount.replace(",", "")) < 999.5 else amount) + "\u00a0million"
    tables = widget.tables
    itl = {**tables["simulated_ms"], **tables["reported"]["itl_ms"]}.get(widget.topology) if widget.model == "GLM-5.3" else None
    return [left, "1 copy" if now.copies == 1 else f"{now.copies} copies", tokens, f"{itl:.2f}\u00a0ms" if itl else "–"]


@pytest.mark.parametrize("width", [1280, 390, 360])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_alive_with_no_kernel_and_no_other_host(browser, book, made, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        page = watched.open(book[scheme] + "ladder.html")
        laddered = Laddered(page)
        assert page.locator(".minwidget[data-state=alive] .ml svg rect").count() > 12
        assert laddered.numbers() == shown(made()) == ["52.0\u00a0GB", "4 copies", "1.72\u00a0million", "6.08\u00a0ms"]
        assert "Memory ladder:" not in page.locator(".minwidget").inner_text()  # the words for a page without scripts are gone
        laddered.root.locator("summary").click()
        for topology in ("TP4", "DEP8", "TP8+DCP4", "TP1"):
            laddered.pick("topology", topology)
            assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
            assert page.evaluate(CLASHES) == [[], []], topology
        assert not watched.wrong


def test_words_stand_in_for_scripts(book):
    assert "<p>Memory ladder: GLM-5.3 on GB200 (one GPU), TP4. Of 198.7 GB a card" in (book["folder"] / "chapters/ladder.html").read_text(encoding="utf8")


def test_numbers_equal_arithmetics_over_random_states(browser, book, made):  # noqa: F811
    draw = random.Random(51)
    states = [random_state(draw) for _ in range(600)]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "ladder.html")
        page.evaluate(MODULE)
        found = page.evaluate(NUMBERS, states)
    fitted, refused = 0, set()
    for state, theirs in zip(states, found, strict=True):
        try:
            ours = made(**state).compared
        except ConfigError as error:
            assert theirs == str(error), state
            refused.add(theirs.split("=")[0])
            continue
        fitted += 1
        keys = ("name", "gpus", "copies", "weight_bytes", "buffers", "beside", "left", "token", "tokens", "sessions")
        assert [[one[key] for key in keys] for one in theirs] == [
            [name, one.gpus, one.copies, one.weight_bytes, one.buffer_bytes, one.beside_bytes, one.left_bytes, one.token_bytes, one.tokens,
             one.sessions(state["session_tokens"])] for name, one in ours.items()], state
    assert fitted > 100 and refused == {"topology", "kv_cache_dtype", "beside_gb", "weights"}


def test_the_page_shows_and_draws_what_was_set(browser, book, made):  # noqa: F811
    draw = random.Random(52)
    with Watched(browser, 1280, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "ladder.html")
        laddered = Laddered(page)
        for _ in range(20):
            state = {**random_state(draw), "model": "GLM-5.3", "kv_cache_dtype": draw.choice(["bfloat16", "fp8", "nvfp4_fp8_ds_mla"]), "untouched": 12.5,
                     "step_tokens": draw.randint(1, 16384), "beside_gb": 20.5, "hbm_gb": round(draw.uniform(50, 300), 1)}
            for group, name in (("topology", "topology"), ("card", "card"), ("row", "kv_cache_dtype"), ("weights", "weights"), ("beside", "beside")):
                laddered.pick(group, state[name])
            for name in ("step_tokens", "session_tokens", "untouched", *(["hbm_gb"] if state["card"] == "own" else []),
                         *(["beside_gb"] if state["beside"] == "given" else [])):
                laddered.field(name).fill(repr(state[name]))
            widget = made(**state)
            assert (laddered.numbers(), laddered.message()) == (shown(widget), ""), state
            now = widget.numbers
            room = (page.evaluate("document.querySelector('.ml svg').viewBox.baseVal.width") - 44) / 2
            a_byte = room / (now.hbm_bytes + max(0, -now.left_bytes))
            bars = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll(".ml svg rect:not(.ml-tokens)")]
                .map((bar) => [bar.classList[1].slice(3), bar.getBBox()]).map(([kind, box]) => [kind, [box.x, box.width]]))""")
            attention = now.weights["attention"] + now.weights["indexers"]
            rungs = {"experts": now.weights["experts"], "attention": attention, "rest": now.weight_bytes - now.weights["experts"] - attention,
                     "buffers": now.buffer_bytes, "beside": now.beside_bytes}
            zero, end = max(0, -now.left_bytes) * a_byte, now.hbm_bytes
            wanted = {"memory": [zero, now.hbm_bytes * a_byte]}
            for kind, nbytes in rungs.items():  # each begins where the one before ends, from the right
                end -= nbytes
                wanted |= {kind: [zero + end * a_byte, max(1.5, nbytes * a_byte)]} if nbytes else {}
            wanted["cache" if end >= 0 else "missing"] = [min(zero, zero + end * a_byte), max(1.5, abs(end) * a_byte)]
            assert {kind: pytest.approx(edges, abs=0.1) for kind, edges in wanted.items()} == bars, state
            most = max(1, *(one.tokens for one in widget.compared.values()))
            bars = page.evaluate("""() => [...document.querySelectorAll(".ml svg rect.ml-tokens")].map((bar) => bar.getBBox().width)""")
            if state["card"] != "GB200":  # there a reported capacity may set the scale
                assert bars == pytest.approx([room * one.tokens / most for one in widget.compared.values()], abs=0.1), state
        laddered.root.locator("summary").click()
        rows = [row.split("\t") for row in laddered.root.locator("tbody tr").all_inner_texts()]
        assert [row[0] for row in rows] == ["one GPU", "TP4", "TP8", "TEP8", "DEP8", "TP8+DCP4"]
        assert [row[8:10] for row in rows] == [[f"{one.left_bytes:,}", f"{one.tokens:,}"] for one in widget.compared.values()]
        assert not watched.wrong


def test_what_is_reported_stands_at_the_sources_setting_only(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "ladder.html")
        laddered = Laddered(page)
        why, told, marks = laddered.root.locator(".ml-why"), laddered.root.locator(".ml-theirs"), laddered.root.locator("path.ml-reported")
        assert why.inner_text() == ("DEP8 caches 5.51 times the tokens of TEP8, not 8: a card of it holds 88.4\u00a0GB of weights and 4.03\u00a0GB of buffers, "
                                    "one of TEP8 58.6\u00a0GB and 403\u00a0MB.")
        assert told.inner_text() == ("Reported: about 5 times. And on TP4 1.63\u00a0million tokens; here they are 5.52\u00a0% more. "
                                     "64.6 more bytes a token and layer would take them away, or 2.72\u00a0GB of each card.")
        fine = laddered.root.locator(".rb-fine").first
        assert marks.count() == 1 and fine.inner_text().startswith("Everything else: 16.3\u00a0% of the card, reasoned: what 1,090,000 tokens")
        laddered.field("untouched").fill("64.6")
        assert told.inner_text() == "Reported: about 5 times. And on TP4 1.63\u00a0million tokens, as here."
        laddered.pick("row", "fp8")
        assert told.inner_text() == "Reported: about 5 times. And on TP4 1.09\u00a0million tokens, from which everything else is solved."
        laddered.pick("weights", "fp8")
        laddered.field("untouched").fill("0")
        assert why.inner_text().startswith("DEP8 caches 6.47 times")
        laddered.pick("beside", "given")
        assert not told.is_visible() and fine.inner_text() == "Everything else: 4.03\u00a0% of the card, as given."
        laddered.pick("beside", "solved")
        assert told.is_visible()
        laddered.pick("card", "H200")
        assert not told.is_visible() and marks.count() == 0 and "assumed" in fine.inner_text()
        laddered.pick("model", "Llama-3.1-8B")
        assert not why.is_visible() and laddered.numbers()[3] == "–"
        assert not watched.wrong


def test_another_model_takes_the_row_and_the_topology_with_it(browser, book, made):  # noqa: F811
    with Watched(browser, 1280) as watched:
        laddered = Laddered(watched.open(book["http"] + "ladder.html"))
        laddered.pick("topology", "DEP8")
        laddered.pick("model", "Llama-3.1-8B")
        assert laddered.numbers() == shown(made(model="Llama-3.1-8B", topology="TP1", kv_cache_dtype="nvfp4"))
        laddered.pick("topology", "TP8")
        laddered.pick("row", "fp8")
        laddered.pick("model", "GLM-5.3")
        assert laddered.numbers() == shown(made(topology="TP8", kv_cache_dtype="fp8"))
        assert not watched.wrong


def test_what_does_not_fit_is_a_sentence_that_names_field_and_remedy(browser, book, made):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "small.html")
        laddered = Laddered(page)
        before = laddered.numbers()
        assert before == shown(made(**SMALL))
        for name, value, text in [
            ("step_tokens", "0", "step_tokens=0: use a whole number from 1 to 65536"),
            ("session_tokens", "2.5", "session_tokens=2.5: use a whole number from 1 to 10000000"),
            ("untouched", "", "untouched: use a number from 0 to 2000"),
            ("hbm_gb", "0", "hbm_gb=0: use a number from 1 to 1000"),
            ("beside_gb", "24", "beside_gb=24: use less than the card has, 24.0 GB"),
        ]:
            good = laddered.field(name).input_value()
            laddered.field(name).fill(value)
            assert (laddered.message(), laddered.numbers()) == (text, ["–"] * 4)
            assert not laddered.root.locator(".rb-drawing").is_visible()
            laddered.field(name).fill(good)
            assert laddered.message() == "" and laddered.numbers() == before
        laddered.field("hbm_gb").fill("0")
        laddered.pick("card", "RTX4090")  # what is wrong with one's own card does not matter on another
        assert laddered.numbers() == shown(made(**{**SMALL, "card": "RTX4090"})) and not laddered.field("hbm_gb").is_visible()
        assert not watched.wrong


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_setting_is_an_address_and_reset_leaves_it(browser, book, made, scheme):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book[scheme] + "ladder.html")
        laddered = Laddered(page)
        laddered.pick("topology", "TP8+DCP4")
        laddered.pick("row", "fp8")
        laddered.field("step_tokens").fill("8192")
        wanted = {f"MemoryLadder.{part}" for part in ("topology=TP8%2BDCP4", "kv_cache_dtype=fp8", "step_tokens=8192")}
        page.wait_for_url(lambda url: set(url.partition("#")[2].split("&")) == wanted)
        state = {"topology": "TP8+DCP4", "kv_cache_dtype": "fp8", "step_tokens": 8192}
        with Watched(browser, 1280) as other:
            shared = Laddered(other.open(page.url))
            assert shared.numbers() == shown(made(**state))
            shared.root.get_by_role("button", name="Reset").click()
            shared.page.wait_for_url(re.compile(r"ladder\.html$"))
            assert shared.numbers() == shown(made()) and not other.wrong
        page.evaluate("location.hash = '#MemoryLadder.topology=DEP8&MemoryLadder.weights=fp8'")
        page.wait_for_function("document.querySelector('.ml input[value=DEP8]').checked")
        assert laddered.numbers() == shown(made(topology="DEP8", weights="fp8"))  # what a link does not name is as made
        for wrong, text in (("card=H300", "card='H300': use one of GB200, B200, H200, H100, RTX4090, own"),
                            ("model=GPT", "model='GPT': use one of GLM-5.3, Llama-3.1-8B"),
                            ("step_tokens=many", "step_tokens=many: use a whole number from 1 to 65536")):
            page.evaluate(f"location.hash = '#MemoryLadder.{wrong}'")
            page.wait_for_function("(text) => document.querySelector('.ml .rb-message').textContent === text", arg=text)
        assert not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book, made):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "ladder.html")
        laddered = Laddered(page)
        live = laddered.root.locator("[aria-live=polite]")
        assert live.inner_text() == "TP4: 52.0\u00a0GB a card for the cache, 4 copies, 1.72\u00a0million tokens, 11 sessions."
        laddered.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        assert laddered.numbers() == shown(made(topology="TP8"))
        assert live.inner_text().startswith("TP8: 107\u00a0GB a card for the cache, 8 copies, 3.55\u00a0million tokens")
        laddered.root.get_by_role("slider", name="Tokens of a step, slider").focus()
        page.keyboard.press("ArrowRight")
        assert laddered.field("step_tokens").input_value() == "4608"
        laddered.root.locator("summary").focus()
        page.keyboard.press("Enter")
        assert laddered.root.locator("tbody tr").first.is_visible()
        laddered.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert laddered.numbers() == shown(made())
        assert unnamed_controls(page, ".ml") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "ladder.html")
        laddered = Laddered(page)
        laddered.root.locator("summary").click()
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == [], "at the source's setting"
        laddered.pick("topology", "TP1")
        assert page.evaluate(AXE) == [], "more than the card has"
        laddered.field("step_tokens").fill("0")
        assert page.evaluate(AXE) == [], "a message"


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "ladder.html")
        colours = """() => ["experts", "buffers", "beside", "cache", "tokens", "reported", "title", "name", "note"]
            .map((kind) => getComputedStyle(document.querySelector(`svg .ml-${kind}`)).fill)"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
        assert page.evaluate("getComputedStyle(document.querySelector('svg .ml-cache')).transitionDuration") == "0s"
