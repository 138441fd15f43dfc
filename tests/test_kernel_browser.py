"""The widget Kernel floor on a built page in a real browser: alive with no kernel, right to the last bit, and usable."""
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from small_book import cell, small_book

from minengine.arithmetic import CARDS, DECODE_ROWS, Card, decode_floor

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
PAGES = {"kernel": "# A kernel\n\n" + cell("from minwidgets import KernelFloor\n\nKernelFloor()"),
         "own": "# Own\n\n" + cell('from minwidgets import KernelFloor\n\nKernelFloor(card="own", memory_tb_s=4.2, matrix_tflop_s=700, heads=64)')}
# The widget's module and its tables, from the state that is embedded in the page: the very text that readers run.
MODULE = """() => {
    const { state } = JSON.parse(document.querySelector('script[type="application/vnd.jupyter.widget-state+json"]').textContent);
    const widget = Object.values(state).find((entry) => entry.model_module === "anywidget").state;
    const address = URL.createObjectURL(new Blob([widget._esm], { type: "text/javascript" }));
    return import(address).then((module) => { window.tested = module; window.tables = widget.tables; });
}"""
AXE = "axe.run('.kf').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
# Of each bar: its path's place, its kind, its left edge and its width.
BARS = """() => [...document.querySelectorAll(".kf svg rect")].map((bar) => [bar.classList[bar.classList.length - 1].slice(3), bar.getBBox()])
    .map(([kind, box]) => [Math.floor((box.y - 20) / 46), kind, box.x, box.width])"""
DEFAULT = {"query_tokens": 15, "heads": 16, "top_k": 2048, "fill": 1, "card": "GB200", "memory_tb_s": 1, "matrix_tflop_s": 100}
NAMES = {"native": "native", "staged": "staged", "fp8": "fp8", "bfloat16": "16-bit"}


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    html = small_book(tmp_path_factory.mktemp("kernel") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/", "file": f"{html.as_uri()}/chapters/", "folder": html}


def floors(state):
    own = Card("your own card", 1e12 * state["memory_tb_s"], 1e12 * state["matrix_tflop_s"], "given")
    card = own if state["card"] == "own" else CARDS[state["card"]]
    return {path: decode_floor(path, card, *(state[name] for name in ("query_tokens", "heads", "top_k", "fill"))) for path in DECODE_ROWS}


def in_units(value, units):
    unit = 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    exact = unit == 0 and value == int(value)
    text = f"{round(value):,}" if exact or value >= 999.5 else f"{value:#.3g}".rstrip(".")
    return f"{text}\u00a0{units[unit]}"


def spoken(seconds):
    return in_units(1e9 * seconds, ["ns", "µs", "ms", "s"])


def random_state(draw):
    """Any state that the traits take."""
    return {
        "query_tokens": draw.choice([1, 15, 65536, draw.randint(1, 65536)]), "heads": draw.choice([1, 16, 64, 512, draw.randint(1, 512)]),
        "top_k": draw.choice([1, 2048, 65536, draw.randint(1, 65536)]), "fill": draw.choice([0, 1, 0.5, draw.random()]),
        "card": draw.choice([*CARDS, "own"]), "memory_tb_s": draw.choice([0.001, 1000, 4.2, 10 ** draw.uniform(-3, 3)]),
        "matrix_tflop_s": draw.choice([0.001, 100_000, 989.5, 10 ** draw.uniform(-3, 5)]),
    }


class Kernel:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".kf")

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def pick(self, card):
        self.root.locator(f"input[type=radio][value={card}]").check()

    def times(self):
        return self.root.locator(".rb-stat").all_inner_texts()

    def message(self):
        return self.root.locator(".rb-message").inner_text()


