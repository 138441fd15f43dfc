"""The step timeline on a built page: the engine's scheduler in the page's own Python, right to the digit, asked for only when needed."""
import json
import random
import re
from pathlib import Path

import pytest
from browsing import Watched, browser, served, unnamed_controls  # noqa: F401  (a fixture)
from small_book import cell, small_book

from minengine.simulate.answer import answer
from minengine.simulate.cost import StepCost
from minengine.simulate.timeline import LIMITS, timeline

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
CALL = "minengine.simulate.timeline.timeline"
COST = {name: getattr(StepCost(), name) for name in ("base_s", "decode_s", "prefill_s", "attention_s")}
PAGES = {"steps": "# Steps\n\n" + cell("from minwidgets import StepTimeline\n\nStepTimeline()") + "\n## Below\n\n" + cell(
    "from minwidgets import RowBytes\n\nRowBytes()")}
ENGINE = {"engine.js", "engine-worker.js", "minengine.json", "vendor/pyodide/pyodide.mjs", "vendor/pyodide/pyodide.asm.mjs",
          "vendor/pyodide/pyodide.asm.wasm", "vendor/pyodide/python_stdlib.zip", "vendor/pyodide/pyodide-lock.json"}
AXE = "axe.run('.st').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
STATE = re.compile(r'(<script type="application/vnd.jupyter.widget-state\+json">)(.*?)(?=</script>)', re.DOTALL)
STARTS = 60_000  # ms that Python may take to start on a busy machine


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):  # noqa: F811
    """The page's address on a server, under a sub-path; as a file; and as it is when its outputs come from the cache."""
    html = small_book(tmp_path_factory.mktemp("timeline") / "repo", PAGES)
    text = (html / "chapters/steps.html").read_text(encoding="utf8")
    (html / "chapters/stored.html").write_text(STATE.sub(lambda found: found[1] + reordered(found[2]), text), encoding="utf8")
    with served(html.parent) as address:
        yield {"http": f"{address}html/chapters/steps.html", "file": f"{html.as_uri()}/chapters/steps.html",
               "stored": f"{address}html/chapters/stored.html"}


def reordered(text):
    """JSON as a stored notebook has it, its keys in the order of the alphabet."""
    return json.dumps(json.loads(text), sort_keys=True).replace("</", "<\\/")


class Steps:
    """The widget by what a reader sees and touches."""

    def __init__(self, page):
        self.page, self.root = page, page.locator(".st")

    def field(self, name):
        return self.root.locator(f"input[type=number][id$='-{name}']")

    def set(self, **fields):
        for name, value in fields.items():
            self.field(name).fill(str(value))
        self.settle()

    def settle(self):
        self.page.wait_for_selector(".st[aria-busy=false]", timeout=STARTS)

    def numbers(self):
        return self.root.locator(".rb-stat").all_inner_texts()

    def note(self):
        return self.root.locator("[role=status]").inner_text()

    def message(self):
        return self.root.locator(".rb-message").inner_text()

    def live(self):
        return self.root.locator("[aria-live=polite]").inner_text()


def duration(seconds):
    ms = 1000 * seconds
    text = f"{seconds:.1f} s" if ms >= 10_000 else f"{seconds:.2f} s" if ms >= 1000 else f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return text.replace(" ", "\u00a0")


def shown(**asked):
    now = timeline(**asked)
    return [f"{now['stalled_gaps']:,}", *(duration(now[name]) for name in ("longest_gap_s", "lost_s", "ttft_s"))]


def random_settings(draw):
    return {"streams": draw.randint(1, 24), "prompt_tokens": draw.choice((draw.randint(1, 50), draw.randint(1, 8192))),
            "max_num_batched_tokens": draw.choice((draw.randint(16, 64), draw.randint(16, 2048))), "output_tokens": draw.randint(8, 200),
            "seed": draw.randint(0, 10**6)}


