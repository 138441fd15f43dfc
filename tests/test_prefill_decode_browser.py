"""Prefill and decode on a built page: three timelines by the engine's scheduler in the page's own Python, asked for only when needed."""
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from small_book import cell, small_book

from minengine.simulate.answer import answer
from minengine.simulate.cost import StepCost
from minengine.simulate.disagg import prefill_decode

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
CALL = "minengine.simulate.disagg.prefill_decode"
COST = {name: getattr(StepCost(), name) for name in ("base_s", "decode_s", "prefill_s", "attention_s")}
PAGES = {"apart": "# Apart\n\n" + cell("from minwidgets import PrefillDecode\n\nPrefillDecode()")}
AXE = "axe.run('.pd').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
STARTS = 90_000  # ms that Python may take to start on a busy machine
DASHES = [["–"] * 3] * 5
CLASHES = """() => {
    const room = document.querySelector(".pd").getBoundingClientRect();
    const boxes = [...document.querySelectorAll(".pd svg text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const apart = (one, other) => one.right <= other.left || other.right <= one.left || one.bottom - 3 <= other.top || other.bottom - 3 <= one.top;
    return [boxes.filter(([, box]) => box.left < room.left || box.right > room.right).map(([text]) => text),
            boxes.filter(([, one], i) => boxes.slice(i + 1).some(([, other]) => !apart(one, other))).map(([text]) => text)];
}"""


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    html = small_book(tmp_path_factory.mktemp("apart") / "repo", PAGES)
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/apart.html", "file": f"{html.as_uri()}/chapters/apart.html"}


class Apart:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".pd")

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def set(self, **fields):
        for name, value in fields.items():
            if name == "load_admission":
                self.root.locator(f"input[type=radio][value={value}]").check()
            else:
                self.field(name).fill(str(value))
        self.settle()

    def settle(self):
        self.page.wait_for_selector(".pd[aria-busy=false]", timeout=STARTS)

    def numbers(self):
        return [[text.strip() for text in row.split("\t")][1:] for row in self.root.locator(".pd-numbers tbody tr").all_inner_texts()]

    def message(self):
        return self.root.locator(".rb-message").inner_text()


def duration(seconds):
    ms = 1000 * seconds
    text = f"{seconds:.1f} s" if ms >= 10_000 else f"{seconds:.2f} s" if ms >= 1000 else f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return text.replace(" ", "\u00a0")


def shown(**asked):
    """The table of the page, row by row."""
    now = prefill_decode(**asked)
    return [[duration(one[name]) if one[name] or name != "lost_s" else "nothing" for one in now.values()]
            for name in ("p90_gap_s", "longest_gap_s", "lost_s", "ttft_s", "second_gap_s")]


