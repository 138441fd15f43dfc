"""The Pareto explorer on a built page: stored points at once, any other one by the page's own Python when a reader asks for it."""
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from small_book import cell, small_book

from minengine.arithmetic import at_bar, frontier, gpu_hours_per_million
from minengine.simulate.answer import answer
from minengine.simulate.grid import stored
from minengine.simulate.sizing import DEFAULTS, point

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
CALL = "minengine.simulate.sizing.point"
SHORT = {"warm_s": 10, "window_s": 30}
# The second one asks for little, so that a page's Python has it soon.
PAGES = {"sizing": "# Sizing\n\n" + cell("from minwidgets import ParetoExplorer\n\nParetoExplorer()"),
         "short": "# Short\n\n" + cell(f"from minwidgets import ParetoExplorer, pareto_explorer\n\npareto_explorer.HERE = {SHORT}\nParetoExplorer()")}
AXE = "axe.run('.pe').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
STARTS = 90_000  # ms that Python may take to start on a busy machine, and to simulate a little
CLASHES = """() => {
    const room = document.querySelector(".pe").getBoundingClientRect();
    const boxes = [...document.querySelectorAll(".pe svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const apart = (one, other) => one.right <= other.left || other.right <= one.left || one.bottom - 3 <= other.top || other.bottom - 3 <= one.top;
    return [boxes.filter(([, box]) => box.left < room.left || box.right > room.right).map(([text]) => text),
            boxes.filter(([, one], i) => boxes.slice(i + 1).some(([, other]) => !apart(one, other))).map(([text]) => text)];
}"""
MODULE = """async () => {
    const widget = Object.values(JSON.parse(document.querySelector('script[type="application/vnd.jupyter.widget-state+json"]').textContent).state)
        .find(({ state }) => state._esm).state;
    window.tested = await import(URL.createObjectURL(new Blob([widget._esm], { type: "text/javascript" })));
}"""


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    html = small_book(tmp_path_factory.mktemp("pareto") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/", "file": f"{html.as_uri()}/chapters/"}


class Explorer:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".pe")

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def pick(self, group, value):
        self.root.locator(f"input[type=radio][id$='-{group}-{value}']").check()

    def ask(self):
        self.root.get_by_role("button", name="Simulate it here").click()
        self.page.wait_for_selector(".pe[aria-busy=false]", timeout=STARTS)

    def numbers(self):
        return self.root.locator(".rb-stat").all_inner_texts()

    def message(self):
        return self.root.locator(".rb-message").inner_text()

    def status(self):
        return self.root.locator("[role=status]").inner_text()

    def verdict(self):
        return [row.split("\t") for row in self.root.locator(".pe-verdict tbody tr").all_inner_texts()]


def digits(value):
    return f"{float(f'{value:.3g}'):g}" if value < 999.5 else f"{value:,.0f}"


def duration(seconds):
    ms = 1000 * seconds
    text = f"{seconds:.1f} s" if ms >= 10_000 else f"{seconds:.2f} s" if ms >= 1000 else f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return text.replace(" ", "\u00a0")


def shown(value):
    """The eight numbers of the page."""
    return [digits(value["e2e_tok_s_user"]), digits(value["output_tok_s_gpu"]), digits(value["in_flight_mean"]), digits(value["gpu_hours_per_million"]),
            duration(value["ttft_s_p50"]), duration(value["queue_s_p50"]), digits(100 * value["hit_rate"]) + "\u00a0%", f"{value['counts']['dummies']:,}"]


def stored_value(**settings):
    return next(one["value"] for one in stored().points if one["settings"] == {**DEFAULTS, **settings})


