"""A small book whose one chapter uses and records claims: role, ledger and status page as built, and as a reader works with them."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from browsing import Watched, browser, served  # noqa: F401  (a fixture)
from small_book import HEADER

from bookkit import assets
from minengine.claims import read_claims

ROOT = Path(__file__).resolve().parents[1]
AXE = "axe.run('.bd-article').then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"
CHAPTER = HEADER + """# A small chapter

A row has {{claim}}`row_fp8_bytes|unit`, then {{claim}}`row_fp8_bytes`; chat finds {{claim}}`mooncake_hit|percent` and waits
{{claim}}`queue_wait_8k_ms` ms. {prose}

## Measured

```{{code-cell}} python
:tags: [{tags}]
from minengine.claims import read_claims, record
print(read_claims()["mooncake_hit"].value)
record("mooncake_hit", 0.36633, n=12_031, holds=True, note="an hour of chat")
{code}
```
"""
STORED = {"machine": "some GPU", "versions": {"python": "3.12"}, "commit": "0" * 40, "command": "make measure", "date": "2026-01-31", "measurements": [
    {"name": "native", "what": "w", "unit": "µs", "n": 30, "median": 15.0, "spread": [14.5, 15.25], "claim": "kernel_native_us"}]}


class Book:
    def __init__(self, root):
        self.root, self.site = root, root / "_build/html"
        for name in ("book", "minengine", "kernels", "widgets"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("node_modules", "__pycache__", "models", "*.gguf"))
        (root / "book/node_modules").symlink_to(ROOT / "book/node_modules")
        for name in ("_config.yml", "constraints.txt", "chapters/ledger.md", "chapters/status.md"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
        (root / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters:\n- file: chapters/01-small\n- file: chapters/ledger\n- file: chapters/status\n")
        (root / "book/results/gpu.json").write_text(json.dumps(STORED))
        (root / "index.md").write_text("# Small\n\nA front page.\n")
        self.write()

    def write(self, prose="Prose.", code="", tags="hide-input"):
        (self.root / "chapters/01-small.md").write_text(CHAPTER.format(prose=prose, code=code, tags=tags))

    def build(self):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([sys.executable, "book/build.py"], cwd=self.root, capture_output=True, text=True, env=environment, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def page(self, name):
        text = (self.site / f"{name}.html").read_text(encoding="utf8")
        return re.sub(r"\s+(?=<)", "", text)  # the build may set spaces between tags, for the search's sake

    def change_claim(self, name, **fields):
        path = self.root / "book/claims.yml"
        registry = yaml.safe_load(path.read_text(encoding="utf8"))
        next(row for rows in registry.values() for row in rows if row["id"] == name).update(fields)
        path.write_text(yaml.safe_dump(registry), encoding="utf8")


def made(root):
    pytest.importorskip("jupyter_book", reason="pip install -c constraints.txt -e .[book]")
    assets.install()
    book = Book(root / "repo")
    code, said = book.build()
    assert code == 0 and "executing chapters/01-small.md" in said, said
    return book


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Built once, for the tests that only look."""
    return made(tmp_path_factory.mktemp("claims"))


def row(page, name):
    return re.search(rf'<tr id="{name}".*?</tr>', page, re.DOTALL)[0]


# --- as built ---------------------------------------------------------------------------------------------

def test_the_role_prints_value_and_label_and_keeps_its_source_behind_it(book):
    page = book.page("chapters/01-small")
    first, second = re.findall(r'<button type="button" class="claim".*?popovertarget="claim-row_fp8_bytes".*?</button>', page)
    assert '>576 bytes</span><span class="claim-label">reported</span>' in first and 'id="use-row_fp8_bytes"' in first
    assert ">576</span></button>" in second and "id=" not in second
    assert 'title="reported: One 8-bit row of GLM-5.3, latent and rotary key. Prime Inference, &quot;Four bits a value&quot;"' in first
    note = re.search(r'<div class="claim-note" id="claim-row_fp8_bytes" popover.*?</div>', page, re.DOTALL)[0]
    assert "row_bytes(&quot;fp8&quot;).total</code> = 576, derived: holds" in note and 'href="ledger.html#row_fp8_bytes"' in note
    measured = re.search(r'<div class="claim-note" id="claim-mooncake_hit".*?</div>', page, re.DOTALL)[0]
    assert "0.3663, measured (an hour of chat; n = 12,031): holds as stated" in measured and "36.6%" in page
    assert len(re.findall('class="claim-note"', page)) == 3  # one a claim, not one a mention


def test_scripts_and_styles_are_on_the_pages_that_use_them(book):
    for name, used in {"chapters/01-small": "claims", "chapters/ledger": "ledger", "index": "", "chapters/status": "ledger"}.items():
        page = book.page(name)
        assert [part for part in ("claims", "ledger") if f"_static/{part}.css" in page] == ([used] if used else []), name
        assert [part for part in ("claims", "ledger") if f"_static/{part}.js" in page] == ([used] if used else []), name