def drawn(page):
    """Of each path's kind, how many marks it has in all."""
    return page.evaluate("""() => Object.fromEntries(["st-decode", "st-prefill", "st-token", "pd-transfer"].map((kind) =>
        [kind, [...document.querySelectorAll(`.pd svg path.${kind}`)].reduce((sum, path) => sum + path.getAttribute("d").split("M").length - 1, 0)]))""")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_computed_settings_need_no_python(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        log = []
        watched.page.on("request", lambda request: "pyodide" in request.url and log.append(request.url))
        page = watched.open(book[scheme])
        apart = Apart(page)
        assert apart.root.get_attribute("aria-busy") == "false" and apart.numbers() == shown() and "simulated" in apart.root.locator(".rb-heading").inner_text()
        assert "Prefill and decode (simulated)" not in page.locator(".minwidget").inner_text()  # the words for a page without scripts
        for tokens, slowdown in ((256, 2), (4096, 1), (1024, 2)):
            apart.root.locator("label", has_text=f"prompt {tokens:,}, slowdown {slowdown}").click()
            assert apart.numbers() == shown(prompt_tokens=tokens, pd_slowdown=slowdown)
            assert apart.field("pd_slowdown").input_value() == str(slowdown)
            assert page.evaluate(CLASHES) == [[], []]
        apart.root.locator("summary").click()
        page.wait_for_selector(".pd details tbody tr")
        now = prefill_decode(pd_slowdown=2)
        assert len(apart.root.locator("details tbody tr").all()) == sum(len(one["steps"]) + len(one["prefill_steps"]) for one in now.values())
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
        assert log == [] and not watched.wrong


def test_what_is_set_is_what_is_shown_and_drawn(browser, book):  # noqa: F811
    draw = random.Random(61)
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        apart = Apart(page)
        for _ in range(8):
            asked = {"streams": draw.randint(1, 24), "prompt_tokens": draw.randint(16, 3000), "large_budget": draw.randint(200, 1000),
                     "small_budget": draw.choice((20, 64, 190)), "transfer_gb_s": draw.choice((0.05, 0.5, 4)), "pd_slowdown": draw.choice((1, 1.5, 2.25)),
                     "load_admission": draw.choice(("poll", "event")), "seed": draw.randint(0, 1000)}
            apart.set(**asked)
            wanted = answer(CALL, {**asked, "cost": COST})
            if "error" in wanted:
                assert (apart.message(), apart.numbers()) == (wanted["error"], DASHES)
                continue
            assert apart.numbers() == shown(**asked) and apart.message() == "", asked
            value = wanted["value"]
            begin = -5 * value["large"]["quiet_gap_s"]
            steps = [step for one in value.values() for step in (*one["steps"], *one["prefill_steps"]) if step[1] > begin]
            marks = drawn(page)
            assert marks["st-decode"] == sum(step[2] > 0 for step in steps) and marks["pd-transfer"] == 1, asked
            assert marks["st-prefill"] == sum(step[3] > 0 for step in steps) + 3  # and the prompt's own way
            ticks = sum(step[1] > begin and i >= max(first for first, _ in one["streams"]) for one in value.values() for i, step in enumerate(one["steps"]))
            assert marks["st-token"] == ticks + sum(len(one["prompt"]) - 1 for one in value.values())
        assert not watched.wrong


def test_the_worker_answers_as_cpython_does(browser, book):  # noqa: F811
    draw = random.Random(62)
    asked = [{"streams": draw.randint(1, 24), "prompt_tokens": draw.randint(16, 2000), "transfer_gb_s": draw.uniform(0.05, 3), "pd_slowdown": draw.uniform(1, 4),
              "load_admission": draw.choice(("poll", "event")), "cost": {**COST, "decode_s": draw.random() / 100}} for _ in range(15)]
    asked += [{"streams": "many"}, {"pd_slowdown": None}, {"load_admission": "push"}, {}]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        found = page.evaluate("""async ([call, asked]) => {
            const { ask } = await import(new URL("../_static/engine.js", location.href));
            return Promise.all(asked.map((settings) => ask(call, settings)));
        }""", [CALL, asked])
        assert not watched.wrong
    for theirs, ours in zip(found, [answer(CALL, settings) for settings in asked], strict=True):
        assert theirs == ours, ours["settings"]


def test_a_setting_that_cannot_be_is_a_sentence(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        apart = Apart(watched.open(book["http"]))
        for name, value, text in (("streams", "0", "streams=0: use a whole number from 1 to 24"), ("streams", "", "streams: use a whole number from 1 to 24"),
                                  ("transfer_gb_s", "0", "transfer_gb_s=0: use a number from 0.05 to 1000"), ("pd_slowdown", "5", "pd_slowdown=5: use a number from 1 to 4")):
            apart.set(**{name: value})
            assert (apart.message(), apart.numbers()) == (text, DASHES)
            apart.root.get_by_role("button", name="Reset").click()
        apart.set(small_budget=600)
        assert apart.message() == "small_budget=600: use at most large_budget, 512"  # the simulator's own
        apart.root.get_by_role("button", name="Reset").click()
        assert (apart.message(), apart.numbers()) == ("", shown()) and not watched.wrong


def test_from_a_file_the_computed_settings_stay_and_a_line_says_why(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        apart = Apart(watched.open(book["file"]))
        assert apart.root.locator("[role=status]").inner_text().startswith("This page was opened from a file")
        assert all(control.is_disabled() for control in apart.root.locator("input[type=number], input[type=range], input[value=poll]").all())
        apart.root.locator("label", has_text="prompt 4,096, slowdown 2").click()
        assert apart.numbers() == shown(prompt_tokens=4096, pd_slowdown=2) and not watched.wrong


def test_a_setting_is_an_address(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        Apart(page).set(streams=5, load_admission="poll", transfer_gb_s=0.25)
        wanted = {f"PrefillDecode.{part}" for part in ("streams=5", "load_admission=poll", "transfer_gb_s=0.25")}
        page.wait_for_url(lambda url: set(url.partition("#")[2].split("&")) == wanted)
        with Watched(browser, 1280) as other:
            shared = Apart(other.open(page.url))
            shared.settle()
            assert shared.numbers() == shown(streams=5, load_admission="poll", transfer_gb_s=0.25)
            shared.root.get_by_role("button", name="Reset").click()
            other.page.wait_for_url(re.compile(r"apart\.html$"))
            assert shared.numbers() == shown() and not other.wrong
        page.evaluate("location.hash = '#PrefillDecode.load_admission=push'")
        page.wait_for_function("document.querySelector('.pd .rb-message').textContent === \"load_admission='push': use one of poll, event\"")
        assert not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        apart = Apart(page)
        live = apart.root.locator("[aria-live=polite]")
        large, small, split = shown()[0]
        assert live.inner_text().startswith(f"p90 gap: large chunks {large}, small chunks {small}, apart {split}. First token of the prompt: large chunks ")
        apart.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Tab")  # the numbers, which may be wider than the page
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        assert apart.numbers() == shown(pd_slowdown=2)
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        apart.settle()
        assert apart.numbers() == shown(pd_slowdown=2, load_admission="poll")
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowUp")
        apart.settle()
        assert apart.field("streams").input_value() == "4"
        apart.root.get_by_role("slider", name="Tokens of the prompt, slider").focus()
        page.keyboard.press("ArrowRight")
        apart.settle()
        assert apart.numbers() == shown(streams=4, prompt_tokens=1056, pd_slowdown=2, load_admission="poll")
        apart.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert apart.numbers() == shown() and unnamed_controls(page, ".pd") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"])
        page.locator(".pd summary").click()
        page.wait_for_selector(".pd details tbody tr")
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == []
        Apart(page).field("streams").fill("0")
        assert page.evaluate(AXE) == []
        page.goto("about:blank")
        page = watched.open(book["file"])  # with the line, and controls that are off
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == []


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"])
        colours = """() => [".st-decode", ".st-prefill-line", ".st-stall", ".pd-transfer", ".pd-title"].map((kind) => getComputedStyle(document.querySelector(`.pd svg ${kind}`)).fill)"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