def engine_requests(page):
    """Addresses that a page asks for from now on, of the files that make its Python."""
    log = []
    page.on("request", lambda request: any(request.url.endswith("/_static/" + name) for name in ENGINE) and log.append(request.url))
    return log


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["http", "file", "stored"])
def test_the_computed_settings_need_no_python(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width) as watched:
        log = engine_requests(watched.page)
        page = watched.open(book[scheme])
        steps = Steps(page)
        assert steps.root.get_attribute("aria-busy") == "false" and steps.root.locator("input[type=radio][value='1']").is_checked()
        assert steps.numbers() == shown() and "simulated" in steps.root.locator(".rb-heading").inner_text()
        assert "a prompt of 640 tokens, budget 128" not in page.locator(".minwidget").first.inner_text()  # the words for a page without scripts
        for budget in (64, 512, 256):
            steps.root.locator("label", has_text=f"budget of a step: {budget}").click()
            assert steps.numbers() == shown(max_num_batched_tokens=budget)
            assert steps.field("max_num_batched_tokens").input_value() == str(budget)
        steps.root.locator("summary").click()
        page.wait_for_selector(".st tbody tr")
        rows = steps.root.locator("tbody tr").all_inner_texts()
        assert [[float(text) for text in row.split("\t")] for row in rows] == [
            [i + 1, round(1000 * start, 1), round(1000 * (end - start), 1), decodes, prefill]
            for i, (start, end, decodes, prefill) in enumerate(timeline(max_num_batched_tokens=256)["steps"])]
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 1
        outside = page.evaluate("""() => { const room = document.querySelector(".st").getBoundingClientRect();
            return [...document.querySelectorAll(".st svg text")].map((text) => [text.textContent, text.getBoundingClientRect()])
                .filter(([, box]) => box.left < room.left || box.right > room.right).map(([text]) => text); }""")
        assert outside == [] and log == [] and not watched.wrong


