"""Widgets on a built page in a real browser, with no kernel and no other host: alive, right to the integer, and usable."""
import json
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from row_cases import DEFAULTS, HEADS, LATENT, LLAMA, expected, expected_of_config, plain, random_config, random_state, shown
from small_book import cell, small_book

from minengine.arithmetic import GLM_5_3
from minengine.config import HEAD_DTYPES, LATENT_DTYPES

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
PAGES = {
    "row": "# A row\n\n" + cell("from minwidgets import RowBytes\n\nRowBytes()"),
    "plain": "# Plain\n\n" + cell("print(1)"),
    "several": "# Several\n\n" + cell("from minwidgets import RowBytes\n\nRowBytes()") + "\n## Below\n\n" + cell(
        'first = RowBytes(attention="gqa", kv_cache_dtype="q8_0", tokens=1000, model_name="Mine")\nfirst') + "\n" + cell("first") + "\n"
        + cell("import ipywidgets\n\nipywidgets.IntSlider()"),
}
# The widget's module, from the state that is embedded in the page: the very text that readers run.
MODULE = """() => {
    const { state } = JSON.parse(document.querySelector('script[type="application/vnd.jupyter.widget-state+json"]').textContent);
    const text = Object.values(state).find((entry) => entry.model_module === "anywidget").state._esm;
    const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    return import(address).then((module) => { window.tested = module; });
}"""

