"""The chat page's parts in a browser: events, answers, text and code, and what every reader needs of the page."""
import random
from pathlib import Path

import pytest
from browsing import browser, unnamed_controls  # noqa: F401  (a fixture)
from chat_page import Chat, expect, site  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
AXE = "axe.run().then((found) => found.violations.map((it) => [it.id, it.nodes.map((node) => node.html.slice(0, 200))]))"

EVENTS = ("\ufeff: a comment\r\n\r\ndata: {\"a\": 1}\n\nevent: x\ndata:two\r\ndata:  lines\r\n\r\ndata: Zürich 北京 🚢\r\rid: 4\n\ndata\n\ndatum: no\n\n"
          "data: [DONE]\n\ndata: never ended\n")
DATA = ['{"a": 1}', "two\n lines", "Zürich 北京 🚢", "", "[DONE]"]


def test_events_are_found_however_their_bytes_are_cut(browser, site):  # noqa: F811
    stream = EVENTS.encode()
    draw = random.Random(6)
    cuts = [[at] for at in range(len(stream) + 1)] + [list(range(len(stream)))]
    cuts += [sorted(draw.choices(range(len(stream) + 1), k=draw.randint(2, 12))) for _ in range(500)]
    with Chat(browser, site) as chat:
        found = chat.page.evaluate("""async ([bytes, cuts]) => {
            const { EventData } = await import("./page/stream.js");
            const whole = new Uint8Array(bytes);
            return cuts.map((at) => {
                const events = new EventData();
                return [0, ...at].flatMap((start, i) => events.feed(whole.subarray(start, at[i] ?? whole.length)));
            });
        }""", [list(stream), cuts])
    assert [(at, got) for at, got in zip(cuts, found) if got != DATA] == []


def test_an_answer_in_chunks_is_put_together(browser, site):  # noqa: F811
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}, {"reasoning_content": "m."}, {"content": "Well, "}, {"content": "so:"},
              {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]},
              {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}},
                              {"index": 1, "id": "c1", "function": {"name": "g", "arguments": "{}"}, "error": {"code": "undeclared_tool", "message": "m"}}]}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}, {"choices": [], "usage": {"prompt_tokens": 3}, "timeline": {"queue_s": 0}}]
    with Chat(browser, site) as chat:
        answer, shown = chat.page.evaluate("""async (chunks) => {
            const { emptyAnswer, merge } = await import("./page/stream.js");
            const answer = emptyAnswer();
            const shown = chunks.map((chunk) => merge(answer, chunk));
            return [answer, shown];
        }""", chunks)
    assert answer == {
        "content": "Well, so:", "reasoning": "Hmm.", "finish": "tool_calls", "usage": {"prompt_tokens": 3}, "timeline": {"queue_s": 0},
        "calls": [{"id": "c0", "name": "f", "arguments": '{"a": 1}', "error": None},
                  {"id": "c1", "name": "g", "arguments": "{}", "error": {"code": "undeclared_tool", "message": "m"}}]}
    assert shown == [False] + [True] * 6 + [False, False]


EVIL = '<img src=x onerror="document.title=1"><script>document.title=2</script>&lt;b&gt;'


def test_what_a_model_writes_is_only_text(browser, site):  # noqa: F811
    with Chat(browser, site) as chat:
        before = chat.page.title()
        item = chat.page.evaluate_handle("""async (evil) => {
            const { addMessage, showAnswer } = await import("./page/message.js");
            const item = addMessage(messages, evil, "answer");
            const call = { id: evil, name: evil, arguments: evil, error: { code: evil, message: evil } };
            showAnswer(item, { content: `${evil}\\n\\`\\`\\`${evil}\\n${evil}\\n\\`\\`\\``, reasoning: evil, calls: [call] });
            return item;
        }""", EVIL).as_element()
        assert item.evaluate("(item) => item.querySelectorAll('img, script, b').length") == 0
        assert item.evaluate("(item) => item.textContent").count(EVIL) == 8  # name, reasoning, text, code, call, arguments, code and sentence of its mark
        assert chat.page.title() == before
        assert chat.wrong == []


@pytest.mark.parametrize("text, parts", [
    ("", []), ("plain", [[None, "plain"]]),
    ("a\n\nb\n```py\nx = 1\n\n  y\n```\nc", [[None, "a\n\nb"], ["py", "x = 1\n\n  y"], [None, "c"]]),
    ("```\nopen", [["", "open"]]), ("```\n```", [["", ""]]), ("one ``` inside, ```two```", [[None, "one ``` inside, ```two```"]]),
    ("```js\n```py\n```", [["js", "```py"]])])
def test_code_is_told_from_text_by_its_fences(browser, site, text, parts):  # noqa: F811
    with Chat(browser, site) as chat:
        found, grown = chat.page.evaluate("""async (text) => {
            const { segments, showText } = await import("./page/message.js");
            const [whole, grown] = ["div", "div"].map((tag) => document.createElement(tag));
            showText(whole, text);
            for (let end = 0; end <= text.length; end += 1) showText(grown, text.slice(0, end));
            return [segments(text).map(({ language, text }) => [language, text]), grown.isEqualNode(whole)];
        }""", text)
    assert found == parts and grown


# --- for every reader ---


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_page(browser, site, scheme, width):  # noqa: F811
    with Chat(browser, site, width, scheme=scheme).ready(max_tokens=4) as chat:
        chat.page.locator("#tools-panel > summary").click()
        chat.page.locator("#example").click()
        chat.exchange(f"{'long' * 100}\n```text\n{'wide ' * 60}{'code' * 60}\n```")
        chat.page.evaluate("""async () => {
            const { addMessage, showAnswer } = await import("./page/message.js");
            const error = { code: "undeclared_tool", message: "w".repeat(300) };
            showAnswer(addMessage(messages, "m".repeat(300), "answer"), {
                content: "text", reasoning: "r".repeat(300), calls: [{ name: "n".repeat(64), arguments: "a".repeat(300), error }],
            });
        }""")
        chat.page.locator(".reasoning:visible > summary").click()
        chat.set(temperature=-1)
        chat.type("Hello")
        expect(chat.page.locator("#error")).not_to_be_empty()
        assert chat.page.evaluate("document.documentElement.scrollWidth") <= width
        assert unnamed_controls(chat.page, "body") == 0
        chat.page.evaluate((ROOT / "book/node_modules/axe-core/axe.min.js").read_text())
        assert chat.page.evaluate(AXE) == []


@pytest.mark.parametrize("motion, name", [("reduce", "none"), ("no-preference", "breathe")])
def test_nothing_moves_for_who_asked_for_stillness(browser, site, motion, name):  # noqa: F811
    with Chat(browser, site, reduced_motion=motion) as chat:
        assert chat.page.evaluate("""async () => {
            const { addMessage } = await import("./page/message.js");
            const item = addMessage(messages, "smollm2", "answer");
            item.setAttribute("aria-busy", "true");
            return getComputedStyle(item.querySelector(".words"), "::after").animationName;
        }""") == name
