"""Reasoning and content part at the tag, wherever the text is cut into chunks."""
import itertools

import pytest

pytest.importorskip("fastapi", reason="the server's packages are missing; run: pip install 'minengine[serve]'")

from minengine.serve.reasoning import ReasoningParser  # noqa: E402


@pytest.mark.parametrize("text, reasoning, content", [
    ("why</think>so", "why", "so"),
    ("</think>so", "", "so"),
    ("</thi</think>", "</thi", ""),
    ("a</think></think>", "a", "</think>"),
    ("cut </thin", "cut </thin", ""),
    ("", "", ""),
])
def test_every_split_gives_the_same(text, reasoning, content):
    for number in range(3):
        for cuts in itertools.combinations(range(1, len(text)), number):
            parser = ReasoningParser()
            deltas = [parser.feed(text[a:b]) for a, b in itertools.pairwise((0, *cuts, len(text)))] + [parser.finish()]
            assert "".join(delta.reasoning for delta in deltas) == reasoning
            assert "".join(delta.content for delta in deltas) == content
            assert not any(delta.calls for delta in deltas)


def test_what_is_no_tag_is_passed_on_at_once():
    parser = ReasoningParser()
    assert [parser.feed(chunk).reasoning for chunk in ("so <", "/b", "> then <", "x")] == ["so ", "</b", "> then ", "<x"]