def drawn(wanted, page):
    """Where each bar must stand, as BARS has it, from the floors of the paths."""
    half = (page.evaluate("document.querySelector('.kf svg').viewBox.baseVal.width") - 40) / 2  # two panels side by side
    a_byte, a_second = half / max(floor.nbytes for floor in wanted.values()), half / max(floor.time_s for floor in wanted.values())
    bars = []
    for place, floor in enumerate(wanted.values()):
        left = 0
        for kind, parts in (("rows", ["rows"]), ("copy_written", ["copy_written"]), ("copy_read", ["copy_read"]), ("io", ["queries", "outputs", "slots"])):
            nbytes = sum(launch.parts.get(part, 0) for launch in floor.launches for part in parts)
            bars.append([place, kind, left * a_byte, nbytes * a_byte])
            left += nbytes
        start = 0
        for bound in floor.rooflines:
            bars += [[place, kind, half + 40 + start * a_second, time_s * a_second] for kind, time_s in (("memory", bound.memory_s), ("compute", bound.compute_s))]
            start += bound.time_s
            bars.append([place, "floor", half + 40 + start * a_second - 1, 2])
    return bars


def shown(state):
    return [spoken(floor.time_s) for floor in floors(state).values()]


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_alive_with_no_kernel_and_no_other_host(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        page = watched.open(book[scheme] + "kernel.html")
        kernel = Kernel(page)
        assert page.locator(".minwidget[data-state=alive] .kf svg rect").count() > 15
        assert kernel.times() == shown(DEFAULT) == ["1.43\u00a0µs", "5.87\u00a0µs", "2.29\u00a0µs", "4.50\u00a0µs"]
        assert "Kernel floor:" not in page.locator(".minwidget").inner_text()  # the words for a page without scripts are gone
        kernel.root.locator("summary").click()
        for heads in (16, 72):  # at 72 the words beside staged are longest
            kernel.field("heads").fill(str(heads))
            assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
            clashes = page.evaluate("""() => {
                const room = document.querySelector(".kf").getBoundingClientRect();
                const boxes = [...document.querySelectorAll(".kf svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
                const apart = (one, other) => one.right <= other.left || other.right <= one.left || one.bottom <= other.top || other.bottom <= one.top;
                return [boxes.filter(([, box]) => box.left < room.left || box.right > room.right).map(([text]) => text),
                        boxes.filter(([, one], i) => boxes.slice(i + 1).some(([, other]) => !apart(one, other))).map(([text]) => text)];
            }""")
            assert clashes == [[], []]
        assert not watched.wrong


def test_words_stand_in_for_scripts(book):
    assert "<p>Kernel floor: one launch of 15 queries, 16 heads" in (book["folder"] / "chapters/kernel.html").read_text(encoding="utf8")


def test_numbers_equal_arithmetics_over_random_states(browser, book):  # noqa: F811
    draw = random.Random(41)
    states = [random_state(draw) for _ in range(1200)]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "kernel.html")
        page.evaluate(MODULE)
        found = page.evaluate("""(states) => states.map((state) => {
            const mixed = (_, it) => (it !== null && typeof it === "object" && !Array.isArray(it) ? Object.fromEntries(Object.entries(it).sort()) : it);
            const { paths, balance } = tested.numbers(state, JSON.parse(JSON.stringify(tables, mixed))); // as a stored notebook has them
            return [balance, paths.map(({ path, launches, nbytes, flops, time_s }) => [path, nbytes, flops, time_s, launches.map((one) =>
                [one.name, Object.entries(one.parts), one.flops, one.memory_s, one.compute_s, one.bound])])];
        })""", states)
    bounds = set()
    for state, (balance, theirs) in zip(states, found, strict=True):
        ours = floors(state)
        peaks = CARDS.get(state["card"]) or Card("", 1e12 * state["memory_tb_s"], 1e12 * state["matrix_tflop_s"], "")
        assert balance == peaks.flops_per_byte
        assert theirs == [[path, floor.nbytes, floor.flops, floor.time_s, [
            [launch.name, list(map(list, launch.parts.items())), launch.flops, bound.memory_s, bound.compute_s, bound.bound]
            for launch, bound in zip(floor.launches, floor.rooflines, strict=True)]] for path, floor in ours.items()], state
        bounds |= {floor.bounds for floor in ours.values()}
    assert bounds == {("memory",), ("compute",), ("memory", "memory"), ("memory", "compute")}


