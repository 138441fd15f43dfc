"""What helps a reader on the built site: notes on words, notebooks to take along, search, links to a setting, and no barrier on any page."""
import io
import json
import re
from html.parser import HTMLParser

import nbformat
import pytest
from browsing import Watched, browser  # noqa: F401  (a fixture)
from test_reading_aids import CHAPTERS, terms
from test_site_browser import ROOT, SITE, pages, site  # noqa: F401  (a fixture)

pytestmark = pytest.mark.browser
CHAPTER = "chapters/01-an-agent-turn.html"
ENTITIES = {"quot", "x27", "amp", "lt", "gt"}  # names of characters in raw HTML: Sphinx reads them as words, and nobody looks for them
AXE = "axe.run().then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(browser, site, scheme):  # noqa: F811
    found = {}
    for name in pages():
        with Watched(browser, 1280, scheme, reduced_motion="reduce") as watched:
            page = watched.open(site["http"] + name)
            page.add_script_tag(path=ROOT / "book/node_modules/axe-core/axe.min.js")
            if violations := page.evaluate(AXE):
                found[name] = violations
    assert not found


def test_every_page_says_what_it_is(site):  # noqa: F811
    for name in pages():
        text = (SITE / name).read_text(encoding="utf-8")
        described = re.findall(r'<meta[^>]* ?name="description"[^>]*>', text)
        assert len(described) == 1 and len(re.search(r'content="([^"]*)"', described[0])[1]) >= 50, (name, described)
        assert re.search(r'<html[^>]* lang="en"', text) and re.search(r"<title>.+</title>", text, re.DOTALL), name


def test_text_comes_before_the_library_of_the_figures(browser, site):  # noqa: F811
    with Watched(browser, 1280) as watched:
        asked = []
        watched.page.on("request", lambda request: asked.append(request.url))
        watched.page.goto(site["http"] + CHAPTER, wait_until="networkidle")
        assert not any("plotly" in url for url in asked), "the first figure is far below"
        watched.page.locator("figure.minfigure").first.scroll_into_view_if_needed()
        watched.page.locator("figure.minfigure .main-svg").first.wait_for()
        watched.page.wait_for_function("[...document.querySelectorAll('figure.minfigure')].every((figure) => figure.querySelector('.main-svg'))")
        assert sum("plotly" in url for url in asked) == 1 and not watched.wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_or_dark_is_settled_before_any_script_is_loaded(browser, site, scheme):  # noqa: F811
    with Watched(browser, 1280, scheme) as watched:
        watched.page.route("**/*.js*", lambda route: route.abort())
        watched.page.goto(site["http"] + CHAPTER)
        assert watched.page.evaluate("document.documentElement.dataset.theme") == scheme
        assert watched.page.evaluate("[...document.querySelectorAll('.logo__image')].filter((logo) => logo.offsetHeight).length") == 1


def test_scripts_wait_for_the_text_and_none_is_for_another_page(site):  # noqa: F811
    for name in pages():
        if name != "search.html":
            scripts = re.findall(r"<script([^>]* src=[^>]*)>", (SITE / name).read_text(encoding="utf-8"))
            assert [text for text in scripts if "defer" not in text and "documentation_options.js" not in text] == [], name
            assert not any("searchindex" in text or "plotly" in text for text in scripts), name


# --- words ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_word_shows_its_entry_to_pointer_and_keyboard(browser, site, scheme):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.open(site[scheme] + CHAPTER)
        note, word = page.locator(".note"), page.locator("[data-note=note-term-row]")
        assert not note.is_visible()
        word.hover()
        note.wait_for(state="visible")
        assert note.inner_text().startswith("What one token leaves in one layer")
        note.hover()  # the pointer may go onto the note
        page.wait_for_timeout(0)
        assert note.is_visible()
        page.keyboard.press("Escape")
        assert not note.is_visible()
        page.mouse.move(5, 5)
        word.evaluate("(word) => { const before = document.createElement('button'); before.id = 'before'; word.before(before); before.focus(); }")
        page.keyboard.press("Tab")
        assert note.is_visible() and "What one token leaves" in note.inner_text()
        spoken = word.evaluate("(word) => document.getElementById(word.getAttribute('aria-describedby')).textContent")
        assert spoken.startswith("What one token leaves in one layer")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"glossary\.html#term-row$"))
        assert not watched.wrong


