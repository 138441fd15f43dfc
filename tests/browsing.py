"""What the browser tests share: the Chromium there is, a quiet file server, a page that notes everything that goes wrong on it."""
import contextlib
import functools
import http.server
import os
import shutil
import threading
from urllib.parse import urlsplit

import pytest

REMEDY = "no Chromium was found; on Debian: apt-get install chromium"
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


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


def unnamed_controls(page, root):
    """How many inputs and buttons inside `root` a screen reader has no name for."""
    return page.locator(f"{root} input, {root} textarea, {root} button").evaluate_all(
        "(all) => all.filter((control) => !control.labels?.length && !control.ariaLabel && !control.textContent).length")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder):
    """The address of a server of these files on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


class Watched:
    """A page that keeps a list of everything that went wrong on it."""

    def __init__(self, browser, width, scheme="light", **options):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
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
        if "/webfonts/" in url.path and "_static" in url.path:
            self.wrong.append(f"icon font, though icons are drawn: {request.url}")

    def open(self, url):
        self.page.goto(url, wait_until="load")
        self.page.keyboard.press("Shift")  # figures below the window are drawn at a reader's first sign of life
        for drawn in ("[...document.querySelectorAll('figure.minfigure')].every((figure) => figure.querySelector('.main-svg'))",
                      "[...document.querySelectorAll('.minwidget')].every((widget) => widget.dataset.state)"):
            self.page.wait_for_function(f"() => {drawn}", timeout=20_000)
        return self.page

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()