def test_the_page_shows_and_draws_what_was_set(browser, book):  # noqa: F811
    draw = random.Random(42)
    with Watched(browser, 1280, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "kernel.html")
        kernel = Kernel(page)
        for _ in range(25):
            state = random_state(draw)
            kernel.pick(state["card"])
            for name in ("query_tokens", "heads", "top_k", "fill", *(("memory_tb_s", "matrix_tflop_s") if state["card"] == "own" else ())):
                kernel.field(name).fill(repr(state[name]))
            wanted = floors(state)
            assert kernel.times() == [spoken(floor.time_s) for floor in wanted.values()], state
            assert kernel.message() == ""
            if state != {**state, "query_tokens": 15, "heads": 16, "top_k": 2048, "fill": 1, "card": "GB200"}:  # there reported times set the scale
                found, ours = (sorted(bar for bar in bars if bar[3] > 0.2) for bars in (page.evaluate(BARS), drawn(wanted, page)))
                assert [bar[:2] for bar in found] == [bar[:2] for bar in ours], state
                assert [edge for bar in found for edge in bar[2:]] == pytest.approx([edge for bar in ours for edge in bar[2:]], abs=0.1), state
        kernel.root.locator("summary").click()
        rows = kernel.root.locator("tbody tr").all_inner_texts()
        assert [row.split("\t")[:2] for row in rows] == [["native", "attention"], ["staged", "unpack"], ["staged", "attention"], ["fp8", "attention"],
                                                          ["16-bit", "attention"]]
        launches = [launch for floor in wanted.values() for launch in floor.launches]
        assert [row.split("\t")[6:8] for row in rows] == [[f"{one.nbytes:,}", f"{one.flops:,}"] for one in launches]
        assert not watched.wrong


def test_reported_times_stand_at_their_setting_only(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "kernel.html")
        kernel = Kernel(page)
        told, marks = kernel.root.locator(".kf-theirs"), kernel.root.locator("path.kf-reported")
        for path, us, share in (("native", "12.0", "11.9"), ("staged", "17.7", "33.2"), ("fp8", "13.7", "16.7")):
            assert f"{path} {us}\u00a0µs, of which the floor is {share}\u00a0%" in told.inner_text()
            assert float(share) == round(100 * 1e6 * floors(DEFAULT)[path].time_s / float(us), 1)
        assert marks.count() == 3 and "memory decides" in kernel.root.locator(".kf-why").inner_text()
        assert "reported: NVIDIA's GB200" in kernel.root.locator(".rb-fine").first.inner_text()
        kernel.field("heads").fill("64")
        assert not told.is_visible() and marks.count() == 0 and not kernel.root.get_by_text("reported", exact=True).is_visible()
        assert "matrix units decide" in kernel.root.locator(".kf-why").inner_text()
        kernel.field("heads").fill("16")
        assert told.is_visible() and marks.count() == 3
        kernel.pick("H200")
        assert marks.count() == 0
        assert not watched.wrong