def curves(**settings):
    """Of the stored grid, by name: (sessions, tok/s per user, tok/s per GPU)."""
    found = {}
    for one in stored().points:
        asked, value = one["settings"], one["value"]
        if all(asked[name] == {**DEFAULTS, **settings}[name] for name in DEFAULTS if name not in ("prefills", "decoders", "sessions")):
            found.setdefault(f"{asked['prefills']}:{asked['decoders']}", []).append((asked["sessions"], value["e2e_tok_s_user"], value["output_tok_s_gpu"]))
    return {name: sorted(points) for name, points in found.items()}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_stored_points_need_no_python(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        log = []
        watched.page.on("request", lambda request: "pyodide" in request.url and log.append(request.url))
        page = watched.open(book[scheme] + "sizing.html")
        explorer = Explorer(page)
        assert explorer.root.get_attribute("aria-busy") == "false" and explorer.numbers() == shown(stored_value())
        assert "simulated" in explorer.root.locator(".rb-heading").inner_text() and "Pareto explorer (simulated)" not in page.locator(".minwidget").inner_text()
        assert page.evaluate(CLASHES) == [[], []]
        explorer.pick("ratio", "1\\:3")
        explorer.pick("stored", 48)
        assert explorer.numbers() == shown(stored_value(decoders=3, sessions=48))
        explorer.pick("kv_cache_dtype", "fp8")
        assert explorer.numbers() == shown(stored_value(decoders=3, sessions=48, kv_cache_dtype="fp8")) and page.evaluate(CLASHES) == [[], []]
        assert page.locator(".pe svg .pe-before").count() == len(curves()) and "rows of 4 bits" in explorer.root.locator(".rb-key").inner_text()
        explorer.root.locator("summary").click()
        page.wait_for_selector(".pe details tbody tr")
        assert explorer.root.locator("details tbody tr").count() == sum(map(len, curves(kv_cache_dtype="fp8").values()))
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
        assert log == [] and not watched.wrong


def test_the_curves_are_drawn_to_scale(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "sizing.html")
        marks = page.evaluate("""() => [...document.querySelectorAll(".pe svg path.pe-mark, .pe svg path.pe-reported")]
            .map((mark) => mark.getAttribute("transform").match(/[\\d.]+/g).map(Number))""")
        wanted = [(user, gpu) for _, points in sorted(curves().items(), reverse=True) for _, user, gpu in points] + [(101, 100)]
        assert len(marks) == len(wanted)

        def place(value, axis):
            """On the straight line through the least and the most."""
            least, most = (choose(range(len(wanted)), key=lambda i: wanted[i][axis]) for choose in (min, max))
            (a, at_a), (b, at_b) = ((wanted[i][axis], marks[i][axis]) for i in (least, most))
            return at_a + (value - a) / (b - a) * (at_b - at_a)

        for axis in (0, 1):
            assert [mark[axis] for mark in marks] == pytest.approx([place(value[axis], axis) for value in wanted], abs=0.2)
        bar = float(re.match(r"M([\d.]+)", page.locator(".pe svg .pe-bar").get_attribute("d"))[1])
        assert bar == pytest.approx(place(100, 0), abs=0.2) and not watched.wrong


def test_a_click_on_a_point_sets_it(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        explorer = Explorer(watched.open(book["http"] + "sizing.html"))
        explorer.root.locator("svg path.pe-mark.pe-r2").first.click()
        sessions = curves()["1:2"][0][0]
        assert explorer.field("decoders").input_value() == "2" and explorer.field("sessions").input_value() == str(sessions)
        assert explorer.numbers() == shown(stored_value(decoders=2, sessions=sessions)) and not watched.wrong


def test_who_wins_at_the_bar_and_at_what_cost(browser, book):  # noqa: F811
    draw = random.Random(91)
    with Watched(browser, 1280) as watched:
        explorer = Explorer(watched.open(book["http"] + "sizing.html"))
        lowest = max(min(user for _, user, _ in points) for points in curves().values())
        for bar in (100, 400, round(lowest), *(draw.randint(60, 140) for _ in range(8))):
            price = draw.choice((0, 2.5))
            explorer.field("slo_tok_s").fill(str(bar))
            explorer.field("gpu_hour_price").fill(str(price))
            standing = {name: at_bar(points, bar) for name, points in curves().items()}
            order = sorted(standing, key=lambda name: -(standing[name].tok_s_gpu if standing[name] else -1))
            rows = {row[0]: row[1:] for row in explorer.verdict()}
            assert [name for name in rows if standing[name]] == [name for name in order if standing[name]] and set(rows) == set(order)
            for name, at in standing.items():
                if at is None:
                    assert rows[name][1:] == ["none", "–", "–", *(["–"] if price else [])]
                    continue
                hours = gpu_hours_per_million(at.tok_s_gpu)
                told = f"{at.sessions:.0f} or more" if at.open else f"about {int(at.sessions + 0.5)}"
                assert rows[name][1:] == [told, digits(at.tok_s_gpu), digits(hours), *([digits(price * hours)] if price else [])]
            words = explorer.root.locator(".pe-words").inner_text()
            assert words.startswith(f"At {bar} tok/s per user " + (f"{order[0]} carries" if standing[order[0]] else "nothing wins"))
        assert not watched.wrong


def test_formulas_are_the_arithmetic_s(browser, book):  # noqa: F811
    draw = random.Random(92)
    cases = []
    for _ in range(500):
        counts = sorted(draw.sample(range(1, 300), draw.randint(0, 8)))
        cases.append(([(n, draw.uniform(1, 200), draw.uniform(1, 200)) for n in counts], draw.uniform(1, 200)))
    cases += [([(1, 50.0, 2.0), (2, 50.0, 2.0), (3, 40.0, 2.0)], 50.0)]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "sizing.html")
        page.evaluate(MODULE)
        found = page.evaluate("""(cases) => cases.map(([curve, bar]) => {
            const points = curve.map(([sessions, user, gpu]) => ({ sessions, user, gpu }));
            const at = tested.atBar(points, bar);
            return [at && [at.sessions, at.gpu, at.open], tested.frontier(points).map((point) => points.indexOf(point)), tested.gpuHoursPerMillion(bar)];
        })""", cases)
        assert not watched.wrong
    for (curve, bar), theirs in zip(cases, found, strict=True):
        at = at_bar(curve, bar)
        assert theirs == [at and list(at), frontier([(user, gpu) for _, user, gpu in curve]), gpu_hours_per_million(bar)]


def test_what_is_not_stored_waits_to_be_asked_for_and_is_then_the_simulator_s(browser, book):  # noqa: F811
    given = {**stored().given, **SHORT}
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "short.html")
        explorer = Explorer(page)
        stood = page.locator(".pe svg path.pe-mark").count()
        explorer.field("sessions").fill("5")
        assert explorer.numbers() == ["–"] * 8
        assert explorer.status() == f"Not simulated ahead. It can be here: 30 simulated seconds instead of {stored().given['window_s']}, in about a minute."
        assert page.locator(".pe svg path.pe-mark").count() == stood  # the curves stay
        explorer.ask()
        value = point(**{**DEFAULTS, "sessions": 5}, **given)
        assert explorer.numbers() == shown(value) and explorer.status() == "" and explorer.message() == ""
        assert page.locator(".pe svg path.pe-here").count() == 1 and "hollow: simulated here" in explorer.root.locator(".rb-key").inner_text()
        assert "30 simulated seconds, after 10 of warming up" in explorer.root.locator(".rb-fine").first.inner_text()
        explorer.pick("stored", 66)
        assert explorer.numbers() == shown(stored_value())
        explorer.field("sessions").fill("5")  # it is known now
        assert explorer.numbers() == shown(value)
        explorer.field("decoders").fill("5")
        explorer.root.get_by_role("button", name="Reset").click()  # what was not asked for is left
        assert explorer.numbers() == shown(stored_value()) and explorer.field("decoders").input_value() == "4"
        explorer.field("prefills").fill("2")
        explorer.pick("decode", "DEP8")
        explorer.ask()
        assert explorer.numbers() == shown(point(**{**DEFAULTS, "prefills": 2, "decode": "DEP8"}, **given)) and not watched.wrong