def test_the_ledger_has_a_row_for_every_claim(book):
    page, claims = book.page("chapters/ledger"), read_claims()
    assert re.findall(r'<tr id="(\w+)" role="row" data-status=', page) == [name for section in dict.fromkeys(c.section for c in claims.values())
                                                                          for name, c in claims.items() if c.section == section]
    assert re.findall(r'data-status="not built yet">not built yet<b>(\d+)</b>', page) == [str(page.count('role="row" data-status="not built yet"'))]


def test_a_measured_value_comes_from_the_executed_page(book):
    found = row(book.page("chapters/ledger"), "mooncake_hit")
    assert "<b>0.3663</b><i>measured</i><small>an hour of chat; n = 12,031</small>" in found
    assert 'data-status="holds as stated"' in found and "<div>1.00</div>" in found
    assert 'href="01-small.html#own-mooncake_hit"' in found and 'id="own-mooncake_hit"' in book.page("chapters/01-small")


@pytest.mark.parametrize("name, parts", [
    ("c66_in_flight", ['<b>23.762</b><i>derived</i><code>in_flight(c66_total_tok_s, c66_tok_s_user)</code>', '"holds"', "<div>1.00</div>"]),
    ("queue_wait_8k_ms", ['"not built yet"', "<b>550</b> ms<i>reported</i>"]),
    ("copies_200k", ["<b>15,288 to 30,576</b>", '"bounded"', "0.48 to 0.96", "the count stated is itself rounded"]),
    ("kernel_staged_us", ['"needs a GPU"']),
    ("kernel_native_us", ["<b>15</b><i>measured</i><small>n = 30; 14.5 to 15.25; some GPU, 31 January 2026; make measure</small>", '"measured"', "1.25"]),
    ("deepswe", ['"cannot be checked"', "fp8 68.47, nvfp4 69.82", "No sample or run counts are given"]),
    ("row_fp8_bytes", ['"holds"', "<code>row_bytes(&quot;fp8&quot;).total</code>"]),
    ("dep8_over_tep8_prefix", ["<b>5.24 to 6.47</b>", '"bounded"', "<div>1.05 to 1.29</div>"]),
])
def test_rows_of_the_ledger(book, name, parts):
    found = row(book.page("chapters/ledger"), name)
    for part in parts:
        assert part in found, found


def test_the_status_page_says_when_where_and_with_what(book):
    page = book.page("chapters/status")
    assert re.search(r'<a href="01-small.html">A small chapter</a></th><td role="cell" data-head="ran for"><div>\d+ s</div>', page)
    assert re.search(r'data-head="when"><div>\d\d \w+ 20\d\d, \d\d:\d\d UTC</div></td><td role="cell" data-head="on"><div>[^<]+, \d+ cores?', page)
    for name in ("Python", "torch", "jupyter-book"):
        assert re.search(rf'>{name}</th><td role="cell" data-head="version"><div>\d', page), name


def test_what_a_change_runs_again_and_what_fails(tmp_path):
    book = made(tmp_path)
    executed = re.search(r'data-head="when"><div>(.*?)<', book.page("chapters/status"))[1]

    book.change_claim("mooncake_hit", source="another paper")  # a cell mentions it, but cannot see where it is from
    book.change_claim("row_fp8_bytes", value=577)  # only prose mentions it
    book.write(prose="Other prose.")
    code, said = book.build()
    assert code == 0 and "executing" not in said, said
    page = book.page("chapters/01-small")
    assert "another paper" in page and ">577 bytes<" in page and "Other prose." in page
    assert 'data-status="differs"' in row(book.page("chapters/ledger"), "row_fp8_bytes")
    assert f'data-head="when"><div>{executed}<' in book.page("chapters/status")  # when it ran, not when the page was made

    book.change_claim("mooncake_hit", value=0.4)
    code, said = book.build()
    assert code == 0 and "executing chapters/01-small.md" in said, said
    assert "<div>0.92</div>" in row(book.page("chapters/ledger"), "mooncake_hit")

    book.write(prose="It takes 352 bytes, {claim}`no_such_claim` and {claim}`row_ratio|percents`.",
               code='record("mooncake_hit", 0.4)\n```\n\n```{code-cell} python\n:tags: [remove-cell]\nrecord("set_hit", 0.95)')
    code, said = book.build()
    assert code == 1, said
    assert re.search(r"01-small\.md:14: .*'352 bytes, .*' is typed by hand", said), said
    assert "claim 'no_such_claim': is not in book/claims.yml" in said and "'percents' is no form" in said, said
    assert "claim 'mooncake_hit' was recorded in chapters/01-small already" in said, said
    assert re.search(r"01-small\.md:26: .*tag it hide-input, not remove-cell", said), said

    book.write(code='record("row_ratio", 1.6)')
    code, said = book.build()
    assert code == 1 and "record 'row_ratio': its own value comes by book: derive" in said and "chapters/01-small.md failed" in said, said


# --- as used ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def site(book):
    with served(book.site) as address:
        yield address


def opened(browser, site, width=1280, page="chapters/01-small.html", **options):  # noqa: F811
    watched = Watched(browser, width, **options)
    watched.open(site + page)
    return watched