def test_what_does_not_fit_is_a_sentence_that_names_field_and_remedy(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "own.html")
        kernel = Kernel(page)
        before = kernel.times()
        for name, value, text in [
            ("query_tokens", "0", "query_tokens=0: use a whole number from 1 to 65536"),
            ("heads", "2.5", "heads=2.5: use a whole number from 1 to 512"),
            ("top_k", "", "top_k: use a whole number from 1 to 65536"),
            ("fill", "1.2", "fill=1.2: use a number from 0 to 1"),
            ("memory_tb_s", "0", "memory_tb_s=0: use a number from 0.001 to 1000"),
            ("matrix_tflop_s", "1e6", "matrix_tflop_s=1000000: use a number from 0.001 to 100000"),
        ]:
            good = kernel.field(name).input_value()
            kernel.field(name).fill(value)
            assert (kernel.message(), kernel.times()) == (text, ["–"] * 4)
            assert kernel.field(name).get_attribute("aria-invalid") == "true" and not kernel.root.locator(".rb-drawing").is_visible()
            kernel.field(name).fill(good)
            assert kernel.message() == "" and kernel.times() == before
        kernel.field("memory_tb_s").fill("0")
        kernel.pick("H100")  # what is wrong with one's own card does not matter on another
        assert kernel.times() == shown({**DEFAULT, "heads": 64, "card": "H100"}) and not kernel.field("memory_tb_s").is_visible()
        assert not watched.wrong


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_setting_is_an_address_and_reset_leaves_it(browser, book, scheme):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book[scheme] + "kernel.html")
        kernel = Kernel(page)
        kernel.field("heads").fill("64")
        kernel.field("fill").fill("0.25")
        kernel.pick("own")
        kernel.field("memory_tb_s").fill("4.2")
        wanted = {f"KernelFloor.{part}" for part in ("card=own", "heads=64", "fill=0.25", "memory_tb_s=4.2")}  # in the order of writing
        page.wait_for_url(lambda url: set(url.partition("#")[2].split("&")) == wanted)
        state = {**DEFAULT, "heads": 64, "fill": 0.25, "card": "own", "memory_tb_s": 4.2}
        assert kernel.times() == shown(state)
        with Watched(browser, 1280) as other:
            shared = Kernel(other.open(page.url))
            assert shared.times() == shown(state) and shared.field("memory_tb_s").input_value() == "4.2"
            shared.root.get_by_role("button", name="Reset").click()
            shared.page.wait_for_url(re.compile(r"kernel\.html$"))
            assert shared.times() == shown(DEFAULT) and not other.wrong
        page.evaluate("location.hash = '#KernelFloor.top_k=64'")
        page.wait_for_function("document.querySelector('.kf input[id$=-top_k]').value === '64'")
        assert kernel.times() == shown({**DEFAULT, "top_k": 64})  # what a link does not name is as made
        for wrong, text in (("card=H300", "card='H300': use one of GB200, B200, H200, H100, RTX4090, own"), ("heads=many", "heads=many: use a whole number from 1 to 512")):
            page.evaluate(f"location.hash = '#KernelFloor.{wrong}'")
            page.wait_for_function("(text) => document.querySelector('.kf .rb-message').textContent === text", arg=text)
        assert not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "kernel.html")
        kernel = Kernel(page)
        live = kernel.root.locator("[aria-live=polite]")
        said = [f"{NAMES[path]} {spoken(floor.time_s)}, memory-bound" for path, floor in floors(DEFAULT).items()]
        assert live.inner_text() == f"Floors: {'; '.join(said)}."
        kernel.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")  # past the B200
        assert kernel.times() == shown({**DEFAULT, "card": "H200"}) and live.inner_text() != f"Floors: {'; '.join(said)}."
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowUp")
        assert kernel.field("query_tokens").input_value() == "16"
        kernel.root.get_by_role("slider", name="Heads of this rank, slider").focus()
        page.keyboard.press("ArrowRight")
        assert kernel.field("heads").input_value() == "24"
        assert kernel.times() == shown({**DEFAULT, "card": "H200", "query_tokens": 16, "heads": 24})
        kernel.root.locator("summary").focus()
        page.keyboard.press("Enter")
        assert kernel.root.locator("tbody tr").first.is_visible()
        kernel.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert kernel.times() == shown(DEFAULT)
        assert unnamed_controls(page, ".kf") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "kernel.html")
        kernel = Kernel(page)
        kernel.root.locator("summary").click()
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == [], "at the source's setting"
        kernel.pick("own")
        assert page.evaluate(AXE) == [], "an own card"
        kernel.field("heads").fill("0")
        assert page.evaluate(AXE) == [], "a message"


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "kernel.html")
        colours = """() => ["rows", "copy_written", "io", "floor", "reported", "title", "name", "value"].map((kind) => getComputedStyle(document.querySelector(`svg .kf-${kind}`)).fill)"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
        assert page.evaluate("getComputedStyle(document.querySelector('svg .kf-rows')).transitionDuration") == "0s"
