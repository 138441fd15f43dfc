"""The widget Copy count on a built page in a real browser: alive with no kernel, right to the last bit, and usable."""
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from small_book import cell, small_book

from minengine.arithmetic import request_copies, transfer_time_s
from minengine.config import KV_CACHE_LAYOUTS, ConfigError
from minwidgets.copy_count import BYTE_S, COPY_S, COUNTS, SECONDS

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
PAGES = {"copies": "# Copies\n\n" + cell("from minwidgets import CopyCount\n\nCopyCount()"),
         "own": "# Own\n\n" + cell('from minwidgets import CopyCount\n\nCopyCount(byte_s=1e-10, copy_s=2e-6, cost_source="measured here, n=9")')}
# The widget's module and its tables, from the state that is embedded in the page: the very text that readers run.
MODULE = """() => {
    const { state } = JSON.parse(document.querySelector('script[type="application/vnd.jupyter.widget-state+json"]').textContent);
    const widget = Object.values(state).find((entry) => entry.model_module === "anywidget").state;
    const address = URL.createObjectURL(new Blob([widget._esm], { type: "text/javascript" }));
    return import(address).then((module) => { window.tested = module; window.tables = widget.tables; });
}"""
AXE = "axe.run('.cc').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
DEFAULT = {"tokens": 200_000, "num_hidden_layers": 78, "row_bytes": 352, "num_indexer_layers": 0, "indexer_bytes": 132, "block_size": 1024,
           "kv_cache_layout": "LBHNC", "regions_per_layer": 1, "byte_s": BYTE_S, "copy_s": COPY_S}


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    html = small_book(tmp_path_factory.mktemp("copies") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/", "file": f"{html.as_uri()}/chapters/", "folder": html}


def copies_of(state):
    return request_copies(state["kv_cache_layout"], state["tokens"], state["block_size"], state["num_hidden_layers"], state["row_bytes"],
                          state["regions_per_layer"], state["num_indexer_layers"], state["indexer_bytes"])


def random_state(draw):
    """Any state that the traits take, one in four with more planes than layers or with odd halves."""
    state = {name: draw.choice((least, most, draw.randint(least, most), draw.randint(least, min(most, least + 100)))) for name, (least, most) in COUNTS.items()}
    state |= {name: draw.choice((least, most, 10 ** draw.uniform(-13, -6))) for name, (least, most) in SECONDS.items()}
    state |= {"kv_cache_layout": draw.choice(KV_CACHE_LAYOUTS), "regions_per_layer": draw.choice((1, 2))}
    return {**state, "num_indexer_layers": draw.randint(0, state["num_hidden_layers"])} if draw.random() < 0.75 else state


def in_units(value, units):
    unit = 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    exact = unit == 0 and value == int(value)
    text = f"{round(value):,}" if exact or value >= 999.5 else f"{value:#.3g}".rstrip(".")
    return f"{text}\u00a0{units[unit]}"


def shown(**changes):
    """The four numbers of a state as the page writes them."""
    state = {**DEFAULT, **changes}
    found = copies_of(state)
    return [f"{found.count:,}", *(in_units(amount, ["bytes", "kB", "MB", "GB", "TB"]) for amount in (found.piece_bytes, found.nbytes)),
            in_units(1e9 * transfer_time_s(found.nbytes, found.count, state["byte_s"], state["copy_s"]), ["ns", "µs", "ms", "s"])]


class Copying:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".cc")

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def pick(self, group, value):
        self.root.locator(f"input[type=radio][id$='-{group}-{value}']").check()

    def numbers(self):
        return self.root.locator(".rb-stat").all_inner_texts()

    def message(self):
        return self.root.locator(".rb-message").inner_text()