@pytest.mark.browser
def test_hovering_shows_the_note_and_leaving_hides_it(browser, site):  # noqa: F811
    with opened(browser, site) as watched:
        page = watched.page
        note = page.locator("#claim-row_fp8_bytes")
        page.locator("button.claim").nth(1).hover()
        note.wait_for(state="visible")
        box, at = note.bounding_box(), page.locator("button.claim").nth(1).bounding_box()
        assert 0 <= box["y"] - at["y"] - at["height"] <= 12 and box["x"] >= 0
        page.mouse.move(box["x"] + 40, box["y"] + 20, steps=5)  # across the gap, onto the note: it stays
        page.wait_for_timeout(400)
        assert note.is_visible()
        page.mouse.move(900, 700)
        note.wait_for(state="hidden")
        assert not watched.wrong


@pytest.mark.browser
def test_keys_open_follow_and_close_it(browser, site):  # noqa: F811
    with opened(browser, site) as watched:
        page = watched.page
        note, button = page.locator("#claim-row_fp8_bytes"), page.locator("button.claim").first
        page.locator(".bd-article h1").evaluate("(title) => { title.tabIndex = -1; title.focus(); }")
        for _ in range(4):
            page.keyboard.press("Tab")
            if button.evaluate("(it) => it === document.activeElement"):
                break
        note.wait_for(state="visible")
        page.keyboard.press("Escape")
        assert note.is_hidden() and button.evaluate("(it) => it === document.activeElement")
        page.keyboard.press("Enter")
        assert note.is_visible() and page.evaluate("document.activeElement.textContent") == "Its row in the ledger"
        page.keyboard.press("Escape")
        assert note.is_hidden() and button.evaluate("(it) => it === document.activeElement")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")  # the link: two steps from a number to its source and formula
        page.wait_for_url("**/ledger.html#row_fp8_bytes")
        assert page.locator("#row_fp8_bytes").is_visible() and not watched.wrong


@pytest.mark.browser
def test_a_tap_opens_it_inside_a_small_screen_and_another_closes_it(browser, site):  # noqa: F811
    with opened(browser, site, 360, has_touch=True) as watched:
        page = watched.page
        for i in (0, 2, 3):
            button = page.locator("button.claim").nth(i)
            note = page.locator(f"#{button.get_attribute('popovertarget')}")
            button.tap()
            note.wait_for(state="visible")
            box = note.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and page.evaluate("document.scrollingElement.scrollWidth") <= 360
            button.tap()
            note.wait_for(state="hidden")
        page.locator("button.claim").first.tap()
        page.locator(".bd-article h1").tap()
        page.locator("#claim-row_fp8_bytes").wait_for(state="hidden")
        assert not watched.wrong


@pytest.mark.browser
def test_without_scripts_a_number_has_a_title_and_its_note(browser, site):  # noqa: F811
    with opened(browser, site, java_script_enabled=False) as watched:
        button = watched.page.locator("button.claim").first
        assert button.get_attribute("title").startswith("reported: One 8-bit row") and button.inner_text() == "576 bytes reported"
        button.click()
        assert watched.page.locator("#claim-row_fp8_bytes").is_visible()
        watched.page.goto(site + "chapters/ledger.html")
        assert watched.page.locator("#row_fp8_bytes").is_visible() and watched.page.locator(".ledger-statuses button").first.is_disabled()


def test_the_ledger_leads_to_the_open_cell_that_recorded_a_value(browser, site):  # noqa: F811
    with opened(browser, site, page="chapters/ledger.html") as watched:
        page = watched.page
        page.locator('a[href="01-small.html#own-mooncake_hit"]').first.click()
        page.wait_for_function("location.hash === '#own-mooncake_hit'")
        details = page.locator(".cell:has(#own-mooncake_hit) details")
        page.wait_for_function("document.querySelector('.cell:has(#own-mooncake_hit) details').open")
        assert details.evaluate("e => e.getBoundingClientRect().top >= 0 && e.getBoundingClientRect().top < innerHeight")
        assert not watched.wrong


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 360])
def test_the_ledger_shows_the_rows_of_a_status(browser, site, width):  # noqa: F811
    with opened(browser, site, width, page="chapters/ledger.html") as watched:
        page = watched.page
        shown = page.locator("tr[data-status]:visible")
        total = shown.count()
        page.get_by_role("button", name="needs a GPU").click()
        assert {shown.nth(i).get_attribute("data-status") for i in range(shown.count())} == {"needs a GPU"}
        assert page.locator(".ledger-shown").inner_text() == f"{shown.count()} of {total} claims: needs a GPU"
        assert page.locator(".ledger-section:visible").count() == 2  # no headings over nothing
        page.get_by_role("button", name="needs a GPU").press("Enter")
        assert shown.count() == total == len(read_claims())
        assert page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth") <= 0 and not watched.wrong


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, site, scheme, width):  # noqa: F811
    for name in ("01-small", "ledger", "status"):
        with opened(browser, site, width, page=f"chapters/{name}.html", scheme=scheme) as watched:
            page = watched.page
            if name == "01-small":
                page.locator("button.claim").first.click()
            page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
            assert page.evaluate(AXE) == [], name
