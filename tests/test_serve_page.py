"""The chat page in a browser, on the real server: its figures are the server's, stopping frees the engine, errors are the server's sentence."""
import json
import re

import pytest
from browsing import browser  # noqa: F401  (a fixture)
from chat_page import COMPLETIONS, PATIENCE, Chat, expect, site  # noqa: F401  (a fixture)
from serving import server

pytestmark = pytest.mark.browser
LONG = "The cache keeps the keys and values of tokens that were read before, in blocks of sixteen. " * 8
STORY = "Tell a very long story about a ship, with many chapters."


def words(seconds):
    ms = 1000 * seconds
    text = f"{seconds:.1f} s" if ms >= 10_000 else f"{seconds:.2f} s" if ms >= 1000 else f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return text.replace(" ", "\u00a0")


def content(chunks):
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


# --- what a reader does ---


def test_an_answer_stands_with_what_the_server_says_it_cost(browser, site):  # noqa: F811
    with Chat(browser, site).ready(max_tokens=12) as chat:
        body, chunks, answer = chat.exchange("What is a cache?")
        usage, timeline = chunks[-1]["usage"], chunks[-1]["timeline"]
        assert answer.locator(".words").inner_text().split() == content(chunks).split()
        first, last = timeline["token_s"][0], timeline["token_s"][-1]
        at_server, here = chat.figure(answer, "ttft").split(", ")
        assert at_server == f"{words(timeline['ttft_s'])} at the server" and re.fullmatch(r"[\d.]+\u00a0m?s here", here)
        assert chat.figure(answer, "speed") == f"{(len(timeline['token_s']) - 1) / (last - first):.1f}\u00a0tok/s"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert chat.figure(answer, "cached") == f"{cached} of {usage['prompt_tokens']}\u00a0tokens cached"
        assert chat.figure(answer, "tokens") == f"{usage['completion_tokens']}\u00a0tokens" == "12\u00a0tokens"
        gap = max(after - before for before, after in zip(timeline["token_s"], timeline["token_s"][1:]))
        assert answer.locator("figcaption span").all_inner_texts() == [
            f"queue {words(timeline['queue_s'])}", f"prefill {words(timeline['ttft_s'] - timeline['queue_s'])}",
            f"12\u00a0tokens until {words(last)}, at most {words(gap)} apart"]
        assert answer.locator("path.ticks").get_attribute("d").count("M") == 12
        assert answer.locator(".note").inner_text() == "Cut off at the most tokens allowed."
        assert body["messages"] == [{"role": "user", "content": "What is a cache?"}]
        assert chat.wrong == []