CLASHES = """() => {
    const room = document.querySelector(".cc").getBoundingClientRect();
    const boxes = [...document.querySelectorAll(".cc svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const apart = (one, other) => one.right <= other.left || other.right <= one.left || one.bottom <= other.top || other.bottom <= one.top;
    return [boxes.filter(([, box]) => box.left < room.left || box.right > room.right).map(([text]) => text),
            boxes.filter(([, one], i) => boxes.slice(i + 1).some(([, other]) => !apart(one, other))).map(([text]) => text)];
}"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_alive_with_no_kernel_and_no_other_host(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        page = watched.open(book[scheme] + "copies.html")
        copying = Copying(page)
        assert page.locator(".minwidget[data-state=alive] .cc svg rect").count() >= 12
        assert copying.numbers() == shown() == ["15,288", "360\u00a0kB", "5.51\u00a0GB", "173\u00a0ms"]
        assert "Copy count: 200,000 tokens" not in page.locator(".minwidget").inner_text()  # the words for a page without scripts are gone
        copying.root.locator("summary").click()
        for choice, value in (("regions", 2), ("planes", 21), ("layout", "BHLNC")):
            assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
            assert page.evaluate(CLASHES) == [[], []], (choice, value)
            copying.pick(choice, value)
        assert copying.numbers()[:2] == ["196", in_units(1024 * (78 * 352 + 21 * 132), ["bytes", "kB", "MB"])]
        assert page.evaluate(CLASHES) == [[], []] and not watched.wrong


def test_words_stand_in_for_scripts(book):
    assert "<p>Copy count: 200,000 tokens, 78 layers, LBHNC" in (book["folder"] / "chapters/copies.html").read_text(encoding="utf8")


def test_numbers_equal_arithmetics_over_random_states(browser, book):  # noqa: F811
    draw = random.Random(51)
    states = [random_state(draw) for _ in range(2000)]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "copies.html")
        page.evaluate(MODULE)
        found = page.evaluate("""(states) => states.map((state) => {
            try {
                const it = tested.numbers(state, tables);
                return [["blocks", "regions", "count", "piece_bytes", "indexer_piece_bytes", "nbytes", "used_bytes", "time_s"].map((name) => it[name]),
                        it.compared.map((one) => [one.kv_cache_layout, one.block_size, one.set, one.count, one.time_s])];
            } catch (error) {
                return error.message;
            }
        })""", states)
    refused = 0
    for state, theirs in zip(states, found, strict=True):
        try:
            ours = copies_of(state)
            settings = {setting: copies_of({**state, "kv_cache_layout": setting[0], "block_size": setting[1]})
                        for setting in dict.fromkeys([("LBHNC", 1024), ("BLHNC", 64), (state["kv_cache_layout"], state["block_size"])])}
        except ConfigError as error:
            assert theirs == str(error), state
            refused += 1
            continue
        times = {setting: transfer_time_s(it.nbytes, it.count, state["byte_s"], state["copy_s"]) for setting, it in settings.items()}
        now = (state["kv_cache_layout"], state["block_size"])
        assert theirs == [[ours.blocks, ours.regions, ours.count, ours.piece_bytes, ours.indexer_piece_bytes, ours.nbytes, ours.used_bytes, times[now]],
                          [[*setting, setting == now, it.count, times[setting]] for setting, it in settings.items()]], state
    assert 200 < refused < 1000


def test_the_page_shows_and_draws_what_was_set(browser, book):  # noqa: F811
    draw = random.Random(52)
    with Watched(browser, 1280, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "copies.html")
        copying = Copying(page)
        for _ in range(25):
            changes = {"tokens": draw.randint(1, 10**7), "num_hidden_layers": draw.randint(21, 1000), "block_size": draw.randint(1, 65_536),
                       "row_bytes": 2 * draw.randint(1, 8_192), "kv_cache_layout": draw.choice(KV_CACHE_LAYOUTS), "regions_per_layer": draw.choice((1, 2)),
                       "num_indexer_layers": draw.choice((0, 21))}
            copying.pick("layout", changes["kv_cache_layout"])
            copying.pick("regions", changes["regions_per_layer"])
            copying.pick("planes", changes["num_indexer_layers"])
            for name in ("tokens", "num_hidden_layers", "block_size", "row_bytes"):
                copying.field(name).fill(str(changes[name]))
            rate, us = draw.choice((0.5, 48.31, 900)), draw.choice((0, 0.25, 3.5))
            copying.field("byte_s").fill(str(rate))
            copying.field("copy_s").fill(str(us))
            changes |= {"byte_s": 1e-9 / rate, "copy_s": us / 1e6}
            assert copying.numbers() == shown(**changes), changes
            assert copying.field("byte_s").input_value() == str(rate)  # as it was typed
            assert "as set here" in copying.root.locator(".rb-fine").first.inner_text() and copying.message() == ""
            bars = page.evaluate("""() => ["bytes", "copies"].map((kind) =>
                [...document.querySelectorAll(`.cc svg .cc-${kind}`)].map((bar) => bar.getBBox().width))""")
            room = (page.evaluate("document.querySelector('.cc svg').viewBox.baseVal.width") - 44) / 2
            settings = dict.fromkeys([("LBHNC", 1024), ("BLHNC", 64), (changes["kv_cache_layout"], changes["block_size"])])
            found = [copies_of({**DEFAULT, **changes, "kv_cache_layout": layout, "block_size": size}) for layout, size in settings]
            scale = room / max(it.nbytes * changes["byte_s"] + it.count * changes["copy_s"] for it in found)
            assert bars == [pytest.approx([it.nbytes * changes["byte_s"] * scale for it in found], abs=0.1),
                            pytest.approx([it.count * changes["copy_s"] * scale for it in found], abs=0.1)]
            whole = changes["kv_cache_layout"][0] == "B"
            assert copying.root.locator("svg .cc-whole").count() == whole  # one piece, outlined
            if not whole:  # two or three of the layers, the last, and of the indexer's planes the first and the last
                lanes = 3 if changes["num_indexer_layers"] else 4
                assert copying.root.locator("svg .cc-rows").count() == lanes * changes["regions_per_layer"]
                assert copying.root.locator("svg .cc-keys").count() == (2 if changes["num_indexer_layers"] else 0)
        assert not watched.wrong


def test_whose_costs_they_are_is_said(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        for name, text in (("copies", "48.3 GB/s and 3.86 µs a copy: reasoned: what the source’s two reported transfers (19,559 descriptors in 146 ms, 1,940 in 78 ms) imply"),
                           ("own", "10 GB/s and 2 µs a copy: measured here, n=9.")):
            copying = Copying(watched.open(book["http"] + name + ".html"))
            source = copying.root.locator(".rb-fine").first
            assert source.inner_text().startswith(text)
            copying.field("copy_s").fill("7")
            assert source.inner_text().endswith(" GB/s and 7 µs a copy: as set here.")
            copying.root.get_by_role("button", name="Reset").click()
            assert source.inner_text().startswith(text)
        assert not watched.wrong


def test_what_does_not_fit_is_a_sentence_that_names_field_and_remedy(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        copying = Copying(watched.open(book["http"] + "copies.html"))
        copying.pick("planes", 21)
        before = copying.numbers()
        for name, value, text in [
            ("tokens", "0", "tokens=0: use a whole number from 1 to 10000000"),
            ("block_size", "2.5", "block_size=2.5: use a whole number from 1 to 65536"),
            ("row_bytes", "", "row_bytes: use a whole number from 1 to 16384"),
            ("num_hidden_layers", "12", "num_indexer_layers=21: use at most num_hidden_layers, 12"),
            ("byte_s", "0", "Bandwidth, GB/s (0): use a number from 0.001 to 1000000"),
            ("copy_s", "-1", "Cost of a copy, µs (-1): use a number from 0 to 1000000"),
            ("copy_s", "", "Cost of a copy, µs: use a number from 0 to 1000000"),
        ]:
            good = copying.field(name).input_value()
            copying.field(name).fill(value)
            assert (copying.message(), copying.numbers()) == (text, ["–"] * 4)
            assert not copying.root.locator(".rb-drawing").is_visible()
            copying.field(name).fill(good)
            assert copying.message() == "" and copying.numbers() == before
        assert not watched.wrong


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_setting_is_an_address_and_reset_leaves_it(browser, book, scheme):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book[scheme] + "copies.html")
        copying = Copying(page)
        copying.pick("layout", "BLHNC")
        copying.field("block_size").fill("64")
        copying.pick("regions", 2)
        wanted = {f"CopyCount.{part}" for part in ("kv_cache_layout=BLHNC", "block_size=64", "regions_per_layer=2")}
        page.wait_for_url(lambda url: set(url.partition("#")[2].split("&")) == wanted)
        changes = {"kv_cache_layout": "BLHNC", "block_size": 64, "regions_per_layer": 2}
        with Watched(browser, 1280) as other:
            shared = Copying(other.open(page.url))
            assert shared.numbers() == shown(**changes)
            shared.root.get_by_role("button", name="Reset").click()
            shared.page.wait_for_url(re.compile(r"copies\.html$"))
            assert shared.numbers() == shown() and not other.wrong
        page.evaluate("location.hash = '#CopyCount.copy_s=1e-6&CopyCount.tokens=5000'")
        page.wait_for_function("document.querySelector('.cc input[id$=-tokens]').value === '5000'")
        assert copying.numbers() == shown(tokens=5000, copy_s=1e-6) and copying.field("copy_s").input_value() == "1"
        for wrong, text in (("kv_cache_layout=HND", "kv_cache_layout='HND': use one of LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC"),
                            ("regions_per_layer=3", "regions_per_layer=3: use one of 1, 2"), ("byte_s=much", "byte_s=much: use seconds from 1e-15 to 0.000001")):
            page.evaluate(f"location.hash = '#CopyCount.{wrong}'")
            page.wait_for_function("(text) => document.querySelector('.cc .rb-message').textContent === text", arg=text)
        assert not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "copies.html")
        copying = Copying(page)
        live = copying.root.locator("[aria-live=polite]")
        assert live.inner_text() == "15,288 copies of 360\u00a0kB, 5.51\u00a0GB in all, about 173\u00a0ms."
        copying.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Tab")
        for _ in range(3):
            page.keyboard.press("ArrowRight")  # to the first block-major order
        assert copying.numbers() == shown(kv_cache_layout="BLHNC") and live.inner_text().startswith("196 copies of 28.1\u00a0MB")
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        assert copying.numbers() == shown(kv_cache_layout="BLHNC", regions_per_layer=2, num_indexer_layers=21)
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowUp")
        assert copying.field("tokens").input_value() == "200001"
        copying.root.get_by_role("slider", name="Tokens of a block, slider").focus()
        page.keyboard.press("ArrowLeft")
        assert copying.field("block_size").input_value() == "1008"
        copying.root.locator("summary").focus()
        page.keyboard.press("Enter")
        rows = copying.root.locator("tbody tr").all_inner_texts()
        assert [row.split("\t")[:2] for row in rows] == [["LBHNC", "1,024"], ["BLHNC", "64"], ["BLHNC", "1,008"]]
        copying.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert copying.numbers() == shown()
        assert unnamed_controls(page, ".cc") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "copies.html")
        copying = Copying(page)
        copying.root.locator("summary").click()
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == [], "layer-major"
        copying.pick("layout", "BLNHC")
        copying.pick("planes", 21)
        assert page.evaluate(AXE) == [], "block-major"
        copying.field("tokens").fill("0")
        assert page.evaluate(AXE) == [], "a message"


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "copies.html")
        Copying(page).pick("planes", 21)
        colours = """() => ["rows", "keys", "bytes", "copies", "lane", "title", "name", "note"].map((kind) => getComputedStyle(document.querySelector(`svg .cc-${kind}`)).fill)"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
        assert page.evaluate("getComputedStyle(document.querySelector('svg .cc-rows')).transitionDuration") == "0s"
