"""What the chat page's tests share: a server with its page, and the page by what a reader sees and touches."""
import json

import pytest
from browsing import Watched
from serving import server

expect = pytest.importorskip("playwright.sync_api", reason="pip install -c constraints.txt -e .[test]").expect

PATIENCE = 120_000  # ms that an answer may take on a busy machine
COMPLETIONS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def site():
    with server("smollm2") as running:
        yield running


class Chat(Watched):
    """The page by what a reader sees and touches."""

    def __init__(self, browser, site, width=1280, **options):
        super().__init__(browser, width, **options)
        self.site = site
        self.page.goto(f"{site.base_url}/")
        self.answers = self.page.locator(".answer:not([aria-busy])")

    def ready(self, max_tokens=8, temperature=0):
        expect(self.page.locator("#model")).to_have_text("smollm2, up to 2,048 tokens")
        self.open_settings()
        self.set(max_tokens=max_tokens, temperature=temperature)
        return self

    def open_settings(self):
        if not self.page.locator("#system").is_visible():
            self.page.locator("#settings > summary").click()

    def set(self, **fields):
        for name, value in fields.items():
            self.page.locator(f"#{name.replace('_', '-')}").fill(str(value))

    def type(self, text):
        self.page.locator("#field").fill(text)
        self.page.locator("#field").press("Enter")

    def exchange(self, text=None):
        """Send `text` (or what has been prepared), wait for the answer's end: (the request's body, the chunks, the answer's element)."""
        before = self.answers.count()
        with self.page.expect_response(f"**{COMPLETIONS}") as told:
            self.type(text) if text is not None else self.page.locator(".calls button:visible").click()
        expect(self.answers).to_have_count(before + 1, timeout=PATIENCE)
        chunks = [line.removeprefix("data: ") for line in told.value.text().splitlines() if line.startswith("data: ")]
        assert chunks.pop() == "[DONE]"
        return told.value.request.post_data_json, [json.loads(chunk) for chunk in chunks], self.answers.nth(before)

    def figure(self, answer, kind):
        return answer.locator(f".figures .{kind} dd").inner_text()