def test_the_second_message_finds_the_first_in_the_cache(browser, site):  # noqa: F811
    with Chat(browser, site).ready() as chat:
        chat.set(system="You are brief.", seed=7)
        _, chunks, _ = chat.exchange(LONG)
        body, second, answer = chat.exchange("And then?")
        cached = second[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > chunks[-1]["usage"]["prompt_tokens"] - 16
        assert chat.figure(answer, "cached").startswith(f"{cached} of ")
        assert body["messages"] == [{"role": "system", "content": "You are brief."}, {"role": "user", "content": LONG},
                                    {"role": "assistant", "content": content(chunks)}, {"role": "user", "content": "And then?"}]
        assert (body["model"], body["temperature"], body["max_completion_tokens"], body["seed"]) == ("smollm2", 0, 8, 7)
        assert chat.wrong == []


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_frees_the_engine_and_keeps_what_was_said(browser, site, way):  # noqa: F811
    with Chat(browser, site).ready(max_tokens=1500) as chat:
        chat.type(STORY)
        expect(chat.page.locator(".answer .words p")).not_to_be_empty(timeout=PATIENCE)
        assert site.engine.stats().num_running == 1
        chat.page.locator("#field").fill("My next")  # a reader may write on
        chat.page.locator("#stop").click() if way == "button" else chat.page.locator("#field").press("Escape")
        expect(chat.answers).to_have_count(1)
        site.wait_until(lambda stats: stats.num_running == 0 and stats.kv_cache_usage == 0)
        assert chat.answers.locator(".note").inner_text().startswith("Stopped here.")
        assert chat.answers.locator(".figures .ttft dt").inner_text() == "First text"
        expect(chat.page.locator("#field")).to_have_value("My next")
        expect(chat.page.locator("#field")).to_be_focused()
        assert chat.page.locator("#send").is_visible() and not chat.page.locator("#stop").is_visible()
        assert [wrong for wrong in chat.wrong if not wrong.startswith("failed:")] == []  # the stopped request counts as failed
        chat.set(max_tokens=8)
        body, _, _ = chat.exchange("Go on.")
        said = body["messages"][1]
        assert said["role"] == "assistant" and said["content"].split() == chat.answers.first.locator(".words").inner_text().split()


def test_a_new_conversation_ends_the_running_answer_and_begins_empty(browser, site):  # noqa: F811
    with Chat(browser, site).ready(max_tokens=1500) as chat:
        chat.type(STORY)
        expect(chat.page.locator(".answer .words p")).not_to_be_empty(timeout=PATIENCE)
        chat.page.locator("#reset").click()
        site.wait_until(lambda stats: stats.num_running == 0)
        expect(chat.page.locator(".message")).to_have_count(0)
        chat.set(max_tokens=8)
        body, _, _ = chat.exchange("Hello")
        assert body["messages"] == [{"role": "user", "content": "Hello"}]
        expect(chat.page.locator(".message")).to_have_count(2)


def test_a_stream_leaves_earlier_messages_alone_and_is_spoken_once(browser, site):  # noqa: F811
    with Chat(browser, site).ready(max_tokens=24) as chat:
        chat.exchange("Hello")
        chat.page.evaluate("""() => {
            window.seen = { elsewhere: 0, spoken: [] };
            const count = new MutationObserver((all) => (window.seen.elsewhere += all.length));
            for (const old of messages.children) count.observe(old, { subtree: true, childList: true, characterData: true, attributes: true });
            new MutationObserver(() => window.seen.spoken.push(spoken.textContent)).observe(spoken, { childList: true });
        }""")
        _, chunks, _ = chat.exchange("Count to five.")
        seen = chat.page.evaluate("window.seen")
        assert seen["elsewhere"] == 0
        assert seen["spoken"] == ["Waiting for the answer.", f"{content(chunks)} Cut off at the most tokens allowed."]
        assert chat.page.locator("[aria-live], [role=log]").count() == 0


def test_a_reader_who_has_scrolled_away_is_left_there(browser, site):  # noqa: F811
    with Chat(browser, site, width=360).ready(max_tokens=40) as chat:
        chat.exchange(LONG)
        assert chat.page.evaluate("document.documentElement.scrollTop") > 0  # at the end, where the answer is
        chat.page.locator("#field").fill("And then?")
        chat.page.locator("#field").press("Enter")
        chat.page.evaluate("document.documentElement.scrollTop = 0")
        expect(chat.answers).to_have_count(2, timeout=PATIENCE)
        assert chat.page.evaluate("document.documentElement.scrollTop") == 0


def test_a_call_is_shown_as_one_and_its_result_goes_back(browser, site):  # noqa: F811
    with Chat(browser, site).ready(max_tokens=200) as chat:
        chat.page.locator("#tools-panel > summary").click()
        chat.page.locator("#example").click()
        chat.page.locator("#choice").select_option("required")
        body, _, answer = chat.exchange("What is the weather in Oslo, in celsius?")
        assert body["tool_choice"] == "required" and [tool["function"]["name"] for tool in body["tools"]] == ["get_weather"]
        call = answer.locator(".call").first
        expect(call.locator(".name")).to_have_text("get_weather")
        given = call.locator(".arguments").inner_text()
        assert set(json.loads(given)) == {"city", "unit"}
        chat.page.locator("#choice").select_option("none")
        call.locator("textarea").fill('{"degrees": 4}')
        body, _, second = chat.exchange()
        asked, called, result = body["messages"][:3]
        assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": given}
        assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": '{"degrees": 4}'}
        assert second.locator(".words").inner_text().strip()
        assert not answer.locator("button").is_visible() and call.locator("textarea").get_attribute("readonly") is not None
        assert chat.wrong == []


def test_enter_sends_and_shift_enter_does_not(browser, site):  # noqa: F811
    with Chat(browser, site) as chat:
        field = chat.page.locator("#field")
        expect(field).to_be_focused()
        chat.ready(max_tokens=2)
        field.press("Enter")  # nothing to send
        field.press_sequentially("One")
        field.press("Shift+Enter")
        chat.page.keyboard.type("Two")
        expect(field).to_have_value("One\nTwo")
        expect(chat.page.locator(".message")).to_have_count(0)
        body, _, _ = chat.exchange("One\nTwo")
        assert body["messages"][0]["content"] == "One\nTwo"
        expect(field).to_have_value("")
        expect(field).to_be_focused()


# --- when it does not go well ---


def test_a_refusal_is_the_servers_sentence_and_the_words_come_back(browser, site):  # noqa: F811
    with Chat(browser, site).ready(temperature=-1) as chat:
        with chat.page.expect_response(f"**{COMPLETIONS}") as told:
            chat.type("Hello")
        expect(chat.page.locator("#error")).to_have_text(told.value.json()["error"]["message"])
        expect(chat.page.locator("#field")).to_have_value("Hello")
        expect(chat.page.locator(".message")).to_have_count(0)
        chat.set(temperature=0)
        body, _, _ = chat.exchange("Hello")
        assert len(body["messages"]) == 1
        expect(chat.page.locator("#error")).to_be_empty()


def test_tools_that_are_no_json_are_told_of_before_anything_is_sent(browser, site):  # noqa: F811
    with Chat(browser, site).ready() as chat:
        chat.page.locator("#tools-panel > summary").click()
        chat.set(tools='{"name": ')
        chat.page.locator("#tools-panel > summary").click()
        chat.type("Hello")
        expect(chat.page.locator("#error")).to_contain_text("tools: this is not JSON")
        expect(chat.page.locator("#tools")).to_be_focused()
        expect(chat.page.locator("#field")).to_have_value("Hello")
        assert chat.wrong == []


def test_a_server_that_has_gone_is_told_of(browser):  # noqa: F811
    with server("smollm2") as site:
        chat = Chat(browser, site).ready()
    with chat:
        chat.type("Hello")
        expect(chat.page.locator("#error")).to_have_text("the server does not answer: is it still running?")
        expect(chat.page.locator("#field")).to_have_value("Hello")


def test_an_answer_that_breaks_off_stays_and_says_so(browser):  # noqa: F811
    with server("smollm2") as site:
        chat = Chat(browser, site).ready(max_tokens=1500)
        chat.type(STORY)
        expect(chat.page.locator(".answer .words p")).not_to_be_empty(timeout=PATIENCE)
    with chat:  # the server gave the answer its few seconds, then closed the connection
        expect(chat.answers.locator(".note")).to_have_text("Broken off.")
        expect(chat.page.locator("#error")).not_to_be_empty()
        expect(chat.page.locator("#field")).to_have_value("")
        assert chat.answers.locator(".words").inner_text().strip()


def test_a_key_is_asked_for_and_stays_in_the_tab(browser, tmp_path):  # noqa: F811
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    with server("smollm2", serve={"api_key_file": str(keys)}) as site, Chat(browser, site) as chat:
        page = chat.page
        expect(page.locator("#key")).to_be_focused()
        told = page.locator("#error").inner_text()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#error")).not_to_have_text(told)
        expect(page.locator("#error")).not_to_be_empty()
        page.locator("#key").fill("open-sesame")
        page.locator("#key").press("Enter")
        chat.ready()
        expect(page.locator("#error")).to_be_empty()
        chat.exchange("Hello")
        assert page.evaluate("[Object.values({ ...sessionStorage }), Object.values({ ...localStorage }), document.cookie]") == [["open-sesame"], [], ""]