def test_a_tap_shows_the_entry_and_a_second_one_follows_the_link(browser, site):  # noqa: F811
    with Watched(browser, 360, has_touch=True) as watched:
        page = watched.open(site["http"] + CHAPTER)
        note = page.locator(".note")
        for word in page.locator("[data-note]").all():
            word.scroll_into_view_if_needed()
            word.tap()
            assert note.is_visible() and page.url.endswith(CHAPTER), word.inner_text()
            box = note.bounding_box()
            assert 0 <= box["x"] and box["x"] + box["width"] <= 360 and box["y"] >= 0 and box["y"] + box["height"] <= 900, word.inner_text()
            page.touchscreen.tap(3, 450)
            assert not note.is_visible()
        word.tap()
        word.tap()
        page.wait_for_url(re.compile(r"glossary\.html#term-"))
        assert not watched.wrong


def test_pages_without_such_words_load_no_script_for_them(site):  # noqa: F811
    for name in pages():
        text = (SITE / name).read_text(encoding="utf-8")
        assert ("data-note=" in text) == ("_static/notes.js" in text) == ("_static/notes.css" in text), name
        for ident in re.findall(r'data-note="([^"]+)"', text):
            assert f'<div id="{ident}">' in text, (name, ident)


# --- to take along ----------------------------------------------------------------------------------------

def test_each_chapter_offers_its_notebook(browser, site):  # noqa: F811
    for chapter in CHAPTERS:
        with Watched(browser, 1280) as watched:
            page = watched.open(f"{site['http']}chapters/{chapter.stem}.html")
            links = page.locator(".dropdown-download-buttons a").evaluate_all("(links) => links.map((link) => link.href)")
            (address,) = [link for link in links if link.endswith(".ipynb")]
            answer = page.request.get(address)
            assert answer.ok
            book = nbformat.read(io.StringIO(answer.text()), as_version=4)
            assert sum(cell.cell_type == "code" for cell in book.cells) == chapter.read_text(encoding="utf-8").count("```{code-cell}")
            assert not watched.wrong


def test_the_figures_on_one_page_are_those_of_the_chapters(site):  # noqa: F811
    figure = re.compile(r'<figure class="minfigure">.*?</figure>', re.DOTALL)
    page = (SITE / "reference/ten-figures.html").read_text(encoding="utf-8")
    own = [text for chapter in CHAPTERS for text in figure.findall((SITE / f"chapters/{chapter.stem}.html").read_text(encoding="utf-8"))]
    shown = figure.findall(page)
    assert len(shown) >= 5 and all(text in own for text in shown)


def test_a_link_to_a_setting_opens_the_widget_there(browser, site):  # noqa: F811
    with Watched(browser, 1280, reduced_motion="reduce") as watched:
        page = watched.open(site["http"] + "chapters/02-one-engine.html")
        page.get_by_role("link", name="a large budget").click()
        page.wait_for_function("[...document.querySelectorAll('.minwidget input[type=number]')].some((field) => field.value === '512')")
        assert page.url.endswith("#StepTimeline.max_num_batched_tokens=512") and not watched.wrong


# --- search -----------------------------------------------------------------------------------------------

class Words(HTMLParser):
    """The words of a page's article, without scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.silent = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.silent += tag in ("script", "style")

    def handle_endtag(self, tag):
        self.silent -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.silent:
            self.found.append(data)


@pytest.fixture(scope="module")
def index(site):  # noqa: F811
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))


def stems(text):
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    return {language.stem(word).lower() for word in language.split(text)} | {word.lower() for word in language.split(text)}


def test_search_finds_the_words_of_the_glossary(index):
    glossary = index["docnames"].index("reference/glossary")
    known = {entry[4].casefold() for entry in index["objects"].get("", [])} | {title.casefold() for title in index["indexentries"]}
    for term in terms():
        places = [index[kind].get(stem, []) for kind in ("terms", "titleterms") for word in term.split() for stem in stems(word)]
        assert term in known, term
        assert any(glossary == place or isinstance(place, list) and glossary in place for place in places), term


def test_search_finds_only_words_that_stand_on_the_page(index):
    written = {name: stems(" ".join(Words((SITE / f"{name}.html").read_text(encoding="utf-8")).found)) for name in index["docnames"]}
    for word, places in index["terms"].items():
        for place in places if isinstance(places, list) else [places]:
            assert word in ENTITIES or word.lower() in written[index["docnames"][place]], (word, index["docnames"][place])
