"""The built site in a real browser: every page, from a server under a sub-path and from files, wide and narrow."""
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browsing import Watched, browser, served  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
pytestmark = pytest.mark.browser

# What a reader sees of each figure: shapes with an extent in the plot area, a caption, a text alternative, a table with rows.
FIGURES = """() => [...document.querySelectorAll("figure.minfigure")].map((figure) => ({
    name: figure.querySelector("figcaption").textContent,
    shapes: [...figure.querySelectorAll(".cartesianlayer .trace path, .cartesianlayer .trace image, .pielayer path")].filter((shape) => {
        const box = shape.getBoundingClientRect();
        return box.width + box.height > 1;
    }).length,
    clipped: figure.querySelector(".main-svg")?.getBoundingClientRect().right > document.documentElement.clientWidth + 1,
    alt: figure.querySelector("[role=img]").getAttribute("aria-label"),
    rows: figure.querySelectorAll("tbody tr").length,
}))"""


@pytest.fixture(scope="module")
def site(browser):
    """The site, up to date: `make test` has built it already, so this is a look at a stamp."""
    pytest.importorskip("jupyter_book", reason="pip install -c constraints.txt -e .[book]")
    done = subprocess.run([sys.executable, ROOT / "book/build.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with served(SITE.parent) as address:  # the site lies at /html/, not at the root
        yield {"http": address + "html/", "file": SITE.as_uri() + "/"}


def pages():
    return sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if "_static" not in path.parts)


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_page_is_whole(browser, site, scheme, width):
    assert "index.html" in pages() and len(pages()) >= 4
    defects = []
    for name in pages():
        with Watched(browser, width) as watched:
            page = watched.open(site[scheme] + name)
            overflow = page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
            if overflow > 1:
                watched.wrong.append(f"scrolls sideways by {overflow} px")
            for figure in page.evaluate(FIGURES):
                if figure["shapes"] == 0:
                    watched.wrong.append(f"drew nothing: {figure['name']}")
                if figure["clipped"]:
                    watched.wrong.append(f"wider than the page: {figure['name']}")
                if not (figure["name"] and figure["alt"] and figure["rows"]):
                    watched.wrong.append(f"caption, text alternative or table is missing: {figure}")
            if page.evaluate("document.querySelectorAll('.minwidget:not([data-state=alive])').length"):
                watched.wrong.append("a widget is not alive")
            defects += [f"{name} at {width} px: {text}" for text in watched.wrong]
    assert not defects, "\n".join(defects)


def test_links_between_pages_lead_somewhere(browser, site):
    broken = []
    for name in pages():
        with Watched(browser, 1280) as watched:
            links = watched.open(site["file"] + name).evaluate("[...document.querySelectorAll('a[href]')].map((a) => a.href)")
        for link in links:
            url = urlsplit(link)
            if url.scheme == "file" and not Path(url.path).exists():
                broken.append(f"{name}: {link}")
    assert not broken, "\n".join(broken)


def test_figures_follow_the_theme_without_a_reload(browser, site):
    colour = "() => document.querySelector('figure.minfigure .main-svg text').style.fill"
    with_figures = [name for name in pages() if 'class="minfigure"' in (SITE / name).read_text(encoding="utf8")]
    assert with_figures
    with Watched(browser, 1280, "dark") as watched:
        page = watched.open(site["file"] + with_figures[0])
        dark = page.evaluate(colour)
        page.evaluate("document.documentElement.dataset.theme = 'light'")
        page.wait_for_function(f"({colour})() !== {dark!r}", timeout=10_000)
        light = page.evaluate(colour)
        assert brightness(dark) > 150 > 90 > brightness(light), (dark, light)
        assert not watched.wrong


def brightness(css):
    values = [int(part) for part in css.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(values) / 3