def test_the_worker_answers_as_cpython_does(browser, book):  # noqa: F811
    draw = random.Random(93)
    given = {**stored().given, **SHORT}
    asked = [{**given, "sessions": draw.randint(1, 12), "decoders": draw.randint(1, 4), "prefill": draw.choice(("DEP8", "TEP8")), "seed": draw.randint(0, 99),
              "decode": draw.choice(("TP4", "TP8", "DEP8", "TP8+DCP4")), "kv_cache_dtype": draw.choice(("fp8", "nvfp4_fp8_ds_mla")),
              "gap_cap_s": draw.choice((0, 10, 300)), "max_num_batched_tokens": draw.choice((512, 4096))} for _ in range(4)]
    asked += [{**given, "sessions": "many"}, {**given, "decode": "TP3"}, {**given, "window_s": 0}]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "sizing.html")
        found = page.evaluate("""async ([call, asked]) => {
            const { ask } = await import(new URL("../_static/engine.js", location.href));
            return Promise.all(asked.map((settings) => ask(call, settings)));
        }""", [CALL, asked])
        assert not watched.wrong
    for theirs, settings in zip(found, asked, strict=True):
        assert {**theirs, "settings": None} == {**answer(CALL, settings), "settings": None}, settings


def test_a_setting_that_cannot_be_is_a_sentence(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        explorer = Explorer(watched.open(book["http"] + "short.html"))
        for name, value, text in (("sessions", "0", "sessions=0: use a whole number from 1 to 1000"),
                                  ("sessions", "", "sessions: use a whole number from 1 to 1000"),
                                  ("decoders", "2.5", "decoders=2.5: use a whole number from 1 to 16"),
                                  ("slo_tok_s", "0", "slo_tok_s=0: use a number from 1 to 1000"),
                                  ("gpu_hour_price", "-1", "gpu_hour_price=-1: use a number from 0 to 1000")):
            explorer.field(name).fill(value)
            assert (explorer.message(), explorer.numbers()) == (text, ["–"] * 8)
            assert not explorer.root.get_by_role("button", name="Simulate it here").is_visible()
            explorer.root.get_by_role("button", name="Reset").click()
            assert (explorer.message(), explorer.numbers()) == ("", shown(stored_value()))
        explorer.page.evaluate("location.hash = '#ParetoExplorer.decode=TP3'")  # no control offers it; the simulator says why
        explorer.page.wait_for_function("document.querySelector('.pe[aria-busy=false] .rb-message')?.textContent", timeout=STARTS)
        asked = {**stored().given, **SHORT, **DEFAULTS, "decode": "TP3"}
        assert explorer.message() == answer(CALL, asked)["error"] and not watched.wrong


def test_from_a_file_the_stored_points_stay_and_a_line_says_why(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        explorer = Explorer(watched.open(book["file"] + "sizing.html"))
        assert explorer.status().startswith("This page was opened from a file")
        explorer.field("sessions").fill("5")
        assert not explorer.root.get_by_role("button", name="Simulate it here").is_visible() and explorer.numbers() == ["–"] * 8
        explorer.pick("stored", 96)
        assert explorer.numbers() == shown(stored_value(sessions=96)) and not watched.wrong


def test_a_setting_is_an_address(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "sizing.html")
        explorer = Explorer(page)
        explorer.pick("ratio", "1\\:3")
        explorer.pick("stored", 72)
        explorer.field("slo_tok_s").fill("90")
        wanted = {f"ParetoExplorer.{part}" for part in ("decoders=3", "sessions=72", "slo_tok_s=90")}
        page.wait_for_url(lambda url: set(url.partition("#")[2].split("&")) == wanted)
        with Watched(browser, 1280) as other:
            shared = Explorer(other.open(page.url))
            assert shared.numbers() == shown(stored_value(decoders=3, sessions=72)) and shared.field("slo_tok_s").input_value() == "90"
            shared.root.get_by_role("button", name="Reset").click()
            other.page.wait_for_url(re.compile(r"sizing\.html$"))
            assert shared.numbers() == shown(stored_value()) and not other.wrong
        assert not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"] + "sizing.html")
        explorer = Explorer(page)
        live = explorer.root.locator("[aria-live=polite]")
        user, gpu = shown(stored_value())[:2]
        assert live.inner_text().startswith(f"{user} tok/s per user, {gpu} tok/s per GPU. At 100 tok/s per user ")
        explorer.root.get_by_role("button", name="Reset").focus()
        for _ in range(4):  # the verdict, which may be wider than the page; the bar, its slider, the price
            page.keyboard.press("Tab")
        page.keyboard.press("ArrowUp")
        assert explorer.field("gpu_hour_price").input_value() == "1"
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowLeft")  # to 1:3
        assert explorer.field("decoders").input_value() == "3"
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        counts = [sessions for sessions, _, _ in curves()["1:3"]]
        near = min(counts, key=lambda count: abs(count - 66))
        assert explorer.field("sessions").input_value() == str(counts[counts.index(near) + 1])
        explorer.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert explorer.numbers() == shown(stored_value()) and unnamed_controls(page, ".pe") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "sizing.html")
        explorer = Explorer(page)
        explorer.root.locator("summary").click()
        explorer.pick("kv_cache_dtype", "fp8")
        page.wait_for_selector(".pe details tbody tr")
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == []
        explorer.field("sessions").fill("5")  # with the offer to simulate it
        assert page.evaluate(AXE) == []
        explorer.field("sessions").fill("0")
        assert page.evaluate(AXE) == []


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"] + "sizing.html")
        colours = """() => ["path.pe-r0", "path.pe-r1", "path.pe-r2", ".pe-reported", ".pe-label", ".pe-title"].map((kind) => {
            const style = getComputedStyle(document.querySelector(`.pe svg[role=img] ${kind}`));
            return [style.fill, style.stroke, style.color].join(" ");
        })"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
