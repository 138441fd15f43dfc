"""The built site in a real browser: every page, from a server under a sub-path and from files, wide and narrow."""
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
REMEDY = "no Chromium was found; on Debian: apt-get install chromium"
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
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
def browser():
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(REMEDY)
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -c constraints.txt -e .[test]")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(browser):
    """The site, up to date: `make test` has built it already, so this is a look at a stamp."""
    pytest.importorskip("jupyter_book", reason="pip install -c constraints.txt -e .[book]")
    done = subprocess.run([sys.executable, ROOT / "book/build.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    handler = functools.partial(QuietHandler, directory=str(SITE.parent))  # the site lies at /html/, not at the root
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"http": f"http://127.0.0.1:{server.server_address[1]}/html/", "file": SITE.as_uri() + "/"}
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def pages():
    return sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if "_static" not in path.parts)


class Watched:
    """A page that keeps a list of everything that went wrong on it."""

    def __init__(self, browser, width, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.wrong = []
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"uncaught: {error}"))
        self.page.on("requestfailed", lambda request: self.wrong.append(f"failed: {request.url}"))
        self.page.on("response", lambda response: response.status >= 400 and self.wrong.append(f"{response.status}: {response.url}"))
        self.page.on("request", self._same_host)

    def _same_host(self, request):
        url = urlsplit(request.url)
        if url.scheme not in ("file", "data", "blob") and url.hostname != "127.0.0.1":
            self.wrong.append(f"off-host: {request.url}")

    def open(self, url):
        self.page.goto(url, wait_until="load")
        self.page.wait_for_function("() => [...document.querySelectorAll('figure.minfigure')].every((f) => f.querySelector('.main-svg'))", timeout=20_000)
        return self.page

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()


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