DRAWN = "[...document.querySelectorAll('.rb-part:not(.rb-faint)')].map((part) => [part.getBBox().x, part.getBBox().width])"
# Of the chapter's own part of the page: what the theme lays around it is the site's matter.
AXE = "axe.run('.bd-article').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    """A small book with widgets, built as the real one is: its address on a server, and as files."""
    html = small_book(tmp_path_factory.mktemp("widgets") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/", "file": f"{html.as_uri()}/chapters/", "folder": html}


class Widget:
    """One widget of a page, by what a reader sees and touches."""

    def __init__(self, page, nth=0):
        self.page, self.root = page, page.locator(".rb").nth(nth)

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def pick(self, value):
        self.root.locator(f"input[type=radio][value={value}]").check()

    def set(self, name, value):
        self.field(name).fill(repr(value / 1e9) if name == "kv_cache_memory_bytes" else str(value))

    def numbers(self):
        """(bytes a row, a token, a session, sessions held) as shown; None where there is none."""
        values, details = self.root.locator(".rb-stat").all_inner_texts(), self.root.locator(".rb-detail").all_inner_texts()
        shown = [values[0], values[1], re.match(r"[\d,]*", details[2])[0], values[3]]
        return [int(text.replace(",", "")) if text[:1].isdigit() else None for text in shown]

    def message(self):
        return self.root.locator(".rb-message").inner_text()


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_alive_with_no_kernel_and_no_other_host(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        page = watched.open(book[scheme] + "row.html")
        assert page.locator(".minwidget[data-state=alive] .rb svg rect").count() >= 5
        assert Widget(page).numbers() == shown({**DEFAULTS, "kv_cache_dtype": "nvfp4_fp8_ds_mla"})
        assert "KV row bytes: GLM-5.3" not in page.locator(".minwidget").inner_text()  # the words for a page without scripts are gone
        page.locator("summary").click()
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
        labels = page.evaluate("""() => [...document.querySelectorAll(".rb svg text")].map((text) => text.getBoundingClientRect())
            .filter((box) => box.left < 0 || box.right > document.documentElement.clientWidth).length""")
        assert labels == 0
        assert not watched.wrong


def test_the_host_is_on_pages_with_a_widget_only_and_words_stand_in_for_scripts(book):
    texts = {name: (book["folder"] / f"chapters/{name}.html").read_text() for name in PAGES}
    assert {name: "widgets.js" in text for name, text in texts.items()} == {"row": True, "several": True, "plain": False}
    assert "<p>KV row bytes: GLM-5.3 in nvfp4_fp8_ds_mla: 352 bytes a row" in texts["row"]
    for text in texts.values():
        assert "require" not in re.sub(r"<script type=.application/vnd.*?</script>", "", text, flags=re.DOTALL) and "cdn" not in text


def test_a_model_that_needs_a_kernel_says_so_and_two_views_share_their_model(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "several.html")
        assert [place.get_attribute("data-state") for place in page.locator(".minwidget").all()] == ["alive", "alive", "alive", "failed"]
        assert "cannot be shown without a kernel (@jupyter-widgets/controls IntSliderModel" in page.locator(".minwidget-note").inner_text()
        first, second, again = (Widget(page, nth) for nth in range(3))
        before = first.numbers()
        second.set("head_dim", 64)
        wanted = shown({**DEFAULTS, "attention": "gqa", "kv_cache_dtype": "q8_0", "head_dim": 64, "tokens": 1000})
        assert second.numbers() == again.numbers() == wanted
        assert first.numbers() == before
        ids = page.evaluate("[...document.querySelectorAll('.rb [id]')].map((node) => node.id)")
        assert len(set(ids)) == len(ids)
        assert not watched.wrong


def test_numbers_equal_arithmetics_over_random_states(browser, book):  # noqa: F811
    draw = random.Random(20)
    states = [random_state(draw) for _ in range(2500)]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "row.html")
        page.evaluate(MODULE)
        found = page.evaluate("""(states) => states.map((state) => {
            try {
                const it = tested.numbers(state);
                const counts = [it.row, it.indexer, it.token, it.session, it.held, it.sessions];
                return [it.parts.map(({ name, bytes }) => [name, bytes]), ...counts.map(String)];
            } catch (error) {
                return error.message;
            }
        })""", states)
    found = [value if isinstance(value, str) else [value[0], *map(int, value[1:])] for value in found]
    wanted = [expected(state) for state in states]
    assert sum(isinstance(value, str) for value in wanted) > 200 and sum(not isinstance(value, str) and value[4] > 2**53 for value in wanted) > 200
    for state, ours, theirs in zip(states, wanted, found, strict=True):
        assert theirs == ours, state


def test_configs_mean_what_they_mean_to_kv_row(browser, book):  # noqa: F811
    draw = random.Random(21)
    configs = [random_config(draw) for _ in range(1500)] + [GLM_5_3 | {}, LLAMA]
    cases = [(config, draw.choice((LATENT_DTYPES if "kv_lora_rank" in config else HEAD_DTYPES) + ("nvfp4",))) for config in configs]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "row.html")
        page.evaluate(MODULE)
        found = page.evaluate("""([cases, defaults]) => cases.map(([config, kv_cache_dtype]) => {
            try {
                const state = { ...defaults, ...tested.fromConfig(config), kv_cache_dtype };
                const it = tested.numbers(state);
                const latent = state.attention === "mla";
                return [it.parts.map(({ name, bytes }) => [name, bytes]), state.num_hidden_layers, latent ? 1 : state.num_key_value_heads,
                        Number(it.indexer), latent ? state.num_indexer_layers : 0, Number(it.token)];
            } catch (error) {
                return error.message;
            }
        })""", [cases, DEFAULTS])
    wanted = [expected_of_config(*case) for case in cases]
    assert 200 < sum(isinstance(value, str) for value in wanted) < 1200
    for case, ours, theirs in zip(cases, wanted, found, strict=True):
        assert theirs == ours, case


def test_the_page_shows_the_numbers_of_what_was_set(browser, book):  # noqa: F811
    draw = random.Random(22)
    with Watched(browser, 1280, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "row.html")
        widget = Widget(page)
        for _ in range(40):
            state = random_state(draw)
            state["kv_cache_dtype"] = draw.choice(LATENT_DTYPES if state["attention"] == "mla" else HEAD_DTYPES)
            state["kv_cache_memory_bytes"] = 10**6 * draw.randint(1, 10**6)  # GB with digits that a reader would type
            widget.pick(state["attention"])
            widget.pick(state["kv_cache_dtype"])
            for name in (*(LATENT if state["attention"] == "mla" else HEADS), "tokens", "kv_cache_memory_bytes"):
                widget.set(name, state[name])
            assert widget.numbers() == shown(state), state
            wanted = expected(state)
            if isinstance(wanted, str):
                assert widget.message() == wanted
            else:
                boxes = sorted(page.evaluate(DRAWN))
                start, scale = 0, page.evaluate("document.querySelector('.rb svg').viewBox.baseVal.width") / max(wanted[1], plain(state))
                for (left, width), (_, nbytes) in zip(boxes, wanted[0], strict=True):
                    assert abs(left - start * scale) < 0.1 and abs(width - max(nbytes * scale, 0.75)) < 0.1, (boxes, wanted[0])
                    start += nbytes
        assert not watched.wrong


def test_what_does_not_fit_is_a_sentence_that_names_field_and_remedy(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "row.html")
        widget = Widget(page)
        for name, value, text in [
            ("kv_lora_rank", "500", "kv_lora_rank=500: latent rows need a positive multiple of 16"),
            ("tokens", "-3", "tokens=-3: use a whole number from 1 to 1000000000"),
            ("num_hidden_layers", "1.5", "num_hidden_layers=1.5: use a whole number from 1 to 10000"),
            ("num_hidden_layers", "20", "num_indexer_layers=21: use at most num_hidden_layers, 20"),
            ("qk_rope_head_dim", "", "qk_rope_head_dim: use a whole number from 1 to 65536"),
        ]:
            good = widget.field(name).input_value()
            widget.field(name).fill(value)
            assert (widget.message(), widget.numbers()) == (text, [None] * 4)
            assert not page.locator(".rb-drawing").is_visible()
            widget.field(name).fill(good)
            assert widget.message() == "" and widget.numbers()[0] == 352
        assert not watched.wrong


def test_a_pasted_config_sets_the_controls_and_a_bad_one_changes_nothing(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "row.html")
        widget = Widget(page)
        page.locator("summary").click()
        box, said = page.locator("textarea"), page.locator(".rb-said")

        def paste(text):
            box.fill(text)
            page.get_by_role("button", name="Show its row").click()

        paste(json.dumps(LLAMA))
        assert said.inner_text() == "Read LlamaForCausalLM: Grouped heads, 32 layers."
        assert "LlamaForCausalLM" in page.locator(".rb-heading").inner_text()
        llama = {**DEFAULTS, "attention": "gqa", "kv_cache_dtype": "nvfp4", "num_hidden_layers": 32}  # the closest that heads have to GLM's four bits
        assert widget.numbers() == shown(llama)
        for text, remedy in [
            ("", "this is not JSON"), ('{"num_hidden_layers": 3', "paste the whole file, from { to }"), ("[1]", "paste one JSON object, from { to }"),
            (json.dumps({**LLAMA, "num_hidden_layers": None}), "field 'num_hidden_layers' is missing"),
            (json.dumps({**LLAMA, "head_dim": 72}), "head_dim=72: kv_cache_dtype='nvfp4' needs a positive multiple of 16"),
            (json.dumps({**LLAMA, "num_hidden_layers": 20_000}), "num_hidden_layers=20000: use a whole number from 1 to 10000"),
        ]:
            paste(text)
            assert remedy in said.inner_text() and said.inner_text().endswith("Nothing was changed.")
            assert widget.numbers() == shown(llama) and "LlamaForCausalLM" in page.locator(".rb-heading").inner_text()
        paste(json.dumps({**GLM_5_3, "model_type": "glm_moe_dsa"}))
        assert "glm_moe_dsa" in page.locator(".rb-heading").inner_text()
        assert widget.numbers() == shown({**DEFAULTS, "kv_cache_dtype": "nvfp4_fp8_ds_mla"})
        box.fill("")
        box.focus()
        page.evaluate("document.execCommand('insertText', false, 'x')")  # typing is left alone until the button
        assert "glm_moe_dsa" in said.inner_text()
        assert not watched.wrong


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_setting_is_an_address_and_reset_leaves_it(browser, book, scheme):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book[scheme] + "several.html")
        assert "#" not in page.url
        first, second = Widget(page, 0), Widget(page, 1)
        first.pick("fp8")
        second.set("tokens", 2000)
        page.wait_for_url(re.compile(r"#RowBytes\.kv_cache_dtype=fp8&RowBytes-2\.tokens=2000$"))
        address, numbers = page.url, [first.numbers(), second.numbers()]
        assert numbers == [shown(DEFAULTS), shown({**DEFAULTS, "attention": "gqa", "kv_cache_dtype": "q8_0", "tokens": 2000})]

        with Watched(browser, 1280) as other:
            shared = other.open(address)
            assert [Widget(shared, nth).numbers() for nth in range(2)] == numbers
            assert Widget(shared, 0).root.locator("input[value=fp8]").is_checked() and Widget(shared, 1).field("tokens").input_value() == "2000"
            for nth in (0, 1):  # back to what the author made, not to what the address said
                Widget(shared, nth).root.get_by_role("button", name="Reset").click()
            shared.wait_for_url(re.compile(r"several\.html$"))
            assert Widget(shared, 0).numbers() == shown({**DEFAULTS, "kv_cache_dtype": "nvfp4_fp8_ds_mla"})
            assert Widget(shared, 1).field("tokens").input_value() == "1000" and "Mine" in Widget(shared, 1).root.inner_text()
            assert not other.wrong

        page.evaluate("location.hash = '#RowBytes.tokens=5'")  # a link on the page itself
        page.wait_for_function("document.querySelector('.rb input[id$=-tokens]').value === '5'")
        assert first.root.locator("input[value=nvfp4_fp8_ds_mla]").is_checked()  # what a link does not name is as made
        page.evaluate("location.hash = '#RowBytes.tokens=many&RowBytes.attention=mqa'")
        page.wait_for_function("document.querySelector('.rb .rb-message').textContent === \"attention='mqa': use one of mla, gqa\"")
        page.evaluate("location.hash = '#below'")
        assert not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "row.html")
        widget = Widget(page)
        live = widget.root.locator("[aria-live=polite]")
        assert live.inner_text() == "352 bytes a row, 30,228 a token, 4.41 GB a session, 11 sessions held."
        widget.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")  # from the kind of attention to the formats
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert live.inner_text() == "576 bytes a row, 47,700 a token, 6.96 GB a session, 7 sessions held."
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowUp")
        assert widget.field("kv_lora_rank").input_value() == "528" and widget.numbers()[0] == 592
        widget.root.get_by_role("slider", name="Tokens in a session, slider").focus()
        page.keyboard.press("ArrowRight")
        assert widget.field("tokens").input_value() == "147000"
        widget.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert widget.numbers() == shown({**DEFAULTS, "kv_cache_dtype": "nvfp4_fp8_ds_mla"})
        assert unnamed_controls(page, ".rb") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "row.html")
        page.locator("summary").click()
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        for state in ("numbers", "message"):
            assert page.evaluate(AXE) == [], state
            Widget(page).field("kv_lora_rank").fill("500")


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "row.html")
        colours = """() => [getComputedStyle(document.querySelector(".rb")).color,
            getComputedStyle(document.querySelector(".rb-latent:not(.rb-faint)")).fill]"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
        assert page.evaluate("getComputedStyle(document.querySelector('.rb-part')).transitionDuration") == "0s"