def test_python_is_loaded_at_the_first_touch_once_and_from_this_site(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        log, steps = engine_requests(page), Steps(page)
        steps.root.locator("summary").click()
        steps.root.get_by_role("button", name="Reset").click()
        assert log == []
        steps.set(streams=7)
        assert steps.numbers() == shown(streams=7)
        site = book["http"].removesuffix("chapters/steps.html") + "_static/"
        assert sorted(log) == sorted(site + name for name in ENGINE)
        steps.set(streams=8, prompt_tokens=900)
        assert steps.numbers() == shown(streams=8, prompt_tokens=900) and len(log) == len(ENGINE)
        assert not watched.wrong


def test_the_worker_answers_as_cpython_does(browser, book):  # noqa: F811
    draw = random.Random(31)
    asked = [{**random_settings(draw), "cost": {**COST, "decode_s": draw.random() / 100}} for _ in range(40)]
    asked += [{"streams": "many"}, {"prompt_tokens": 2.5}, {"output_tokens": None}, {}]
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        found = page.evaluate("""async ([call, asked]) => {
            const { ask } = await import(new URL("../_static/engine.js", location.href));
            return Promise.all(asked.map((settings) => ask(call, settings)));
        }""", [CALL, asked])
        assert not watched.wrong
    wanted = [answer(CALL, settings) for settings in asked]
    assert sum("error" in one for one in wanted) >= 3 and sum("value" in one for one in wanted) >= 30
    for theirs, ours in zip(found, wanted, strict=True):
        assert theirs == ours, ours["settings"]


def test_what_is_set_is_what_is_shown(browser, book):  # noqa: F811
    draw = random.Random(32)
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        steps = Steps(page)
        for _ in range(12):
            asked = random_settings(draw)
            steps.set(**asked)
            wanted = answer(CALL, {**asked, "cost": COST})
            if "error" in wanted:
                assert (steps.message(), steps.numbers()) == (wanted["error"], ["–"] * 4)
                continue
            assert steps.numbers() == shown(**asked) and steps.message() == ""
            decodes = page.evaluate("document.querySelector('.st-decode').getAttribute('d').split('M').length - 1")
            prefills = page.evaluate("document.querySelector('.st path.st-prefill').getAttribute('d').split('M').length - 1")
            marks = page.evaluate("document.querySelector('.st-token').getAttribute('d').split('M').length - 1")
            bars = wanted["value"]["steps"]
            assert (decodes, prefills) == (sum(bar[2] > 0 for bar in bars), sum(bar[3] > 0 for bar in bars))
            assert marks == sum(map(len, wanted["value"]["streams"]))
        assert not watched.wrong


DRAG = """async (values) => {
    const slider = document.querySelector(".st input[type=range]");
    for (const value of values) {
        slider.value = value;
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        await new Promise((done) => setTimeout(done));
    }
}"""


def test_of_many_quick_changes_the_last_is_shown(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        steps = Steps(page)
        page.evaluate(DRAG, [4, 9, 24, 3, 17, 11])
        steps.settle()
        assert steps.numbers() == shown(streams=11) and steps.note() == ""
        page.evaluate(DRAG, [5, 23, 8, 14, 6])  # now Python answers in between
        steps.settle()
        assert steps.numbers() == shown(streams=6) and not watched.wrong


def test_while_python_starts_the_page_says_so(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        held = []
        page.route("**/engine.js", lambda route: held.append(route))  # the start waits until we have looked
        steps = Steps(page)
        page.evaluate(DRAG, [4])
        page.wait_for_function("[...document.querySelectorAll('.st *')].some((e) => e.textContent.startsWith('Starting Python'))")
        assert "Starting Python" in steps.note()
        held[0].continue_()
        steps.settle()
        assert steps.numbers() == shown(streams=4) and steps.note() == "" and not watched.wrong


def test_a_setting_that_cannot_be_is_a_sentence(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        steps = Steps(watched.open(book["http"]))
        steps.set(streams=0)
        assert (steps.message(), steps.numbers()) == ("streams=0: use a whole number from 1 to 24", ["–"] * 4)
        steps.set(streams="")
        assert steps.message() == "streams: use a whole number from 1 to 24"
        steps.set(streams=24, max_num_batched_tokens=16)
        assert steps.message() == "max_num_batched_tokens=16 is below max_num_seqs=25: decodes would starve"  # the scheduler's own
        steps.root.get_by_role("button", name="Reset").click()
        assert (steps.message(), steps.numbers()) == ("", shown())
        assert not watched.wrong


def test_from_a_file_the_computed_settings_stay_and_a_line_says_why(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["file"])
        steps = Steps(page)
        assert steps.note().startswith("This page was opened from a file") and "from a web server" in steps.note()
        assert all(control.is_disabled() for control in steps.root.locator("input[type=number], input[type=range]").all())
        assert all(chip.is_enabled() for chip in steps.root.locator("input[type=radio]").all())
        page.evaluate("location.hash = '#StepTimeline.max_num_batched_tokens=512'")  # one that is computed
        page.wait_for_function("(text) => document.querySelector('.st .rb-stat').textContent === text", arg=shown(max_num_batched_tokens=512)[0])
        page.evaluate("location.hash = '#StepTimeline.streams=9'")  # one that is not
        page.wait_for_function("document.querySelector('.st input[id$=-streams]').value === '3'")
        assert steps.numbers() in (shown(), shown(max_num_batched_tokens=512)) and not watched.wrong
    with Watched(browser, 1280) as watched:
        steps = Steps(watched.open(book["file"] + "#StepTimeline.streams=9"))
        assert steps.numbers() == shown() and steps.field("streams").input_value() == "3" and not watched.wrong


def test_without_webassembly_or_its_files_the_computed_settings_stay(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        watched.page.add_init_script("delete globalThis.WebAssembly")
        steps = Steps(watched.open(book["http"]))
        assert steps.note().startswith("This browser has no WebAssembly") and steps.field("streams").is_disabled()
        assert steps.numbers() == shown() and not watched.wrong
    for missing in ("engine.js", "engine-worker.js", "minengine.json", "vendor/pyodide/pyodide.asm.wasm"):
        with Watched(browser, 1280) as watched:
            watched.page.context.route(f"**/_static/{missing}", lambda route: route.fulfill(status=404, body="gone"))
            steps = Steps(watched.open(book["http"]))
            steps.field("streams").fill("9")
            watched.page.wait_for_function("document.querySelector('.st [role=status]').textContent.startsWith('Python could not be started')", timeout=STARTS)
            assert steps.numbers() == shown() and steps.field("streams").input_value() == "3", missing
            steps.root.locator("label", has_text="budget of a step: 64").click()
            assert steps.numbers() == shown(max_num_batched_tokens=64)


def test_a_setting_is_an_address(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        steps = Steps(page)
        steps.set(streams=5, seed=7)
        page.wait_for_url(re.compile(r"#StepTimeline\.streams=5&StepTimeline\.seed=7$"))
        with Watched(browser, 1280) as other:
            shared = Steps(other.open(page.url))
            shared.settle()
            assert shared.numbers() == steps.numbers() == shown(streams=5, seed=7)
            shared.root.get_by_role("button", name="Reset").click()
            other.page.wait_for_url(re.compile(r"steps\.html$"))
            assert shared.numbers() == shown() and not other.wrong
        page.evaluate("location.hash = '#StepTimeline.streams=many'")
        page.wait_for_function("document.querySelector('.st .rb-message').textContent === \"streams='many': use a whole number from 1 to 24\"")
        page.evaluate("location.hash = '#StepTimeline.prompt_tokens=100'")
        page.wait_for_selector(".st[aria-busy=false] .rb-heading:has-text('100 tokens')")
        assert steps.numbers() == shown(prompt_tokens=100) and not watched.wrong


def test_the_keyboard_is_enough_and_results_are_spoken(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(book["http"])
        steps = Steps(page)
        gaps, longest, lost, ttft = shown()
        assert steps.live() == f"{gaps} stalled gaps, the longest {longest}, {lost} lost in all; first token of the prompt after {ttft}."
        steps.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")  # the next of the computed settings
        assert steps.numbers() == shown(max_num_batched_tokens=256)
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowUp")
        steps.settle()
        assert steps.field("streams").input_value() == "4" and steps.numbers() == shown(streams=4, max_num_batched_tokens=256)
        steps.root.get_by_role("slider", name="Tokens of the prompt, slider").focus()
        page.keyboard.press("ArrowRight")
        steps.settle()
        asked = dict(streams=4, max_num_batched_tokens=256, prompt_tokens=672)
        assert steps.numbers() == shown(**asked) and shown(**asked)[3] in steps.live()
        steps.root.get_by_role("button", name="Reset").focus()
        page.keyboard.press("Enter")
        assert steps.numbers() == shown()
        assert unnamed_controls(page, ".st") == 0 and not watched.wrong


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, book, scheme, width):  # noqa: F811
    with Watched(browser, width, scheme, reduced_motion="reduce") as watched:
        page = watched.open(book["http"])
        page.locator(".st summary").click()
        page.wait_for_selector(".st tbody tr")
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == []
        Steps(page).field("streams").fill("0")
        assert page.evaluate(AXE) == []
        page.goto("about:blank")
        page = watched.open(book["file"])  # with the line, and controls that are off
        page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
        assert page.evaluate(AXE) == []


def test_colours_follow_the_theme_without_a_reload(browser, book):  # noqa: F811
    with Watched(browser, 1280, "light", reduced_motion="reduce") as watched:
        page = watched.open(book["http"])
        colours = """() => [getComputedStyle(document.querySelector(".st")).color, getComputedStyle(document.querySelector(".st-decode")).fill,
            getComputedStyle(document.querySelector(".st-prefill-line")).fill, getComputedStyle(document.querySelector(".st-stall")).fill]"""
        light = page.evaluate(colours)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = page.evaluate(colours)
        assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
        assert page.evaluate("getComputedStyle(document.querySelector('.st .rb-drawing')).transitionDuration") == "0s"


def test_the_limits_of_the_page_are_the_functions(browser, book):  # noqa: F811
    with Watched(browser, 1280) as watched:
        steps = Steps(watched.open(book["http"]))
        for name, (least, most) in LIMITS.items():
            assert (steps.field(name).get_attribute("min"), steps.field(name).get_attribute("max")) == (str(least), str(most))
